"""Labels that are likely wrong: found by a detector, ranked and listed."""
