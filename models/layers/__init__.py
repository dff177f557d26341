"""Layers of model YAMLs, named by `LAYER_TYPES` in models/build.py. Imports torch alone."""
