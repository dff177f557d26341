"""The flags of the commands: fields of frozen dataclasses, read from command lines and from Python.

Those of train.py, and the hyperparameters, are in utils/config.py.
"""
