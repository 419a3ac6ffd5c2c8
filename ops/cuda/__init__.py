"""Operators on CUDA devices. Importing this package registers them; it needs neither CuPy nor a device."""

from dagexec.ops.cuda import (
    activation,
    activation_gradient,
    columns,
    concat,
    conv_operators,
    copy,
    elementwise,
    elementwise_gradient,
    product,
    reduction,
    reduction_gradient,
    shape,
    slicing,
    softmax,
    unary,
    unary_gradient,
)

__all__ = [
    "activation",
    "activation_gradient",
    "columns",
    "concat",
    "conv_operators",
    "copy",
    "elementwise",
    "elementwise_gradient",
    "product",
    "reduction",
    "reduction_gradient",
    "shape",
    "slicing",
    "softmax",
    "unary",
    "unary_gradient",
]
