"""Charts of a run: data in, one picture file out. Imports utils/evaluation and the palette.

Every function is pure but for the file that it writes, keeps no global state, and may be called from any thread:
figures are made by matplotlib's objects, without pyplot. `target` is a .png or .jpg file, replaced atomically. They
raise what goes wrong, such as an OSError where it cannot be written; whether a run survives a failed picture is for the
caller to decide.
"""
