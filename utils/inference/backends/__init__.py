"""Exported files and the runtimes that compute them, each behind the interface of a network or of a whole pipeline."""
