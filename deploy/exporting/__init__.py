"""Export of a trained detector to ONNX, OpenVINO, TorchScript and other formats."""
