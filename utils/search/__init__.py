"""The search for hyperparameters: a run of many trainings. Imports every room before it."""
