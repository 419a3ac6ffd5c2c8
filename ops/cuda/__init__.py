"""Operators on CUDA devices. Importing this package registers them; it needs neither CuPy nor a device."""

from dagexec.ops.cuda import (
    activation,
    activation_gradient,
    columns,
    concat,
    copy,
    product,
    reduction,
    shape,
    unary,
    unary_gradient,
)

__all__ = [
    "activation",
    "activation_gradient",
    "columns",
    "concat",
    "copy",
    "product",
    "reduction",
    "shape",
    "unary",
    "unary_gradient",
]
