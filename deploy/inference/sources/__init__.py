"""Sources of detect.py: images, videos and streams as numbered and timed frames."""
