"""What operators compute: a module or small package per family. Importing this package registers them all."""

from dagexec.ops import (
    activation,
    cast,
    concat,
    control,
    dropout,
    elementwise,
    fill,
    index,
    normalization,
    product,
    reduction,
    shape,
    slicing,
    softmax,
    standardization,
    unary,
)

__all__ = [
    "activation",
    "cast",
    "concat",
    "control",
    "dropout",
    "elementwise",
    "fill",
    "index",
    "normalization",
    "product",
    "reduction",
    "shape",
    "slicing",
    "softmax",
    "standardization",
    "unary",
]
