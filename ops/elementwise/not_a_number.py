"""IsNaN and ReplaceNaN: where a tensor has no numbers, and numbers in their places."""

from __future__ import annotations

from functools import partial

import numpy as np

from dagexec.core.dtypes import FLOAT_TYPES, UINT8
from dagexec.core.gradient import no_gradient
from dagexec.core.operator import Operator, Step
from dagexec.core.registry import operator
from dagexec.core.schema import OperatorCall, OpSchema, TensorType
from dagexec.ops.base.blocks import Array, Scratch
from dagexec.ops.base.broadcast_reduction import mask
from dagexec.ops.base.pointwise import Pointwise, pointwise


def infer_is_nan(call: OperatorCall) -> list[TensorType]:
    """uint8, in the shape of X, which is of floats."""
    call.require_types(0, *FLOAT_TYPES)
    return [TensorType(call.inputs[0].shape, UINT8)]


@operator(
    OpSchema(
        "IsNaN",
        infer=infer_is_nan,
        doc="Y = 1 where X is NaN, else 0, as uint8.",
        input_names=("X",),
        output_names=("Y",),
    )
)
class IsNaN(Operator):
    """Where there are no numbers."""

    reads_strided = writes_strided = True

    def prepare(self) -> Step:
        """One comparison: NaN alone differs from itself."""
        x = self.x(0)
        return partial(np.not_equal, x, x, out=self.y(0), casting="unsafe")


@pointwise(
    "ReplaceNaN",
    "Y = X, with `value` for NaN.",
    {"value": "what stands for NaN (default 0)"},
    formula=lambda x, value=0.0: np.where(np.isnan(x), value, x),
)
class ReplaceNaN(Pointwise):
    """Numbers for NaN."""

    constants = {"value": 0.0}

    def passes(self, x: Array, y: Array, scratch: Scratch) -> list[Step]:
        """A comparison, a copy unless it works in place, and the value where the comparison holds."""
        missing = mask(scratch, 0, x.shape)
        value = np.asarray(self.constant("value"), x.dtype)
        copy: list[Step] = [] if np.may_share_memory(x, y) else [partial(np.copyto, y, x)]
        return [partial(np.isnan, x, out=missing), *copy, partial(np.copyto, y, value, where=missing)]


no_gradient("IsNaN", "ReplaceNaN")
