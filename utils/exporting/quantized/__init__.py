"""Exports in 8 bits, calibrated on the pictures that the weights were trained on."""
