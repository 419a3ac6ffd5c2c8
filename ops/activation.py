"""Activations: one input, one output of the same type, each element on its own."""

from __future__ import annotations

from functools import partial

import numpy as np

from dagexec.core.dtypes import FLOAT_TYPES
from dagexec.core.operator import Operator, Step
from dagexec.core.registry import operator
from dagexec.core.schema import OperatorCall, OpSchema, TensorType, one_to_one


def infer_activation(call: OperatorCall) -> list[TensorType]:
    """The output has the input's type, which must be a float type."""
    call.require_types(0, *FLOAT_TYPES)
    return [call.inputs[0]]


def activation_schema(name: str, doc: str, args: dict[str, str] | None = None) -> OpSchema:
    """The schema every activation has: one input, one output, in place allowed."""
    return OpSchema(
        name,
        inputs=(1, 1),
        outputs=(1, 1),
        infer=infer_activation,
        doc=doc,
        input_names=("X",),
        output_names=("Y",),
        args=args or {},
        inplace=one_to_one,
    )


@operator(activation_schema("Relu", "Y = max(X, 0)."))
class Relu(Operator):
    """Rectified linear unit."""

    def prepare(self) -> Step:
        """One pass of `np.maximum`."""
        x, y = self.x(0), self.y(0)
        return partial(np.maximum, x, x.dtype.type(0), out=y)
