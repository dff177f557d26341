"""Exports are measured beside the network that they were made of: the same pictures, boxes, scores and mAP."""
