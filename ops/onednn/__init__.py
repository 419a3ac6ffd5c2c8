"""Engine ONEDNN: operators computed by oneDNN's primitives, where the library is installed."""

from dagexec.ops.onednn import pooling, reorder

__all__ = ["pooling", "reorder"]
