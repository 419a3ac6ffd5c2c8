"""Engine CUDNN: convolutions and their gradients by cuDNN. Where it has no engine, the default engine computes them."""
