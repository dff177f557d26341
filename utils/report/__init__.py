"""What a run prints, draws and writes. Imports every room before it."""
