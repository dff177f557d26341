"""Two detectors on the same images: what differs, and whether by more than chance."""
