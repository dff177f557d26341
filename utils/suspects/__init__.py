"""Labels that are likely wrong: found by a detector, ranked, listed, and corrected in a copy of the dataset."""
