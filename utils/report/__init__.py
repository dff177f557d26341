"""What a run prints, plots and writes. Imports every package before it."""
