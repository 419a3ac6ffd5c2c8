"""Convolutions, on CUDA."""
