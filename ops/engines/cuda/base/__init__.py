"""What families of operators share, on CUDA."""
