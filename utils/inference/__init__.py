"""A picture becomes detections: the same way in val.py, detect.py and exported files."""
