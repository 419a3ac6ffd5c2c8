"""SinusoidPositionEncoding: positions as waves of falling frequency. Vaswani et al., 2017, arXiv:1706.03762."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dagexec.core.dtypes import FLOAT32, INT32, INT64
from dagexec.core.gradient import no_gradient
from dagexec.core.schema import OperatorCall, TensorType
from dagexec.errors import ArgumentError
from dagexec.ops.base.array_function import array_function
from dagexec.ops.base.blocks import Array


def infer_position_encoding(call: OperatorCall) -> list[TensorType]:
    """A vector for each position."""
    call.require_types(0, INT32, INT64)
    size = call.arguments.int("embedding_size", 100)
    if size < 1:
        raise ArgumentError(f"{call.label}: 'embedding_size' must be at least 1, found {size}")
    return [TensorType((*call.inputs[0].shape, size), FLOAT32)]


@array_function(
    "SinusoidPositionEncoding",
    infer=infer_position_encoding,
    doc="A vector for each position p: amplitude times the sine of p / alpha^(i / size) at even places i, and the "
    "cosine of p / alpha^((i - 1) / size) at odd ones.",
    input_names=("positions",),
    output_names=("Y",),
    args={
        "embedding_size": "elements of a vector (default 100)",
        "alpha": "the base of the frequencies (default 10000)",
        "amplitude": "what the waves are multiplied by (default 1)",
    },
)
def position_encoding(call: OperatorCall, positions: Array) -> Sequence[Array]:
    """In float64."""
    size = call.arguments.int("embedding_size", 100)
    places = np.arange(size)
    frequencies = call.arguments.float("alpha", 10000.0) ** (-(places - places % 2) / size)
    angles = positions[..., None] * frequencies
    return [call.arguments.float("amplitude", 1.0) * np.where(places % 2, np.cos(angles), np.sin(angles))]


no_gradient("SinusoidPositionEncoding")
