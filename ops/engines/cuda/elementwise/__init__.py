"""Operators that compute element by element, on CUDA."""
