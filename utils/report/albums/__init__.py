"""Pages that show pictures of a dataset: what `--check-data` found, and what to label next."""
