"""Operators that pick elements by index or mask, on CUDA."""
