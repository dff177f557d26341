"""Detections become metrics. Imports models, data and the rooms of utils before it."""
