"""Engine ONEDNN: operators computed by oneDNN's primitives, where the library is installed."""

from dagexec.ops.onednn import elementwise, pooling, quantized, reorder

__all__ = ["elementwise", "pooling", "quantized", "reorder"]
