"""Run directories and checkpoints: writing, reading, resuming and weights of other programs."""
