"""LearningRateAdaption: a rate that grows while gradients agree (Baydin et al. 2018, arXiv:1703.04782)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dagexec.core.dtypes import FLOAT32, FLOAT64
from dagexec.core.gradient import no_gradient
from dagexec.core.schema import OperatorCall, TensorType, first_to_first
from dagexec.ops.base.array_function import array_function
from dagexec.ops.base.blocks import Array


def infer_rate_adaption(call: OperatorCall) -> list[TensorType]:
    """The rate, one number."""
    call.require_types(0, FLOAT32, FLOAT64)
    call.require_same_type()
    if call.inputs[0].elements != 1:
        raise call.fail("the rate must have one element")
    call.require_shape(2, call.inputs[1].shape, "that of the gradient")
    call.arguments.float("lr_alpha", 0.01)
    return [call.inputs[0]]


@array_function(
    "LearningRateAdaption",
    infer=infer_rate_adaption,
    doc=(
        "lr (1 - lr_alpha c), where c is the cosine between the gradient and the direction of the step; or, not "
        "normalized, lr - lr_alpha times their dot product."
    ),
    input_names=("lr", "grad", "effgrad"),
    output_names=("Y",),
    args={
        "lr_alpha": "how fast the rate changes (default 0.01)",
        "normalized_lr_adaption": "0: by the dot product (default 1: by the cosine)",
    },
    inplace=first_to_first,
)
def rate_adaption(call: OperatorCall, rate: Array, gradient: Array, direction: Array) -> Sequence[Array]:
    """In float64."""
    g, d = gradient.astype(np.float64).reshape(-1), direction.astype(np.float64).reshape(-1)
    alpha, dot = call.arguments.float("lr_alpha", 0.01), float(g @ d)
    if not call.arguments.bool("normalized_lr_adaption", True):
        return [rate - alpha * dot]
    cosine = dot / max(float(np.linalg.norm(g) * np.linalg.norm(d)), 1e-12)
    return [rate * (1 - alpha * cosine)]


no_gradient("LearningRateAdaption")
