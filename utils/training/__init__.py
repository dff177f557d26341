"""Parts of a training that train.py calls: data, start, validation, result."""
