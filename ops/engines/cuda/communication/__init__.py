"""Parts of collective operators that compute, on CUDA."""
