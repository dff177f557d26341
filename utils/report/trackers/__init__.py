"""Experiment trackers and the threads that keep them from delaying a run. Imports utils/*.py and models."""
