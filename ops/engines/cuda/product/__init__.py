"""Matrix products, on CUDA."""
