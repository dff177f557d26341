"""Output of a run: console, charts, pages, files and trackers. Imports every package before it."""
