"""The last layer of a model and all that belongs to it, a folder a head.

`models/heads/<folder>/head.py` defines the head: a class derived from `Head` in head.py, whose name is what a model
YAML calls it. Nothing else in the program names a head, so another folder is all that another head takes, and
a row of `ROWS` in tests/models/heads/test_contract.py, which tries on it what every head must do.
Imports models/layers and the rooms of utils up to ranks.
"""
