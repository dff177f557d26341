"""One optimizer step. Imports utils/ranks and the rooms below it."""
