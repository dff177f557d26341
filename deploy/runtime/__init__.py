"""Model runtimes: opening `--weights` of any format and running it on images."""
