"""Sums over all elements: SumElements, SumSqrElements, and LpNorm of magnitudes or squares.

LpNorm for p = 2 is the sum of squares, without a root: that is what Caffe2 computes under this name.
"""

from __future__ import annotations

from collections.abc import Sequence

from dagexec.core.dtypes import INT32, INT64
from dagexec.core.expressions import Expression, absolute, row_mean, row_sum, square
from dagexec.core.gradient import no_gradient
from dagexec.core.schema import OperatorCall, TensorType
from dagexec.errors import ArgumentError
from dagexec.ops.base.array_function import array_function
from dagexec.ops.base.blocks import Array
from dagexec.ops.base.row_operator import all_axes, row_operator

_ARGS = {"average": "1: divide by the number of elements (default 0)"}


@row_operator("SumElements", _ARGS, members=all_axes, gradient=("X", "dY"))
def sum_elements(x: Expression, *, average: bool = False) -> Expression:
    """Sum of all elements, a scalar."""
    return row_mean(x) if average else row_sum(x)


@row_operator("SumSqrElements", _ARGS, members=all_axes, gradient=("X", "dY"))
def sum_of_squares(x: Expression, *, average: bool = False) -> Expression:
    """Sum of the squares of all elements."""
    return sum_elements(square(x), average=average)


@array_function(
    "SumElementsInt",
    infer=lambda call: [TensorType((), call.require_types(0, INT32, INT64))],
    doc="The sum of all elements, integers, in their type: what is too large wraps around.",
    input_names=("X",),
    output_names=("sum",),
)
def sum_integers(_call: OperatorCall, x: Array) -> Sequence[Array]:
    """One sum."""
    return [x.sum(dtype=x.dtype)]


no_gradient("SumElementsInt")


def check_power(call: OperatorCall) -> None:
    """Raise ArgumentError unless argument `p` is 1 or 2."""
    power = call.arguments.int("p", 2)
    if power not in (1, 2):
        raise ArgumentError(f"{call.label}: argument 'p' must be 1 or 2, found {power}")


@row_operator(
    "LpNorm",
    {"p": "1 for the sum of magnitudes, 2 for that of squares (default 2)", **_ARGS},
    members=all_axes,
    output="Z",
    of_all=(1,),
    gradient=("X", "dY"),
    check=check_power,
)
def lp_norm(x: Expression, *, p: int = 2, average: bool = False) -> Expression:
    """The sum of |X|^p over all elements, a vector of one; for p = 2 it has no root, as in Caffe2."""
    return sum_elements(absolute(x) if p == 1 else square(x), average=average)
