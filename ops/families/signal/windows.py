"""HannWindow, HammingWindow, BlackmanWindow, and MelWeightMatrix, which sums frequencies as people hear them.

Harris, 1978, "On the use of windows for harmonic analysis"; Stevens et al., 1937, for the mel scale.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from dagexec.core.dtypes import FLOAT32, INT32, INT64, NUMBER_TYPES, TypeMeta, from_number
from dagexec.core.gradient import no_gradient
from dagexec.core.schema import OperatorCall, TensorType
from dagexec.errors import ArgumentError
from dagexec.ops.base.array_function import array_function
from dagexec.ops.base.blocks import Array

_DTYPE_HELP = {"dtype": "number of the type of Y (default float32)"}
_COSINES = {"HannWindow": (0.5, 0.5), "HammingWindow": (25 / 46, 21 / 46), "BlackmanWindow": (0.42, 0.5, 0.08)}
"""Factors of the cosines of 0, 1 and 2 periods, of alternating signs."""


def _number(call: OperatorCall, index: int) -> float:
    """The one number that input `index` holds. Raises ShapeError."""
    call.require_types(index, *NUMBER_TYPES)
    if call.inputs[index].elements != 1:
        raise call.fail(f"input {call.definition.input[index]!r} must be one number")
    return float(call.known_value(index).reshape(-1)[0])


def _dtype(call: OperatorCall) -> TypeMeta:
    """The type of Y. Raises ArgumentError unless it is of numbers."""
    meta = from_number(call.arguments.int("dtype", FLOAT32.number))
    if meta not in NUMBER_TYPES:
        raise ArgumentError(f"{call.label}: 'dtype' must be a type of numbers, found {meta}")
    return meta


def infer_window(call: OperatorCall) -> list[TensorType]:
    """As many elements as the input says. Raises ArgumentError for fewer than 0."""
    call.require_types(0, INT32, INT64)
    call.arguments.bool("periodic", True)
    size = int(_number(call, 0))
    if size < 0:
        raise ArgumentError(f"{call.label}: a window cannot have {size} elements")
    return [TensorType((size,), _dtype(call))]


def _window(call: OperatorCall, size: Array, factors: Sequence[float]) -> Sequence[Array]:
    """Cosines over the size, or over one less, which is symmetric."""
    count = int(size.reshape(-1)[0])
    period = count if call.arguments.bool("periodic", True) else count - 1
    phase = 2 * math.pi * np.arange(count) / max(1, period)
    window = np.full(count, factors[0])
    for number, factor in enumerate(factors[1:], 1):
        window += (-1) ** number * factor * np.cos(number * phase)
    return [window]


def _define(name: str, factors: Sequence[float]) -> None:
    formula = " ".join(f"{'+' if k % 2 == 0 else '-'} {factor:.4g} cos({k} p)" for k, factor in enumerate(factors) if k)
    compute: Callable[..., Sequence[Array]] = partial(_window, factors=factors)
    array_function(
        name,
        infer=infer_window,
        doc=f"{factors[0]:.4g} {formula}, for phases p from 0 to 2 pi. (dagexec's own, for ONNX.)",
        input_names=("size",),
        output_names=("Y",),
        args={"periodic": "1: 2 pi is behind the end; else at the last element (default 1)"} | _DTYPE_HELP,
        value_inputs=(0,),
    )(compute)
    no_gradient(name)


for _name, _factors in _COSINES.items():
    _define(_name, _factors)


def _mel(call: OperatorCall) -> tuple[int, int, int, float, float]:
    """Mel bins, transform length, sample rate, and the edges in hertz. Raises ArgumentError."""
    bins, length, rate = (int(_number(call, index)) for index in range(3))
    low, high = _number(call, 3), _number(call, 4)
    if not (bins >= 1 and length >= 1 and rate >= 1 and 0 <= low < high < math.inf):
        raise ArgumentError(
            f"{call.label}: expected mel bins, a length, a sample rate and rising edges, found {bins}, {length}, "
            f"{rate}, {low:g} and {high:g}"
        )
    if (length + 1) * high // rate >= length // 2 + 1:
        raise ArgumentError(f"{call.label}: {high:g} hertz is above what {length} samples at {rate} a second show")
    return bins, length, rate, low, high


def infer_mel_weights(call: OperatorCall) -> list[TensorType]:
    """Frequencies x mel bins."""
    bins, length, *_ = _mel(call)
    return [TensorType((length // 2 + 1, bins), _dtype(call))]


@array_function(
    "MelWeightMatrix",
    infer=infer_mel_weights,
    doc="How much of each frequency of a DFT is in each mel bin: triangles between edges that are as far apart on "
    "the mel scale, 2595 log10(1 + hertz / 700). (dagexec's own, for ONNX.)",
    input_names=("mel bins", "length of the DFT", "samples a second", "lower edge in hertz", "upper edge in hertz"),
    output_names=("Y",),
    args=_DTYPE_HELP,
    value_inputs=(0, 1, 2, 3, 4),
)
def mel_weights(call: OperatorCall, *_inputs: Array) -> Sequence[Array]:
    """Triangle by triangle."""
    bins, length, rate, low, high = _mel(call)
    edges = [2595 * math.log10(1 + hertz / 700) for hertz in (low, high)]
    mels = edges[0] + np.arange(bins + 2) * (edges[1] - edges[0]) / (bins + 2)
    places = ((length + 1) * (700 * np.expm1(mels / 2595 * math.log(10))) // rate).astype(np.int64)
    weights = np.zeros((length // 2 + 1, bins))
    for number, (left, center, right) in enumerate(zip(places, places[1:], places[2:], strict=False)):
        if left == center:
            weights[center, number] = 1
        else:
            weights[left : center + 1, number] = np.arange(center - left + 1) / (center - left)
        if right > center:
            weights[center:right, number] = np.arange(right - center, 0, -1) / (right - center)
    return [weights]


no_gradient("MelWeightMatrix")
