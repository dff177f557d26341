"""What a run prints, plots and writes. Imports every room before it."""
