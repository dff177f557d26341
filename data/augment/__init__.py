"""What happens to a sample on its way to the model. Imports data/source and the packages below it."""
