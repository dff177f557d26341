"""A second head, small and plain: a centre point a cell, without anchors and without objectness."""
