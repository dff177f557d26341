"""HTML pages with dataset images: `--check-data --report` and label errors."""
