"""A dataset YAML becomes batches."""
