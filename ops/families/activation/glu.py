"""Glu: half of a tensor, gated by the logistic function of the other half (Dauphin et al. 2017, arXiv:1612.08083)."""

from __future__ import annotations

import math
from functools import partial

import numpy as np

from dagexec.core.dtypes import FLOAT_TYPES
from dagexec.core.gradient import not_differentiable
from dagexec.core.operator import Operator, Step, in_sequence
from dagexec.core.registry import new_operator
from dagexec.core.rows import apart_from
from dagexec.core.schema import OperatorCall, TensorType
from dagexec.ops.base.blocks import Array, compute_dtype, convert
from dagexec.ops.base.passes import sigmoid_passes


def infer_glu(call: OperatorCall) -> list[TensorType]:
    """The shape of X with half the size at `dim`. Raises ShapeError for an odd size there."""
    meta, shape = call.require_types(0, *FLOAT_TYPES), call.inputs[0].shape
    axis = call.axis("dim", -1, len(shape))
    if shape[axis] % 2:
        raise call.fail(f"axis {axis} must have an even size to be halved, found {shape[axis]}")
    return [TensorType((*shape[:axis], shape[axis] // 2, *shape[axis + 1 :]), meta)]


def halves(call: OperatorCall, x: Array) -> tuple[Array, Array]:
    """The values and the gates, as views of packed `x`: outer sizes by inner ones."""
    axis = call.axis("dim", -1, x.ndim)
    rows = x.reshape(math.prod(x.shape[:axis]), 2, math.prod(x.shape[axis:]) // 2)
    return rows[:, 0], rows[:, 1]


@new_operator(
    "Glu",
    infer=infer_glu,
    doc="Y = A * Sigmoid(B), where A is the first half of X along `dim` and B the second.",
    input_names=("X",),
    output_names=("Y",),
    args={"dim": "the axis to halve, negative ones counted from the end (default -1)"},
    rows=apart_from(lambda call: [call.axis("dim", -1, len(call.inputs[0].shape))]),
)
class Glu(Operator):
    """Values and gates in one tensor."""

    def prepare(self) -> Step:
        """The gates apart, their logistic function, and the product."""
        values, gates = halves(self.call(), self.x(0))
        y = self.y(0).reshape(gates.shape)
        work = self.scratch(gates.shape, compute_dtype(y.dtype))
        steps: list[Step] = [partial(np.copyto, work, gates), *sigmoid_passes(work, work)]
        if work.dtype == y.dtype:
            return in_sequence([*steps, partial(np.multiply, values, work, out=y)])
        wide = self.scratch(gates.shape, work.dtype)
        product = partial(np.multiply, wide, work, out=work)
        return in_sequence([*steps, convert(values, wide), product, convert(work, y)])


not_differentiable("Caffe2 has none, and nothing in dagexec needs one: train with Split, Sigmoid and Mul", "Glu")
