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
    product,
    shape,
    slicing,
    softmax,
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
    "product",
    "shape",
    "slicing",
    "softmax",
    "unary",
]
