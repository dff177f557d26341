"""The machinery of a run, one noun a file."""
