"""ReduceLogSumExp: the logarithm of a sum of exponentials."""

from __future__ import annotations

import math
from functools import partial
from typing import ClassVar

import numpy as np

from dagexec.core.dtypes import FLOAT_TYPES
from dagexec.core.gradient import not_differentiable
from dagexec.core.operator import Step
from dagexec.core.registry import operator
from dagexec.core.traits import ImageRole
from dagexec.ops.base.blocks import Array
from dagexec.ops.families.reduction.axes import (
    REDUCED_ARGS,
    Axes,
    AxesReader,
    Reduction,
    reduce_pass,
    reduced_axes,
    reduction_schema,
)


@operator(
    reduction_schema(
        "ReduceLogSumExp",
        "Logarithm of the sum of exponentials over `axes`, minus infinity over no elements. The largest element is "
        "taken off before and added afterwards, so that nothing overflows.",
        reduced_axes,
        REDUCED_ARGS,
        FLOAT_TYPES,
        extreme=False,
        prefixes=False,
        role=ImageRole.REDUCTION,
    )
)
class ReduceLogSumExp(Reduction):
    """Smooth maximum."""

    axes: ClassVar[AxesReader] = staticmethod(reduced_axes)

    def passes(self, x: Array, total: Array, axes: Axes, count: int) -> list[Step]:
        """ln(sum of exp(x - m)) + m, where m is the largest element, or 0 where that is not finite."""
        if count == 0:
            return [partial(total.fill, -math.inf)]
        largest, finite = self.scratch(total.shape, total.dtype), self.scratch(total.shape, np.bool_)
        powers = self.scratch(x.shape, total.dtype)

        def logarithm() -> None:
            with np.errstate(divide="ignore"):
                np.log(total, out=total)

        return [
            reduce_pass(np.maximum, x, largest, axes),
            partial(np.isfinite, largest, out=finite),
            partial(np.logical_not, finite, out=finite),
            partial(np.copyto, largest, 0, where=finite),
            partial(np.subtract, x, largest, out=powers, dtype=total.dtype),
            partial(np.exp, powers, out=powers),
            reduce_pass(np.add, powers, total, axes),
            logarithm,
            partial(np.add, total, largest, out=total),
        ]


not_differentiable("train with LogSoftmax, or with Exp, ReduceSum and Log", "ReduceLogSumExp")
