"""Criteria of pairs and of probabilities, and products of rows of different lengths."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from dagexec.core.dtypes import FLOAT_TYPES, INT32
from dagexec.core.gradient import gradient_by
from dagexec.core.schema import OperatorCall, TensorType
from dagexec.ops.base.array_function import Compute, array_function
from dagexec.ops.base.blocks import Array, compute_dtype

_MARGIN = {"margin": "how far apart is enough"}


def _criterion(
    name: str, names: tuple[str, ...], outputs: tuple[str, ...], doc: str, label: int = -1
) -> Callable[[Compute], Compute]:
    """Decorator: the function computes this operator, whose outputs are like input 0. Input `label` is int32."""

    def infer(call: OperatorCall) -> list[TensorType]:
        call.arguments.float("margin", 0.0)
        for index in range(len(names)):
            call.require_types(index, *((INT32,) if index == label else FLOAT_TYPES))
            call.require_shape(index, call.inputs[0].shape, f"that of {names[0]}")
        call.require_same_type(*(index for index in range(len(names)) if index != label))
        return [call.inputs[0]] * len(outputs)

    return array_function(
        name, infer=infer, doc=doc, input_names=names, output_names=outputs, args=_MARGIN if label >= 0 else {}
    )


@_criterion(
    "CosineEmbeddingCriterion",
    ("S", "Y"),
    ("output",),
    "1 - S where Y is 1, else max(0, S - margin); margin 0 by default.",
    1,
)
def cosine_embedding(call: OperatorCall, s: Array, y: Array) -> Sequence[Array]:
    """S is a cosine, Y says whether the pair belongs together (1) or not (-1)."""
    return [np.where(y == 1, 1 - s, np.maximum(s - np.float32(call.arguments.float("margin", 0.0)), 0))]


@_criterion(
    "CosineEmbeddingCriterionGradient",
    ("S", "Y", "dOutput"),
    ("dS",),
    "-dOutput where Y is 1, else dOutput where S is above the margin, else 0.",
    1,
)
def cosine_embedding_slope(call: OperatorCall, s: Array, y: Array, dy: Array) -> Sequence[Array]:
    """The derivative, times dOutput."""
    margin = np.float32(call.arguments.float("margin", 0.0))
    return [np.where(y == 1, -dy, np.where(s >= margin, dy, np.float32(0)))]


gradient_by("CosineEmbeddingCriterion", "CosineEmbeddingCriterionGradient", ("X0", "X1", "dY"))


@_criterion(
    "MarginRankingCriterion", ("X1", "X2", "Y"), ("loss",), "max(0, margin - Y (X1 - X2)); margin 1 by default.", 2
)
def margin_ranking(call: OperatorCall, x1: Array, x2: Array, y: Array) -> Sequence[Array]:
    """Y is 1 where X1 should be the greater one, -1 where X2."""
    return [np.maximum(np.float32(call.arguments.float("margin", 1.0)) - y * (x1 - x2), 0)]


@_criterion(
    "MarginRankingCriterionGradient",
    ("X1", "X2", "Y", "dLoss"),
    ("dX1", "dX2"),
    "-Y dLoss and Y dLoss where the loss is above 0, else 0.",
    2,
)
def margin_ranking_slope(call: OperatorCall, x1: Array, x2: Array, y: Array, dy: Array) -> Sequence[Array]:
    """Both derivatives, times dLoss."""
    loss = np.float32(call.arguments.float("margin", 1.0)) - y * (x1 - x2)
    slope = np.where(loss >= 0, -y * dy, np.float32(0))
    return [slope, -slope]


gradient_by("MarginRankingCriterion", "MarginRankingCriterionGradient", ("X0", "X1", "X2", "dY"), of_inputs=(0, 1))


_NEAR = 1e-20


def _entropy(p: Array) -> Array:
    """Of a truth value with probability p, in nats."""
    kept, rest = np.maximum(p, _NEAR), np.maximum(1 - p, _NEAR)
    found: Array = -p * np.log(kept) - (1 - p) * np.log(rest)
    return found


def _log_odds(p: Array) -> Array:
    found: Array = np.log(np.maximum(p, _NEAR) / np.maximum(1 - p, _NEAR))
    return found


@_criterion(
    "BernoulliJSD",
    ("P", "Q"),
    ("L",),
    "The Jensen-Shannon divergence of truth values with probabilities P and Q: H((P + Q) / 2) - (H(P) + H(Q)) / 2.",
)
def bernoulli_jsd(_call: OperatorCall, p: Array, q: Array) -> Sequence[Array]:
    """In float64, since near values cancel."""
    p, q = p.astype(np.float64), q.astype(np.float64)
    return [_entropy((p + q) / 2) - (_entropy(p) + _entropy(q)) / 2]


@_criterion(
    "BernoulliJSDGradient", ("dL", "P", "Q"), ("dP",), "dL / 2 times the log odds of P less those of (P + Q) / 2."
)
def bernoulli_jsd_slope(_call: OperatorCall, dl: Array, p: Array, q: Array) -> Sequence[Array]:
    """The derivative by P, times dL."""
    p, q = p.astype(np.float64), q.astype(np.float64)
    return [dl / 2 * (_log_odds(p) - _log_odds((p + q) / 2))]


# Of P alone: Q is what was observed.
gradient_by("BernoulliJSD", "BernoulliJSDGradient", ("dY", "X0", "X1"))


def _padded(small: Array, columns: int, call: OperatorCall) -> Array:
    """Rows made as long as the others: with `pad_value`, or repeated."""
    if call.arguments.bool("replicate"):
        return np.tile(small, (1, columns // small.shape[1]))
    value = call.arguments.float("pad_value", 0.0)
    return np.pad(small, ((0, 0), (0, columns - small.shape[1])), constant_values=value)


def _infer_padded(call: OperatorCall) -> tuple[int, int]:
    """Columns of X and of Y, two matrices of as many rows. Raises ShapeError."""
    call.require_types(0, *FLOAT_TYPES)
    call.require_same_type()
    rows, left = call.require_rank(0, 2)
    others, right = call.require_rank(1, 2)
    call.arguments.float("pad_value", 0.0)
    if rows != others:
        raise call.fail(f"X and Y must have the same number of rows, found {rows} and {others}")
    if call.arguments.bool("replicate") and (not min(left, right) or max(left, right) % min(left, right)):
        raise call.fail(f"to be repeated, the columns must divide the others', found {left} and {right}")
    return left, right


_PADDED_ARGS = {
    "pad_value": "what the shorter rows are filled up with (default 0)",
    "replicate": "1: the shorter rows are repeated instead (default 0)",
}


def infer_padded_dot(call: OperatorCall) -> list[TensorType]:
    """A product for each row."""
    _infer_padded(call)
    return [TensorType(call.inputs[0].shape[:1], call.inputs[0].meta)]


@array_function(
    "DotProductWithPadding",
    infer=infer_padded_dot,
    doc="The dot product of each row of X with that of Y, the shorter rows filled up.",
    input_names=("X", "Y"),
    output_names=("Z",),
    args=_PADDED_ARGS,
)
def padded_dot(call: OperatorCall, x: Array, y: Array) -> Sequence[Array]:
    """One sum of products a row."""
    columns = max(x.shape[1], y.shape[1])
    x, y = (array.astype(compute_dtype(array.dtype), copy=False) for array in (x, y))
    return [np.einsum("ij,ij->i", _padded(x, columns, call), _padded(y, columns, call))]


def infer_padded_dot_gradient(call: OperatorCall) -> list[TensorType]:
    """dX and dY have the types of X and Y."""
    _infer_padded(call)
    call.require_shape(2, call.inputs[0].shape[:1], "a gradient for each row")
    return [call.inputs[0], call.inputs[1]]


@array_function(
    "DotProductWithPaddingGradient",
    infer=infer_padded_dot_gradient,
    doc="Gradient of DotProductWithPadding: dZ times the other row, of a repeated one summed.",
    input_names=("X", "Y", "dZ"),
    output_names=("dX", "dY"),
    args=_PADDED_ARGS,
)
def padded_dot_slope(call: OperatorCall, x: Array, y: Array, dz: Array) -> Sequence[Array]:
    """Both gradients."""
    columns = max(x.shape[1], y.shape[1])
    slopes = (dz[:, None] * _padded(other, columns, call) for other in (y, x))
    repeated = call.arguments.bool("replicate")
    return [
        slope.reshape(len(one), -1, one.shape[1]).sum(1) if repeated else slope[:, : one.shape[1]]
        for one, slope in zip((x, y), slopes, strict=True)
    ]


gradient_by("DotProductWithPadding", "DotProductWithPaddingGradient", ("X0", "X1", "dY"), of_inputs=(0, 1))
