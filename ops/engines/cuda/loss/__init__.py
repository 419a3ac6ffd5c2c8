"""Losses and metrics on CUDA."""
