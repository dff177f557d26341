"""Charts of a run. Imports utils/evaluation and the palette.

Every function writes one .png or .jpg file `target`, atomically. It has no global state and may be called from any
thread: figures are matplotlib objects, without pyplot. Errors are raised; the caller decides whether a run survives.
"""
