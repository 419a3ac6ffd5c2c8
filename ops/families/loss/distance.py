"""Distances and similarities of rows of two tensors: SquaredL2Distance, L1Distance, DotProduct, CosineSimilarity."""

from __future__ import annotations

from typing import Any

from dagexec.core.expressions import Expression, absolute, maximum, row_sum, select, sign, sqrt, square
from dagexec.core.schema import no_inplace
from dagexec.ops.base.row_operator import all_but_first, row_operator

_EQUAL = 1e-12  # of L1Distance: elements that differ by no more have no gradient, as in Caffe2
_MIN_SQUARE = 1e-12  # of CosineSimilarity: the least square of a length, as in Caffe2

_OF_PAIRS: dict[str, Any] = {
    "args": {},
    "members": all_but_first,
    "inputs": ("X", "Y"),
    "output": "Z",
    "gradient": ("X0", "X1", "dY"),
    "of_inputs": (0, 1),
    "inplace": no_inplace,
}


@row_operator("SquaredL2Distance", **_OF_PAIRS)
def squared_l2_distance(x: Expression, y: Expression) -> Expression:
    """Z = half the sum of (X - Y)^2 over each row, of the first axis."""
    return row_sum(square(x - y)) * 0.5


def _l1_gradient(x: Expression, y: Expression, dz: Expression) -> tuple[Expression, Expression]:
    dx = sign(x - y) * select(absolute(x - y) > _EQUAL, dz, 0)
    return dx, -dx


@row_operator("L1Distance", slope=_l1_gradient, **_OF_PAIRS)
def l1_distance(x: Expression, y: Expression) -> Expression:
    """Z = the sum of |X - Y| over each row, of the first axis."""
    return row_sum(absolute(x - y))


@row_operator("DotProduct", **_OF_PAIRS)
def dot_product(x: Expression, y: Expression) -> Expression:
    """Z = the sum of X * Y over each row, of the first axis."""
    return row_sum(x * y)


def _length(x: Expression) -> Expression:
    return sqrt(maximum(row_sum(square(x)), _MIN_SQUARE))


@row_operator("CosineSimilarity", **_OF_PAIRS)
def cosine_similarity(x: Expression, y: Expression) -> Expression:
    """Z = the inner product of X and Y over each row, of the first axis, divided by their lengths; a length counts as
    1e-6 at least."""
    return row_sum(x * y) / _length(x) / _length(y)
