"""Verification of exported files: each is compared with the network that it was exported from."""
