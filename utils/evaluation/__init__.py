"""Detections become metrics. Imports models, data and the packages of utils before it."""
