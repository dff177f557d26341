"""Error analysis: cost of each kind of error in mAP50, the worst errors, and files that list them."""
