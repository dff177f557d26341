"""What a validation got wrong: what each kind of error costs, the worst ones and their labels, and files of them."""
