"""Recurrent layers, on CUDA."""
