"""Images become predictions. Imports utils up to engine, models.layers and models.heads; never data."""
