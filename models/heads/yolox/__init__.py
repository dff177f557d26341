"""YOLOX's head: no anchors, one box and one objectness a cell."""
