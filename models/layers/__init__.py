"""The building blocks of a model. Imports torch alone."""
