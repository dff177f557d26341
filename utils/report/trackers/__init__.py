"""Experiment trackers and the threads that keep them from delaying a run. Imports the ground floor and models."""
