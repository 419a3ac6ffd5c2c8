"""Tensors made from arguments or at random, on CUDA."""
