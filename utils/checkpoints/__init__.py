"""The folder of a run and its checkpoints. Imports models, data and utils up to engine."""
