"""A dataset YAML becomes batches. data and models never import each other."""
