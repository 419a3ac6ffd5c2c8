"""Activations, softmax among them."""
