"""DFT and STFT: discrete Fourier transforms of signals, and of frames of them.

Complex numbers are pairs in the last axis: real and imaginary part.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dagexec.core.dtypes import FLOAT_TYPES, INT32, INT64
from dagexec.core.gradient import not_differentiable
from dagexec.core.schema import Cost, OperatorCall, TensorType, memory_cost
from dagexec.errors import ArgumentError
from dagexec.ops.base.array_function import array_function
from dagexec.ops.base.blocks import Array, compute_dtype

_INTEGERS = (INT32, INT64)


def _scalar(call: OperatorCall, index: int) -> int:
    """The one integer that input `index` holds. Raises ShapeError."""
    call.require_types(index, *_INTEGERS)
    if call.inputs[index].elements != 1:
        raise call.fail(f"input {call.definition.input[index]!r} must be one integer")
    return int(call.known_value(index).reshape(-1)[0])


def _transform(call: OperatorCall) -> tuple[int, int, bool, bool]:
    """Axis, length, whether it goes back, and whether half of a spectrum stands for all. Raises ArgumentError."""
    shape = call.inputs[0].shape
    if len(shape) < 2 or shape[-1] not in (1, 2):
        raise call.fail("the last axis must be real parts, or real and imaginary parts")
    inverse, half = call.arguments.bool("inverse"), call.arguments.bool("onesided")
    given = list(range(1, len(call.inputs)))
    expected = [name for name in ("length_input", "axis_input") if call.arguments.bool(name)]
    if len(given) != len(expected):
        raise call.fail(f"its arguments ask for {1 + len(expected)} inputs, found {len(call.inputs)}")
    values = {name: _scalar(call, index) for name, index in zip(expected, given, strict=True)}
    axis = values.get("axis_input", call.arguments.int("axis", -2))
    if not -len(shape) <= axis < len(shape) or axis % len(shape) == len(shape) - 1:
        raise ArgumentError(f"{call.label}: the axis must be one of {len(shape)} but the last, found {axis}")
    axis %= len(shape)
    default = 2 * (shape[axis] - 1) if inverse and half else shape[axis]
    length = values.get("length_input", call.arguments.int("length", default))
    if length < 1:
        raise ArgumentError(f"{call.label}: a transform has at least one element, found {length}")
    if half and not inverse and shape[-1] == 2:
        raise call.fail("half of a spectrum stands for all only where the signal is real")
    return axis, length, inverse, half


def infer_dft(call: OperatorCall) -> list[TensorType]:
    """Pairs, or real numbers from half of a spectrum."""
    meta = call.require_types(0, *FLOAT_TYPES)
    axis, length, inverse, half = _transform(call)
    shape = list(call.inputs[0].shape)
    shape[axis] = length // 2 + 1 if half and not inverse else length
    shape[-1] = 1 if half and inverse else 2
    return [TensorType(tuple(shape), meta)]


def _cost(call: OperatorCall, outputs: Sequence[TensorType]) -> Cost:
    return memory_cost(call, outputs, 40)


@array_function(
    "DFT",
    inputs=(1, 3),
    infer=infer_dft,
    doc="The discrete Fourier transform along an axis, of length elements of X: what is missing is 0, what is more "
    "is not read. (dagexec's own, for ONNX.)",
    input_names=("X, (...) x 1 or 2", "length, with length_input=1", "axis, with axis_input=1"),
    output_names=("Y",),
    args={
        "axis": "the axis (default -2)",
        "length": "of the transform (default: that of the axis, or what half a spectrum has been made of)",
        "inverse": "1: back from a spectrum, divided by the length (default 0)",
        "onesided": "1: a spectrum is its first half (default 0)",
        "length_input": "1: the next input is the length",
        "axis_input": "1: the next input is the axis",
    },
    cost=_cost,
    value_inputs=(1, 2),
)
def dft(call: OperatorCall, x: Array, *_others: Array) -> Sequence[Array]:
    """By NumPy's transforms, which compute in the type of X."""
    axis, length, inverse, half = _transform(call)
    values = _complex(x)
    if inverse and half:
        return [np.fft.irfft(values, length, axis)[..., None]]
    if inverse:
        return [_pairs(np.fft.ifft(values, length, axis))]
    if half:
        return [_pairs(np.fft.rfft(values.real, length, axis))]
    return [_pairs(np.fft.fft(values, length, axis))]


