"""Memory for weights: parts of pieces, which live as long as one of them, and are recycled where that is asked for."""

from __future__ import annotations

import gc
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest

from dagexec.platform.weight_memory import Pieces


def test_small_arrays_share_a_piece_and_do_not_overlap() -> None:
    pieces = Pieces(4096)
    arrays = [pieces.take(nbytes) for nbytes in (100, 1, 0, 64, 65, 1000)]
    for number, array in enumerate(arrays):
        assert array.ctypes.data % 64 == 0 or not array.size
        array[...] = number
    assert [set(array.tolist()) for array in arrays] == [{0}, {1}, set(), {3}, {4}, {5}]
    assert len({id(array.base.obj) for array in arrays}) == 1


@pytest.mark.parametrize("nbytes", [2049, 5000])
def test_a_large_array_is_by_itself(nbytes: int) -> None:
    pieces = Pieces(4096)
    small, large = pieces.take(10), pieces.take(nbytes)
    assert large.base.obj is not small.base.obj
    assert len(large) == nbytes
    assert large.ctypes.data % 64 == 0


def test_a_full_piece_is_followed_by_another() -> None:
    pieces = Pieces(4096)
    arrays = [pieces.take(1500) for _ in range(3)]
    assert len({id(array.base.obj) for array in arrays}) == 2


@pytest.mark.slow
def test_a_piece_is_freed_with_the_last_of_its_arrays() -> None:
    pieces = Pieces(4096)
    first, second = pieces.take(10), pieces.take(10)
    base = weakref.ref(first.base.obj)
    del first
    gc.collect()
    assert base() is not None
    del second
    gc.collect()
    assert base() is None
    assert len(pieces.take(10)) == 10


def test_threads_get_memory_of_their_own() -> None:
    pieces = Pieces(1 << 16)
    found: list[np.ndarray] = []

    def take() -> None:
        found.extend(pieces.take(100) for _ in range(50))

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len({array.ctypes.data for array in found}) == 200


@pytest.mark.parametrize("nbytes", [640, 3000])
def test_what_an_array_leaves_while_memory_is_recycled_is_taken_for_the_next_of_its_size(nbytes: int) -> None:
    pieces = Pieces(4096)
    first = pieces.take(nbytes)
    view, address = first[64:].view(np.int8), first.ctypes.data
    with pieces.recycling([view]):
        del first
        others = [pieces.take(nbytes)]  # a view of the first is still there
        del view
        others += [pieces.take(nbytes - 64), pieces.take(nbytes), pieces.take(nbytes)]
    assert [array.ctypes.data == address for array in others] == [False, False, True, False]


def test_a_piece_is_held_only_while_its_memory_is_recycled() -> None:
    pieces = Pieces(4096)
    array, other = pieces.take(3000), np.zeros(3000, np.uint8)
    piece = weakref.ref(array.base.obj)
    with pieces.recycling([array, other]):
        del array
        assert piece() is not None
    assert piece() is None
    assert len(pieces.take(3000)) == 3000


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_pages_that_nobody_has_taken_go_back_and_neighbors_keep_their_values() -> None:
    pieces = Pieces(64 << 20)
    arrays = [pieces.take(20 << 20) for _ in range(3)]
    for number, array in enumerate(arrays):
        array[...] = number + 1
    before = resident_bytes()
    with pieces.recycling(arrays[:1]):
        del arrays[1]
    assert resident_bytes() < before - (15 << 20)
    assert [set(array[:: 1 << 10].tolist()) for array in arrays] == [{1}, {3}]
    again = pieces.take(20 << 20)
    again[...] = 2
    assert [set(array[:: 1 << 10].tolist()) for array in arrays] == [{1}, {3}]
