"""WeightScale: weights that are multiplied with a number every so many steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dagexec.core.dtypes import FLOAT32, FLOAT64
from dagexec.core.gradient import not_differentiable
from dagexec.core.schema import OperatorCall, TensorType, first_to_first
from dagexec.errors import ArgumentError
from dagexec.ops.base.array_function import array_function
from dagexec.ops.base.blocks import Array
from dagexec.ops.families.optimize.scalars import read_iteration, require_iteration

_NEVER = np.iinfo(np.int64).max


def infer_weight_scale(call: OperatorCall) -> list[TensorType]:
    """As the weights."""
    call.require_types(0, FLOAT32, FLOAT64)
    require_iteration(call, 1)
    if call.arguments.int("stepsize", _NEVER) < 1:
        raise ArgumentError(f"{call.label}: argument 'stepsize' must be at least 1")
    return [call.inputs[0]]


@array_function(
    "WeightScale",
    infer=infer_weight_scale,
    doc="Weights times `scale` where the iteration plus 1 is a multiple of `stepsize` and below `upper_bound_iter`; "
    "else as they are.",
    input_names=("weights", "iteration"),
    output_names=("Y",),
    args={
        "stepsize": "steps between two changes (default: none)",
        "upper_bound_iter": "where changes end (default: never)",
        "scale": "the factor (default 1)",
    },
    inplace=first_to_first,
)
def weight_scale(call: OperatorCall, weights: Array, iteration: Array) -> Sequence[Array]:
    """One product, or a copy."""
    step = read_iteration(iteration.reshape(-1), call.label) + 1
    due = step % call.arguments.int("stepsize", _NEVER) == 0 and step < call.arguments.int("upper_bound_iter", _NEVER)
    return [weights * weights.dtype.type(call.arguments.float("scale", 1.0)) if due else weights]


not_differentiable("it changes parameters, after the gradients are known", "WeightScale")
