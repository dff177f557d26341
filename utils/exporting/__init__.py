"""A trained model becomes a file that other programs run. Imports what lies below, and onnx_ir where it is needed."""
