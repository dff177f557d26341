"""Weight files of other programs, read without running anything in them: YOLOv5, YOLOX and YOLOv9."""
