"""The anchor-based head of YOLOv5."""
