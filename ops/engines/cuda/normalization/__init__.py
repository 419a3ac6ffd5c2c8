"""Normalization of channels, groups and vectors, on CUDA."""
