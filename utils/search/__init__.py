"""Searches by trial: hyperparameters over many trainings, and the batch that fits. Imports every package before it."""
