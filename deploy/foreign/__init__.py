"""What comes from elsewhere: downloads, generated images, weights of other programs and formats."""
