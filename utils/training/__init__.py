"""The parts of a training that train.py's story names: its data, its state, its validations, its end."""
