"""Pages that show pictures of a dataset: what `--check-data` found, and labels that are likely wrong."""
