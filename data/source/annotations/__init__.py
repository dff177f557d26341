"""What the objects of an image are: label files, Pascal VOC XML and COCO JSON, read as they are."""
