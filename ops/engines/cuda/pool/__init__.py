"""Pooling, on CUDA."""
