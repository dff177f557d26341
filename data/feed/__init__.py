"""Image store, caches, samplers and loaders: from a dataset index to the batches of each rank.

Imports the rest of data and the packages below it.
"""
