"""Detection heads: layers, decoding, target assignment and loss of each.

A head is a subclass of `Head` in head.py and an entry of `HEADS` in models/model_yaml.py; no other module names one.
tests/models/heads/test_contract.py tests the interface on every head.
"""
