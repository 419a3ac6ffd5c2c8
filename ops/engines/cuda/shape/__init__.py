"""Operators that move elements or only change their shape, on CUDA."""
