"""Optimizer step, schedule, precision, EMA and recipe of a training."""
