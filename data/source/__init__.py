"""Dataset reading: the dataset YAML, and images and labels as a checked index.

Imports the packages of utils up to engine.
"""
