"""The building blocks of a model; `KINDS` in models/build.py gives them their names. Imports torch alone."""
