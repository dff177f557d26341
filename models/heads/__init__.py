"""The last layer of a model and all that belongs to it, a folder a head.

Imports models.layers and the rooms of utils up to engine.
"""
