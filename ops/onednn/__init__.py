"""Engine ONEDNN: operators computed by oneDNN's primitives, where the library is installed."""

from dagexec.ops.onednn import (
    concat,
    convolution,
    elementwise,
    gradient,
    normalization,
    pooling,
    product,
    product_gradient,
    quantized,
    recurrent,
    reduction,
    reorder,
    resampling,
    shuffle,
    softmax,
    transposed,
)

__all__ = [
    "concat",
    "convolution",
    "elementwise",
    "gradient",
    "normalization",
    "pooling",
    "product",
    "product_gradient",
    "quantized",
    "recurrent",
    "reduction",
    "reorder",
    "resampling",
    "shuffle",
    "softmax",
    "transposed",
]
