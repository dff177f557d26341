"""Post-training quantisation to 8 bits."""
