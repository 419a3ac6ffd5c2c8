"""The test suite that the onnx package has for backends: its cases, which are excluded and why, and running them."""
