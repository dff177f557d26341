"""What writes the files of each format; what opens them again is in utils/runtime, of weights in utils/checkpoints."""
