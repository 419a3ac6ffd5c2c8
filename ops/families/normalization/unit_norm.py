"""Normalize and NormalizeL1: vectors along an axis divided by their length, and the gradient of the first."""

from __future__ import annotations

from dagexec.core.expressions import Expression, absolute, equal, maximum, row_sum, select, sqrt, square
from dagexec.core.gradient import no_gradient
from dagexec.core.schema import no_inplace
from dagexec.ops.base.row_operator import row_operator

ARGUMENTS = {"axis": "the axis of the vectors (default -1)"}

MIN_LENGTH = 1e-12
"""A shorter vector is divided by this, as in Caffe2."""


def _length(x: Expression) -> Expression:
    return maximum(sqrt(row_sum(square(x))), MIN_LENGTH)


def _normalize_gradient(x: Expression, dy: Expression) -> Expression:
    """dX = (dY - Y * (sum of dY * Y)) / length, of vectors that are too short, too, as Caffe2 has it."""
    length = _length(x)
    unit = x / length
    return (dy - unit * row_sum(dy * unit)) / length


@row_operator("Normalize", ARGUMENTS, gradient=("X", "dY"), slope=_normalize_gradient, inplace=no_inplace)
def normalize(x: Expression) -> Expression:
    """Y = X / max(Euclidean length of the vector along `axis`, 1e-12)."""
    return x / _length(x)


@row_operator("NormalizeL1", ARGUMENTS, inplace=no_inplace)
def normalize_l1(x: Expression) -> Expression:
    """Y = X / (sum of |X| along `axis`); a vector of zeros stays. It has no gradient."""
    size = row_sum(absolute(x))
    return x / select(equal(size, 0), 1, size)


no_gradient("NormalizeL1")
