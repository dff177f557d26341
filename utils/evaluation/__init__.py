"""Evaluation: from detections to metrics. Imports models, data and the packages of utils before it."""
