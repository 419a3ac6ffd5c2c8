"""Activations, softmax among them, on CUDA."""
