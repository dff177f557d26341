"""One optimizer step. Imports utils/ranks and the packages below it."""
