"""IsNaN and IsInf: where a tensor has no finite numbers."""

from __future__ import annotations

from functools import partial

import numpy as np

from dagexec.core.dtypes import BOOL, FLOAT_TYPES, UINT8
from dagexec.core.gradient import no_gradient
from dagexec.core.onnx_name import OnnxName
from dagexec.core.operator import Operator, Step
from dagexec.core.registry import new_operator
from dagexec.core.rows import elementwise
from dagexec.core.schema import OperatorCall, TensorType


def infer_is_nan(call: OperatorCall) -> list[TensorType]:
    """uint8, in the shape of X, which is of floats."""
    call.require_types(0, *FLOAT_TYPES)
    return [TensorType(call.inputs[0].shape, UINT8)]


@new_operator(
    "IsNaN",
    infer=infer_is_nan,
    doc="Y = 1 where X is NaN, else 0, as uint8.",
    input_names=("X",),
    output_names=("Y",),
    rows=elementwise,
)
class IsNaN(Operator):
    """Where there are no numbers."""

    reads_strided = writes_strided = True

    def prepare(self) -> Step:
        """One comparison: NaN alone differs from itself."""
        x = self.x(0)
        return partial(np.not_equal, x, x, out=self.y(0), casting="unsafe")


def infer_is_inf(call: OperatorCall) -> list[TensorType]:
    """Truth values, in the shape of X, which is of floats."""
    call.require_types(0, *FLOAT_TYPES)
    for name in _SIGNS:
        call.arguments.bool(name, True)
    return [TensorType(call.inputs[0].shape, BOOL)]


_SIGNS = ("detect_negative", "detect_positive")


@new_operator(
    "IsInf",
    infer=infer_is_inf,
    doc="Y = true where X is infinite, of the signs that are asked for. (dagexec's own, for ONNX.)",
    input_names=("X",),
    output_names=("Y",),
    args={name: f"0: not {name.removeprefix('detect_')} infinity (default 1)" for name in _SIGNS},
    onnx=(OnnxName("IsInf", 20, {name: name for name in _SIGNS}),),
    rows=elementwise,
)
class IsInf(Operator):
    """Where there is infinity."""

    reads_strided = writes_strided = True

    def prepare(self) -> Step:
        """One comparison."""
        x, y = self.x(0), self.y(0)
        negative, positive = (self.arguments.bool(name, True) for name in _SIGNS)
        if negative and positive:
            return partial(np.isinf, x, out=y)
        if not negative and not positive:
            return partial(y.fill, False)
        return partial(np.equal, x, x.dtype.type(np.inf if positive else -np.inf), out=y)


no_gradient("IsNaN", "IsInf")