def _complex(x: Array) -> Array:
    wide = x.astype(compute_dtype(x.dtype), copy=False)
    return wide[..., 0] + 1j * wide[..., 1] if x.shape[-1] == 2 else wide[..., 0]


def _pairs(values: Array) -> Array:
    return np.stack((values.real, values.imag), -1)


def _frames(call: OperatorCall) -> tuple[int, int, int]:
    """How many frames there are, the elements of a frame, and from one frame to the next. Raises ArgumentError."""
    with_window, with_length = call.arguments.bool("window"), call.arguments.bool("length_input")
    if len(call.inputs) != 2 + with_window + with_length:
        raise call.fail(f"its arguments ask for {2 + with_window + with_length} inputs, found {len(call.inputs)}")
    shape = call.inputs[0].shape
    signal = shape[1] if len(shape) > 1 else 0
    step = _scalar(call, 1)
    length = signal
    if with_window:
        (length,) = call.require_rank(2, 1)
    if with_length:
        length = _scalar(call, 2 + with_window)
        if with_window:
            call.require_shape(2, (length,), "the elements of a frame")
    if step < 1 or not 1 <= length <= signal:
        raise ArgumentError(f"{call.label}: a signal of {signal} has no frames of {length} each {step}")
    return 1 + (signal - length) // step, length, step


def infer_stft(call: OperatorCall) -> list[TensorType]:
    """Batch x frames x frequencies x 2."""
    meta = call.require_types(0, *FLOAT_TYPES)
    shape = call.require_rank(0, 2, 3)
    if len(shape) == 3 and shape[2] not in (1, 2):
        raise call.fail("the last axis must be real parts, or real and imaginary parts")
    if call.arguments.bool("window"):
        call.require_same_type(0, 2)
    count, length, _ = _frames(call)
    if call.arguments.bool("onesided", True):
        if shape[2:] == (2,):
            raise call.fail("half of a spectrum stands for all only where the signal is real")
        length = length // 2 + 1
    return [TensorType((shape[0], count, length, 2), meta)]


@array_function(
    "STFT",
    inputs=(2, 4),
    infer=infer_stft,
    doc="The Fourier transforms of frames of a signal, each times a window. (dagexec's own, for ONNX.)",
    input_names=(
        "X, batch x elements, or batch x elements x 1 or 2",
        "elements from one frame to the next",
        "window, with window=1",
        "elements of a frame, with length_input=1",
    ),
    output_names=("Y",),
    args={
        "onesided": "1: spectra are their first half (default 1)",
        "window": "1: input 2 is the window (default 0: ones)",
        "length_input": "1: the last input is the elements of a frame (default 0: those of the window)",
    },
    cost=_cost,
    value_inputs=(1, 2, 3),
)
def stft(call: OperatorCall, x: Array, _step: Array, *others: Array) -> Sequence[Array]:
    """Frames as a view of the signal, and one transform."""
    _, length, step = _frames(call)
    values = _complex(x) if x.ndim == 3 else x.astype(compute_dtype(x.dtype), copy=False)
    frames = np.lib.stride_tricks.sliding_window_view(values, length, axis=1)[:, ::step]
    if call.arguments.bool("window"):
        frames = frames * others[0].astype(values.real.dtype)
    transform = np.fft.rfft if call.arguments.bool("onesided", True) else np.fft.fft
    return [_pairs(transform(frames, axis=-1))]


not_differentiable("dagexec has them for inference alone", "DFT", "STFT")
