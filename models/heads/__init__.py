"""The last layer of a model and all that belongs to it, a module or a folder a head.

A head is a class derived from `Head` in head.py, and a row of `HEADS` in models/model_yaml.py; nothing else in the
program names one. tests/models/heads/test_contract.py tries on each what every head must do.
Imports models/layers and the packages of utils up to ranks.
"""
