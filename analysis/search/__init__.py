"""Hyperparameter search (`--evolve`) and AutoBatch."""
