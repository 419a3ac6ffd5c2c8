"""Reductions over axes, on CUDA."""
