"""Likely label errors: suggested by a detector, ranked, and listed."""
