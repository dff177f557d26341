"""Output of a run: console, results.csv and observers."""
