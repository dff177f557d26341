"""Files beside ONNX: of other runtimes, and of torch itself."""
