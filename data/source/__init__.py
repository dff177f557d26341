"""What is there: the dataset YAML, its images and labels, read, checked and indexed.

Imports the packages of utils up to engine.
"""
