"""Dataset checks of `--check-data`."""
