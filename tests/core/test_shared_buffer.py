"""The shared buffer: made by a call or by its first user, found through parents, grown on demand, one user at once."""

from __future__ import annotations

import gc
import threading
import tracemalloc
import weakref
from collections.abc import Callable

import numpy as np
import pytest

from dagexec import Workspace, create_shared_buffer
from dagexec.core.device import CPU
from dagexec.core.operator import Step
from dagexec.core.shared_buffer import Allocate, SharedBuffer, find_shared_buffer, shared_buffer_name, shared_step
from dagexec.errors import DeviceError, ResourceError


def test_the_first_operator_to_ask_for_one_makes_it_for_all_children_of_the_outermost_workspace() -> None:
    parent = Workspace()
    buffer = find_shared_buffer(Workspace(Workspace(parent)), CPU)
    assert find_shared_buffer(Workspace(parent), CPU) is buffer
    assert create_shared_buffer(parent) is buffer


def test_creating_it_again_keeps_the_buffer_and_its_lock() -> None:
    workspace = Workspace()
    buffer = create_shared_buffer(workspace)
    assert create_shared_buffer(workspace, "cpu") is buffer
    assert workspace.get_blob("__CAFFE2_SHARED_CONV_BUFFER_CPU__").value is buffer
    assert shared_buffer_name(CPU) == "__CAFFE2_SHARED_CONV_BUFFER_CPU__"


def test_a_child_uses_its_parents_buffer_unless_it_has_its_own() -> None:
    parent = Workspace()
    child = Workspace(parent)
    buffer = create_shared_buffer(parent)
    assert find_shared_buffer(child, CPU) is buffer
    own = create_shared_buffer(child)
    assert own is not buffer
    assert find_shared_buffer(child, CPU) is own
    assert find_shared_buffer(parent, CPU) is buffer


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(DeviceError, match="'tpu'"):
        create_shared_buffer(Workspace(), "tpu")


def squares(sizes: list[int], results: list[int]) -> Callable[[Allocate], Step]:
    """A step that writes into arrays of `sizes` and notes their sum."""

    def build(allocate: Allocate) -> Step:
        arrays = [allocate((size,), np.int64) for size in sizes]

        def step() -> None:
            for number, array in enumerate(arrays):
                array.fill(number + 1)
            results.append(sum(int(array.sum()) for array in arrays))

        return step

    return build


def test_nothing_is_allocated_before_the_first_use_and_then_the_largest_need() -> None:
    buffer = create_shared_buffer(Workspace())
    results: list[int] = []
    small = shared_step(buffer, squares([4], results), "small")
    large = shared_step(buffer, squares([100, 7], results), "large")
    assert buffer.nbytes == 0
    small()
    assert buffer.nbytes == 100 * 8 + 32 + 64  # each array begins at a multiple of 64 bytes
    large()
    small()
    assert results == [4, 100 + 14, 4]


def test_arrays_of_one_step_do_not_overlap_and_are_aligned() -> None:
    buffer = create_shared_buffer(Workspace())
    seen: list[np.ndarray[tuple[int], np.dtype[np.float32]]] = []

    def build(allocate: Allocate) -> Step:
        arrays = [allocate((3, size), np.float32) for size in (1, 5, 2)]
        return lambda: seen.extend(arrays)

    shared_step(buffer, build, "three")()
    assert [array.shape for array in seen] == [(3, 1), (3, 5), (3, 2)]
    assert not any(np.shares_memory(a, b) for i, a in enumerate(seen) for b in seen[:i])
    assert all(array.ctypes.data % 64 == 0 for array in seen)


def test_growing_moves_the_steps_that_were_bound_before() -> None:
    buffer = create_shared_buffer(Workspace())
    results: list[int] = []
    small = shared_step(buffer, squares([4], results), "small")
    small()
    before = buffer.nbytes
    shared_step(buffer, squares([1000], results), "large")()
    assert buffer.nbytes > before
    small()
    assert results == [4, 1000, 4]


def test_growing_frees_the_old_memory_though_steps_were_bound_to_it() -> None:
    buffer = create_shared_buffer(Workspace())
    results: list[int] = []
    steps = [shared_step(buffer, squares([100_000], results), "first")]
    tracemalloc.start()
    try:
        steps[0]()
        for size in (200_000, 300_000, 400_000):  # of 8 bytes
            steps.append(shared_step(buffer, squares([size], results), "grows"))
            tracemalloc.reset_peak()
            steps[-1]()
            assert tracemalloc.get_traced_memory()[1] < 8 * size + 50_000
    finally:
        tracemalloc.stop()
    for step in steps:
        step()
    assert results == [100_000, 200_000, 300_000, 400_000] * 2


def test_steps_do_not_rebind_while_the_buffer_stays() -> None:
    buffer = create_shared_buffer(Workspace())
    builds: list[int] = []

    def build(allocate: Allocate) -> Step:
        builds.append(1)
        allocate((8,), np.float32)
        return lambda: None

    step = shared_step(buffer, build, "counted")
    for _ in range(5):
        step()
    assert len(builds) == 2  # once to count, once to bind


def test_a_step_that_needs_no_memory_waits_for_nobody() -> None:
    buffer = create_shared_buffer(Workspace())
    ran: list[bool] = []

    def build(allocate: Allocate) -> Step:
        return lambda: ran.append(buffer.in_use)

    with buffer.use():
        shared_step(buffer, build, "needs nothing")()
    assert ran == [True]


def test_only_one_thread_is_inside_at_a_time() -> None:
    buffer = create_shared_buffer(Workspace())
    inside, most = [0], [0]
    first_is_in, go_on = threading.Event(), threading.Event()

    def build(allocate: Allocate) -> Step:
        allocate((8,), np.float32)

        def step() -> None:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            first_is_in.set()
            assert go_on.wait(10)
            inside[0] -= 1

        return step

    steps = [shared_step(buffer, build, "one"), shared_step(buffer, build, "two")]
    threads = [threading.Thread(target=step) for step in steps]
    for thread in threads:
        thread.start()
    assert first_is_in.wait(10)
    assert buffer.in_use
    assert inside[0] == 1
    go_on.set()
    for thread in threads:
        thread.join(10)
    assert most[0] == 1
    assert not buffer.in_use


def test_a_step_that_raises_lets_the_next_one_in() -> None:
    buffer = create_shared_buffer(Workspace())

    def build(allocate: Allocate) -> Step:
        allocate((8,), np.float32)

        def step() -> None:
            raise ZeroDivisionError

        return step

    with pytest.raises(ZeroDivisionError):
        shared_step(buffer, build, "fails")()
    assert not buffer.in_use
    results: list[int] = []
    shared_step(buffer, squares([2], results), "after")()
    assert results == [2]


def test_a_need_beyond_the_machine_is_refused_by_name_and_changes_nothing() -> None:
    buffer = create_shared_buffer(Workspace())
    with pytest.raises(ResourceError, match=r"Conv 'y': shared working memory.*bytes"):
        buffer.reserve(1 << 60, "Conv 'y': shared working memory")
    results: list[int] = []
    shared_step(buffer, squares([2], results), "after")()
    assert buffer.nbytes == 64


@pytest.mark.slow
def test_it_goes_with_its_workspace() -> None:
    workspace = Workspace()
    gone = weakref.ref(create_shared_buffer(workspace))
    assert isinstance(gone(), SharedBuffer)
    del workspace
    gc.collect()
    assert gone() is None
