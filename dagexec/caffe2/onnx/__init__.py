"""Caffe2's nets as ONNX models, and ONNX models run by Caffe2's interface."""
