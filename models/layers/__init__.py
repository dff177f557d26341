"""Layers of model YAMLs, named by `KINDS` in models/build.py. Imports torch alone."""
