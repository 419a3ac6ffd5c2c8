from __future__ import annotations

import gc
import threading
import weakref

import numpy as np
import pytest

from dagexec.core.dtypes import FLOAT32
from dagexec.ops.onednn.binding import library
from dagexec.ops.onednn.descriptors import Descriptor, aligned_empty
from dagexec.ops.onednn.operator import reorder
from dagexec.ops.onednn.packing import Pieces
from dagexec.platform.garbage_collection import garbage_collection_paused


def test_small_arrays_share_a_piece_and_do_not_overlap() -> None:
    pieces = Pieces(4096)
    arrays = [pieces.take(nbytes) for nbytes in (100, 1, 0, 64, 65, 1000)]
    for number, array in enumerate(arrays):
        assert array.ctypes.data % 64 == 0 or not array.size
        array[...] = number
    assert [set(array.tolist()) for array in arrays] == [{0}, {1}, set(), {3}, {4}, {5}]
    assert len({id(array.base) for array in arrays}) == 1


@pytest.mark.parametrize("nbytes", [2049, 5000])
def test_a_large_array_is_by_itself(nbytes: int) -> None:
    pieces = Pieces(4096)
    small, large = pieces.take(10), pieces.take(nbytes)
    assert large.base is not small.base
    assert len(large) == nbytes
    assert large.ctypes.data % 64 == 0


def test_a_full_piece_is_followed_by_another() -> None:
    pieces = Pieces(4096)
    arrays = [pieces.take(1500) for _ in range(3)]
    assert len({id(array.base) for array in arrays}) == 2


@pytest.mark.slow
def test_a_piece_is_freed_with_the_last_of_its_arrays() -> None:
    pieces = Pieces(4096)
    first, second = pieces.take(10), pieces.take(10)
    base = weakref.ref(first.base)
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


def test_memory_of_a_copy_that_is_made_once_is_let_go_of_before_cycles_are_collected() -> None:
    """Transformed weights of all layers stayed until then: five times the file, while the first run was prepared."""
    found = library()
    assert found is not None
    x, y = np.arange(4096, dtype=np.float32).reshape(64, 64), aligned_empty(4 * 4096)
    source, target = Descriptor.of(found, x, FLOAT32), Descriptor.of(found, x.T, FLOAT32)
    with garbage_collection_paused():
        reorder(found, "copy", source, target, x, y, aligned_empty).run_once()
        np.testing.assert_array_equal(y.view(np.float32).reshape(64, 64), x.T)
        given = weakref.ref(x)
        del x
        assert given() is None
