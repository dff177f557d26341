"""How samples reach the ranks: decoded, cached, sampled and batched.

Imports the rest of data and the packages below it.
"""
