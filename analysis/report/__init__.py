"""`report.html`: a validation, and the training that it ends, as a self-contained page."""
