"""`report.html`: a validation, and the training that it ends, as one page that needs nothing but itself."""
