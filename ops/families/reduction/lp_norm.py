"""LpNorm: the sum of magnitudes or of squares of all elements, and its gradient.

For p = 2 it is the sum of squares, without a root: that is what Caffe2 computes under this name.
"""

from __future__ import annotations

from dagexec.core.expressions import Expression, absolute, row_mean, row_sum, square
from dagexec.core.schema import OperatorCall
from dagexec.errors import ArgumentError
from dagexec.ops.base.row_operator import all_axes, row_operator


def check_power(call: OperatorCall) -> None:
    """Raise ArgumentError unless argument `p` is 1 or 2."""
    power = call.arguments.int("p", 2)
    if power not in (1, 2):
        raise ArgumentError(f"{call.label}: argument 'p' must be 1 or 2, found {power}")


@row_operator(
    "LpNorm",
    {
        "p": "1 for the sum of magnitudes, 2 for that of squares (default 2)",
        "average": "1: divide by the number of elements (default 0)",
    },
    members=all_axes,
    output="Z",
    of_all=(1,),
    gradient=("X", "dY"),
    check=check_power,
)
def lp_norm(x: Expression, *, p: int = 2, average: bool = False) -> Expression:
    """The sum of |X|^p over all elements, a vector of one; for p = 2 it has no root, as in Caffe2."""
    return (row_mean if average else row_sum)(absolute(x) if p == 1 else square(x))
