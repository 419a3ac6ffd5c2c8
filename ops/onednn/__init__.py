"""Engine ONEDNN: operators computed by oneDNN's primitives, where the library is installed."""

from dagexec.ops.onednn import convolution, elementwise, pooling, product, quantized, reorder

__all__ = ["convolution", "elementwise", "pooling", "product", "quantized", "reorder"]
