"""YOLOv9's head: the branches of its weights, decoded and trained as those of the anchor-free head."""
