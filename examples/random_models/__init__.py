"""The models of the examples that keep state, written in ONNX."""
