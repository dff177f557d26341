"""Augmentation of training samples, and letterboxing. Imports data/source and the packages below it."""
