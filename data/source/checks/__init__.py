"""What is wrong with a dataset, and what it holds: `--check-data`, and the warnings before a run."""
