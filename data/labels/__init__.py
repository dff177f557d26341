"""Label formats: YOLO label files, Pascal VOC XML and COCO JSON."""
