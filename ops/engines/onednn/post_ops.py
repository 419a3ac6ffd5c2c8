"""Post-ops as attributes of oneDNN primitives.

The numbers of functions are those of `dnnl_alg_kind_t` in the C headers of oneDNN 3.1 (`dnnl_types.h`), Apache-2.0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from dagexec.core.dtypes import from_numpy
from dagexec.errors import UnsupportedFeatureError
from dagexec.ops.base.layout import BLOCKS, NCHW, NHWC, logical_shape
from dagexec.ops.engines.onednn.binding import Library
from dagexec.ops.engines.onednn.descriptors import POST_OP, SRC_1, Array, Attributes, Descriptor
from dagexec.ops.families.activation.post_ops import SUM, PostOp

_RELU, _TANH, _ELU, _SQUARE, _ABS, _SQRT, _LINEAR, _SOFTPLUS, _HARDSIGMOID, _LOGISTIC, _EXP = range(0x20, 0x2B)
_GELU_TANH, _SWISH, _LOG, _CLIP, _, _POW, _GELU_ERF, _, _MISH, _HARDSWISH = range(0x2B, 0x35)

ELTWISE: Mapping[str, Callable[[float, float], tuple[int, float, float]]] = {
    "relu": lambda a, b: (_RELU, 0.0, 0.0),
    "leaky_relu": lambda a, b: (_RELU, a, 0.0),
    "clip": lambda a, b: (_CLIP, a, b),
    "sigmoid": lambda a, b: (_LOGISTIC, 0.0, 0.0),
    "tanh": lambda a, b: (_TANH, 0.0, 0.0),
    "elu": lambda a, b: (_ELU, a, 0.0),
    "swish": lambda a, b: (_SWISH, a, 0.0),
    "hardswish": lambda a, b: (_HARDSWISH, 1 / 6, 0.5),
    "hardsigmoid": lambda a, b: (_HARDSIGMOID, a, b),
    "gelu_erf": lambda a, b: (_GELU_ERF, 0.0, 0.0),
    "gelu_tanh": lambda a, b: (_GELU_TANH, 0.0, 0.0),
    "abs": lambda a, b: (_ABS, 0.0, 0.0),
    "sqrt": lambda a, b: (_SQRT, 0.0, 0.0),
    "square": lambda a, b: (_SQUARE, 0.0, 0.0),
    "exp": lambda a, b: (_EXP, 0.0, 0.0),
    "log": lambda a, b: (_LOG, 0.0, 0.0),
    "linear": lambda a, b: (_LINEAR, a, b),
    "pow": lambda a, b: (_SQRT, 0.0, 0.0) if (a, b) == (1.0, 0.5) else (_POW, a, b),
    "softplus": lambda a, b: (_SOFTPLUS, 1.0, 0.0),
    "mish": lambda a, b: (_MISH, 0.0, 0.0),
}
"""By kind, algorithm, alpha and beta of an eltwise primitive or post-op, from the numbers of the PostOp."""

BINARY = {"add": 0x1FFF0, "mul": 0x1FFF1, "max": 0x1FFF2, "min": 0x1FFF3, "div": 0x1FFF4, "sub": 0x1FFF5}
"""By kind, the algorithm of a binary primitive or post-op."""

DROPS_NAN = frozenset({"relu", "clip", "hardsigmoid", "exp", "max", "min"})
"""Those that oneDNN 3.1 computes by maxima and minima that give a number for NaN.

So is `leaky_relu` of slope 0, which is `relu` to it; the others keep NaN, but for `sigmoid` behind the sums of
convolutions that are products of matrices.
"""


def drops_nan(post_ops: Iterable[PostOp], *, behind_sums: bool = True) -> bool:
    """True when one of them may give a number for NaN, behind a layer's sums or in a chain of functions."""
    kinds = DROPS_NAN | {"sigmoid"} if behind_sums else DROPS_NAN
    return any(one.kind in kinds or (one.kind == "leaky_relu" and one.a == 0) for one in post_ops)


def operand_descriptor(library: Library, operand: Array, rank: int, order: str, label: str) -> Descriptor:
    """The logical descriptor of an operand that broadcasts to a result of `rank` physical axes in `order`.

    Orders other than NCHW are for images. Raises UnsupportedFeatureError when the operand has channels within blocks
    and not the blocks, or the other way round: oneDNN counts channels as one axis.
    """
    padded = operand.reshape((1,) * (rank - operand.ndim) + operand.shape)
    meta = from_numpy(operand.dtype)
    if order == NCHW:
        return Descriptor.of(library, padded, meta)
    if order == NHWC:
        strides = [step // padded.itemsize for step in padded.strides]
        if len(padded) == 1 and padded.flags.c_contiguous:
            strides[0] = padded.size  # of a part of an image: the library compares it with that of the result
        shape = logical_shape(NHWC, padded.shape)
        return Descriptor.strided(library, shape, meta, (strides[0], strides[-1], *strides[1:-1]))
    blocks, inner = padded.shape[1], padded.shape[-1]
    if inner == BLOCKS[order]:
        return Descriptor.of_order(library, logical_shape(order, padded.shape), meta, order)
    if blocks == 1:
        return Descriptor.of(library, padded[..., 0], meta)
    raise UnsupportedFeatureError(
        f"{label}: oneDNN cannot read an operand of shape {operand.shape} in order {order}: it has blocks of channels "
        "with one value for each block"
    )


def append_post_ops(
    attributes: Attributes,
    library: Library,
    post_ops: Sequence[PostOp],
    operands: Mapping[int, Array],
    result: tuple[int, str],
    label: str,
) -> dict[int, tuple[Descriptor, Array]]:
    """Append `post_ops` to the attributes; returns the further arguments of an execution: the operands.

    `operands` are by input number, `result` is the number of physical axes of the result and its order. Raises
    UnsupportedFeatureError for what oneDNN cannot do.
    """
    arguments: dict[int, tuple[Descriptor, Array]] = {}
    for position, post_op in enumerate(post_ops):
        if post_op.kind == SUM:
            attributes.add_to_destination()
        elif post_op.input < 0:
            algorithm, alpha, beta = ELTWISE[post_op.kind](post_op.a, post_op.b)
            attributes.eltwise(algorithm, alpha, beta)
        else:
            operand = operands[post_op.input]
            descriptor = operand_descriptor(library, operand, *result, label)
            attributes.binary(BINARY[post_op.kind], descriptor)
            arguments[POST_OP * (position + 1) | SRC_1] = (descriptor, operand)
    return arguments
