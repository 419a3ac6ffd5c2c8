"""Strided copies by kernels: every layout gives NumPy's bytes, in any pieces, and nothing else is written."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from dagexec.core.native import phases_of
from dagexec.ops.kernels.copies import copy_step
from dagexec.ops.kernels.machine import Machine
from tests.forked import end_of
from tests.guarded import Guards
from tests.ops.kernels.running import each_size, needs_kernels
from tests.ops.pieces import cut_into
from tests.ops.running import the_library

CASES = {
    # shape of the source and the axes of the target
    "heads": ((2, 9, 3, 64), (0, 2, 1, 3)),
    "keys": ((2, 16, 3, 24), (0, 2, 3, 1)),
    "keys that fill no block": ((2, 13, 3, 21), (0, 2, 3, 1)),
    "small": ((3, 2), (1, 0)),
    "narrow": ((40, 3), (1, 0)),
    "image": ((2, 5, 7, 9), (0, 2, 3, 1)),
    "channels": ((2, 7, 9, 5), (0, 3, 1, 2)),
    "same": ((4, 5, 6), (0, 1, 2)),
    "five axes": ((2, 3, 4, 5, 6), (4, 2, 0, 3, 1)),
    "one": ((1, 1), (1, 0)),
    "wide": ((37, 107), (1, 0)),
    "tall": ((107, 37), (1, 0)),
    "blocks": ((2, 64, 32), (0, 2, 1)),
    **{f"dealt out to {count}": ((2, count, 3, 21), (0, 2, 3, 1)) for count in range(2, 9)},
    "dealt out in whole vectors": ((4, 2, 16), (0, 2, 1)),
    "many matrices": ((3, 1400, 2, 3), (1, 0, 3, 2)),
}


def copied(machine: Machine, pieces: int, source: npt.NDArray[Any], like: npt.NDArray[Any]) -> None:
    """Copy to an array in the middle of another, and compare."""
    memory = np.zeros(like.size + 32, like.dtype)
    memory.view(np.uint8)[:] = 7
    target = memory[16 : 16 + like.size].reshape(like.shape)
    with cut_into(pieces):
        step = copy_step(machine, [(source, target)], "copy")
    assert step is not None
    step()
    assert target.tobytes() == source.tobytes()
    assert (memory[:16].view(np.uint8) == 7).all()
    assert (memory[16 + like.size :].view(np.uint8) == 7).all()


def numbers(shape: Sequence[int], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    size = math.prod(shape)
    values = np.arange(size * np.dtype(dtype).itemsize, dtype=np.uint8)
    return values.view(dtype).reshape(shape)


@each_size
@pytest.mark.parametrize("name", CASES)
def test_transposed_axes(name: str, lanes: int) -> None:
    shape, axes = CASES[name]
    source = numbers(shape, np.int32).transpose(axes)
    machine = Machine(lanes)
    for pieces in (1, 2, 3):
        copied(machine, pieces, source, np.empty(source.shape, np.int32))


@each_size
def test_copies_of_many_short_rows_are_shared_where_as_many_bytes_in_long_ones_are_not(lanes: int) -> None:
    found = []
    for shape, axes in (((96, 2, 2, 7, 7), (0, 3, 1, 4, 2)), ((2, 49, 192), (1, 0, 2))):
        source = numbers(shape, np.float32).transpose(axes)
        step = copy_step(Machine(lanes), [(source, np.empty(source.shape, np.float32))], "copy")
        assert step is not None
        found.append([len(phase) for phase in phases_of(step) or ()])
    assert found == [[2], [1]]


@each_size
@pytest.mark.parametrize("size", [1, 3, 7, 8, 9, 15, 16, 17, 31, 40, 64])
def test_rows_of_any_length(size: int, lanes: int) -> None:
    machine = Machine(lanes)
    whole = numbers((6, 80), np.float32)
    for source in (
        whole[1:5, 3 : 3 + size],
        np.broadcast_to(whole[:3, 7:8], (3, size)),
        np.broadcast_to(whole[:3, None, :size, None], (3, 2, size, 3)),
        np.broadcast_to(whole[:3, :size, None], (3, size, 2)),
        whole[::2, :size],
        whole[::-1, :size:-3],
    ):
        copied(machine, 1, source, np.empty(source.shape, np.float32))


@each_size
@pytest.mark.parametrize("behind", [True, False])
def test_nothing_beside_the_arrays_is_touched(behind: bool, lanes: int) -> None:
    guards, machine = Guards(behind), Machine(lanes)

    def copy(source: npt.NDArray[Any], target: npt.NDArray[Any]) -> None:
        step = copy_step(machine, [(source, target)], "copy")
        assert step is not None
        step()
        assert target.tobytes() == source.tobytes()

    def copy_all() -> None:
        for shape, axes in CASES.values():
            source = guards.copy(numbers(shape, np.int32)).transpose(axes)
            copy(source, guards.like(source))
        for size in (1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 33):
            rows = guards.copy(numbers((3, size), np.int32))
            copy(rows, guards.like(np.empty((3, 50), np.int32))[:, :size] if behind else guards.like(rows))
            copy(guards.copy(numbers((3, 50), np.int32))[:, -size:], guards.like(rows))
            copy(np.broadcast_to(guards.copy(numbers((3, 1), np.int32)), (3, size)), guards.like(rows))
            for times in (2, 3, 4):
                repeated = np.broadcast_to(rows[:, :, None], (3, size, times))
                copy(repeated, guards.like(repeated))
            for columns in (1, 7, 8, 9):
                source = guards.copy(numbers((size, columns), np.int32)).T
                copy(source, guards.like(source))

    assert end_of(copy_all) == 0


@needs_kernels
@pytest.mark.parametrize("dtype", [np.int64, np.float16, np.uint8, np.complex128, "V12"])
def test_elements_of_other_sizes_are_copied_as_words(dtype: npt.DTypeLike) -> None:
    machine = the_library().machine
    source = numbers((3, 4, 8), dtype).transpose(1, 0, 2)
    copied(machine, 1, source, np.empty(source.shape, dtype))


@needs_kernels
def test_several_copies_are_one_step() -> None:
    machine = the_library().machine
    whole, found = numbers((6, 40), np.int32), np.zeros((6, 40), np.int32)
    cuts = [slice(0, 3), slice(3, 20), slice(20, 40)]
    for pieces in (1, 2, 3):
        found[:] = 0
        with cut_into(pieces):
            step = copy_step(machine, [(whole[:, cut], found[:, cut]) for cut in cuts], "copy")
        assert step is not None
        step()
        assert (found == whole).all()


@needs_kernels
def test_what_it_does_not_serve_is_left_to_others() -> None:
    machine = the_library().machine

    def is_served(source: npt.NDArray[Any], target: npt.NDArray[Any], machine: Machine = machine) -> bool:
        return copy_step(machine, [(source, target)], "copy") is not None

    words = numbers((4, 8), np.int32)
    assert is_served(words, np.empty((4, 8), np.int32))
    assert not is_served(words, np.empty((4, 8), np.float32)), "another type"
    assert not is_served(words, np.empty((8, 4), np.int32).T[::-1]), "backwards"
    assert not is_served(words[:0], np.empty((0, 8), np.int32)), "nothing"
    assert not is_served(words.astype(object), np.empty((4, 8), object)), "objects"
    assert not is_served(words, np.empty((4, 8), np.int32), Machine(4)), "another processor"
    for shape, axes in (((2, 4, 3), (1, 0, 2)), ((4, 8), (1, 0))):
        source = numbers(shape, np.int8).transpose(axes)
        assert not is_served(source, np.empty(source.shape, np.int8))
