"""Detection on images, videos and streams, and writing of the results."""
