"""Anchor-based head of YOLOv5."""
