"""Quantized operators, on CUDA."""
