"""Images become predictions, loss, detections."""
