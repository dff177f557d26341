"""What `--source` of detect.py means: pictures, videos and streams become numbered and timed frames."""
