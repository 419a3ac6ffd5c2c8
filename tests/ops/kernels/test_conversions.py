"""Conversions by the kernels: NumPy's bytes, at each size of vector, for every bit pattern of the narrow types."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from dagexec.ops.kernels.conversions import by_range_step, convert_step
from dagexec.ops.kernels.machine import Machine
from tests.ops.kernels.running import each_size
from tests.ops.pieces import cut_into

Array = npt.NDArray[Any]


def machine_of(lanes: int) -> Machine:
    return Machine(lanes)


def converted(x: Array, kind: Any, lanes: int, pieces: int = 1) -> Array:
    """By the kernel, which must leave what is around the result as it was."""
    memory = np.full(x.size + 64, 7, kind)
    y = memory[32 : 32 + x.size].reshape(x.shape)
    with cut_into(pieces):
        step = convert_step(machine_of(lanes), x, y, "conversion")
    assert step is not None
    step()
    assert (memory[:32] == 7).all()
    assert (memory[32 + x.size :] == 7).all()
    return y


def hard_floats() -> Array:
    """Bit patterns around every tie of bfloat16, denormal numbers, infinities and NaN of both signs, and any others."""
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    near = [upper + np.uint32(offset) for offset in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]
    other = np.random.default_rng(0).integers(0, 1 << 32, 1001, dtype=np.uint32)
    return np.concatenate([*near, other]).view(np.float32)


def bits(array: Array) -> Array:
    return array.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[array.itemsize])


SOURCES = {
    "bfloat16": np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16),
    "int8": np.arange(-128, 128, dtype=np.int8),
    "uint8": np.arange(256, dtype=np.uint8),
    "bool": np.random.default_rng(1).random(100) < 0.5,
    "int32": np.concatenate([
        np.random.default_rng(2).integers(-(1 << 31), 1 << 31, 1000), [(1 << 24) + 1, -(1 << 31), (1 << 31) - 1]
    ]).astype(np.int32),
}  # fmt: skip


@each_size
@pytest.mark.parametrize("pieces", [1, 3])
def test_float32_is_rounded_to_bfloat16_as_by_numpy(lanes: int, pieces: int) -> None:
    x = hard_floats()
    with np.errstate(all="ignore"):
        expected = x.astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(bits(converted(x, ml_dtypes.bfloat16, lanes, pieces)), bits(expected))


@each_size
@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("kind", [np.float32, ml_dtypes.bfloat16])
def test_others_become_floats_as_by_numpy(name: str, kind: Any, lanes: int) -> None:
    x = SOURCES[name]
    if x.dtype == kind:
        return
    with np.errstate(all="ignore"):
        expected = x.astype(kind)
    np.testing.assert_array_equal(bits(converted(x, kind, lanes)), bits(expected))


@each_size
@pytest.mark.parametrize("beyond", range(1, 17))
def test_any_length_is_converted_and_no_more(beyond: int, lanes: int) -> None:
    x = np.random.default_rng(beyond).standard_normal(2 * lanes + beyond).astype(np.float32)
    for kind in (ml_dtypes.bfloat16,):
        np.testing.assert_array_equal(bits(converted(x, kind, lanes, 2)), bits(x.astype(kind)))


@each_size
def test_what_they_do_not_serve_is_refused(lanes: int) -> None:
    machine, x = machine_of(lanes), np.zeros(64, np.float32)
    assert convert_step(machine, x[::2], np.zeros(32, ml_dtypes.bfloat16), "") is None
    assert convert_step(machine, x[: lanes - 1], np.zeros(lanes - 1, ml_dtypes.bfloat16), "") is None
    assert convert_step(machine, x, np.zeros(64, np.int32), "") is None
    assert convert_step(machine, x[:32], x.view(ml_dtypes.bfloat16)[:32], "") is None


def by_range(x: Array) -> tuple[Array, np.float32, int]:
    """ONNX's formula, operation by operation in float32."""
    low, high = np.fmin.reduce(x, initial=np.float32(0)), np.fmax.reduce(x, initial=np.float32(0))
    with np.errstate(all="ignore"):
        step = (high - low) / np.float32(255)
        step = step if step > 0 else np.float32(1)
        zero = np.nan_to_num(np.rint(np.clip(-low / step, 0, 255)))
        whole = np.rint(x / step) + zero
    return np.clip(np.nan_to_num(whole, nan=0.0, posinf=255, neginf=0), 0, 255).astype(np.uint8), step, int(zero)


RANGES = {
    "both signs": np.random.default_rng(0).standard_normal(777).astype(np.float32),
    "positive": np.random.default_rng(1).random(64).astype(np.float32) + 3,
    "negative": -np.random.default_rng(2).random(129).astype(np.float32) - 3,
    "zeros": np.zeros(33, np.float32),
    "ties": (np.arange(0, 511, dtype=np.float32) / 2 - 0.5) * 0.25,
    "NaN": np.where(np.arange(50) % 7 == 0, np.nan, np.arange(50) - 20).astype(np.float32),
    "infinite": np.where(np.arange(50) == 7, np.inf, np.arange(50) - 20).astype(np.float32),
    "without end on both sides": np.where(np.arange(50) < 2, [[-np.inf], [np.inf]][0], np.inf).astype(np.float32),
}


@each_size
@pytest.mark.parametrize("name", RANGES)
def test_a_range_gives_scale_zero_and_integers(name: str, lanes: int) -> None:
    x = RANGES[name]
    memory, numbers = np.full(x.size + 64, 7, np.uint8), np.full(9, 7, np.uint8)
    y, scale, zero = memory[32 : 32 + x.size], np.zeros((), np.float32), numbers[4:5].reshape(())
    step = by_range_step(machine_of(lanes), x, y, scale, zero, "quantization")
    assert step is not None
    step()
    expected, wanted_scale, wanted_zero = by_range(x)
    assert (scale, zero) == (wanted_scale, wanted_zero)
    np.testing.assert_array_equal(y, expected)
    assert (memory[:32] == 7).all()
    assert (memory[32 + x.size :] == 7).all()
    assert (np.delete(numbers, 4) == 7).all()
