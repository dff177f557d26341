"""What writes the files of each format."""
