"""The kinds of devices: the host, a simulated asynchronous device, and CUDA."""
