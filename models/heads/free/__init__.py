"""The anchor-free head: no anchors, no objectness, positives by how well a prediction finds its object."""
