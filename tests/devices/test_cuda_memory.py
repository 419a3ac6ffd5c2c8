"""Memory of CUDA devices: it is used again, but never while anything on any device may still use it."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from dagexec.core.stream import Kernel
from dagexec.devices.cuda.current import current
from dagexec.devices.cuda.memory import size_class
from dagexec.errors import ResourceError
from tests.cuda.emulated import emulated
from tests.cuda.emulated.machine import Fault, Machine
from tests.devices.test_cuda_streams import cuda, fill


@pytest.fixture
def machine() -> Iterator[Machine]:
    with emulated(asynchronous=True) as machine:
        yield machine


class Gate:
    """Holds up a stream until it is opened."""

    def __init__(self, stream: Any) -> None:
        self._event = threading.Event()
        with stream.runtime.guard():
            stream.runtime.api.launchHostFunc(stream.pointer, lambda _: self._event.wait(30), 0)

    def open(self) -> None:
        self._event.set()


def blocks_taken(machine: Machine) -> int:
    """How often CUDA was asked for memory."""
    return sum(call.name == "malloc" for call in machine.calls)


def test_sizes_come_in_classes_that_waste_an_eighth_at_most() -> None:
    for nbytes in [*range(1, 5000, 7), 10**6, 10**6 + 1, 2**30, 2**30 + 1]:
        size = size_class(nbytes)
        assert nbytes <= size
        assert size <= max(512, nbytes * 1.125 + 512)
        assert size_class(size) == size
        assert size % 512 == 0


def test_memory_that_nothing_uses_is_handed_out_again(machine: Machine) -> None:
    runtime = cuda()
    array = runtime.allocate(1000)
    pointer = array.data.ptr
    assert (runtime.statistics().allocated_bytes, runtime.memory.cached) == (1000, 0)
    del array
    assert (runtime.statistics().allocated_bytes, runtime.memory.cached) == (0, 1024)
    view = runtime.allocate(900)[:10].view()
    assert view.data.ptr == pointer
    assert (runtime.statistics().allocated_bytes, runtime.statistics().peak_bytes) == (900, 1000)
    assert blocks_taken(machine) == 1
    other = runtime.allocate(1000)
    assert other.data.ptr != pointer


@pytest.mark.parametrize("busy", [0, 1])
def test_memory_freed_while_a_stream_of_any_device_works_is_not_handed_out(machine: Machine, busy: int) -> None:
    runtime = cuda(0)
    stream = cuda(busy).lease()
    idle = runtime.lease()
    array = runtime.allocate(1000)
    pointer = array.data.ptr
    gate = Gate(stream)
    if not busy:
        stream.launch(fill(array, 1))
    del array
    early = runtime.allocate(1000)
    assert early.data.ptr != pointer
    idle.launch(fill(early, 2))
    gate.open()
    assert stream.synchronize()
    late = runtime.allocate(1000)
    assert late.data.ptr == pointer
    idle.launch(fill(late, 3))
    assert idle.synchronize()
    assert machine.races == []


def test_work_launched_after_memory_was_freed_does_not_hold_it_up(machine: Machine) -> None:
    runtime = cuda()
    stream = runtime.lease()
    array = runtime.allocate(1000)
    pointer = array.data.ptr
    stream.launch(fill(array, 1))
    first = Gate(stream)
    del array
    assert runtime.allocate(1000).data.ptr != pointer
    reached = runtime.event("before the second gate")
    reached.record(stream)
    second = Gate(stream)
    first.open()
    reached.finish()
    found = [runtime.allocate(1000) for _ in range(2)]
    assert pointer in {array.data.ptr for array in found}
    second.open()


@pytest.mark.slow
def test_when_memory_is_short_what_is_set_aside_is_waited_for(machine: Machine) -> None:
    runtime = cuda()
    runtime.memory.limit = 2048
    stream = runtime.lease()
    arrays = [runtime.allocate(1000) for _ in range(2)]
    gate = Gate(stream)
    arrays.pop()
    timer = threading.Timer(0.05, gate.open)
    timer.start()
    arrays.append(runtime.allocate(1000))
    timer.join()
    assert blocks_taken(machine) == 2


@pytest.mark.slow
def test_when_memory_is_short_blocks_of_other_sizes_go_back_to_cuda(machine: Machine) -> None:
    runtime = cuda()
    runtime.memory.limit = 4096
    for size in (1000, 2000, 3000, 4000):
        del_me = runtime.allocate(size)
        del del_me
    kept = runtime.allocate(4096)
    assert kept.nbytes == 4096
    assert runtime.memory.cached == 0
    assert sum(call.name == "free" for call in machine.calls) >= 3


@pytest.mark.slow
def test_out_of_memory_says_the_numbers_and_leaves_the_device_usable() -> None:
    with emulated(memory_limit=1 << 20):
        runtime = cuda()
        held = runtime.allocate(1 << 19)
        message = (
            r"cuda:0: out of memory: an allocation of 1,000,000 bytes; of 1,048,576 bytes 524,288 are free, arrays of "
            r"this process hold 524,288 and 0 are kept"
        )
        with pytest.raises(ResourceError, match=message):
            runtime.allocate(1_000_000)
        del held
        assert runtime.allocate(1_000_000).nbytes == 1_000_000
        assert runtime.statistics().limit_bytes is None


def test_what_only_a_cycle_holds_is_no_reason_to_fail() -> None:
    with emulated(memory_limit=1 << 20):
        runtime = cuda()
        gc.disable()
        try:
            cycle: list[Any] = [runtime.allocate(1 << 19)]
            cycle.append(cycle)
            del cycle
            assert runtime.allocate(1 << 20).nbytes == 1 << 20
        finally:
            gc.enable()


@pytest.mark.slow
def test_an_error_of_cuda_that_is_no_shortage_is_passed_on(machine: Machine) -> None:
    machine.faults.append(Fault("malloc"))
    runtime = cuda()
    assert runtime.allocate(10).nbytes == 10  # the second attempt, after all that is cached went back


def test_memory_freed_on_a_cuda_callback_thread_calls_nothing_of_cuda(machine: Machine) -> None:
    runtime = cuda()
    stream, held = runtime.lease(), [runtime.allocate(100)]
    runtime.api.launchHostFunc(stream.pointer, lambda _: held.clear(), 0)
    assert stream.synchronize()
    assert held == []
    assert runtime.memory.held == 0


def test_memory_freed_during_a_capture_is_set_aside_after_it(machine: Machine) -> None:
    runtime = cuda()
    captured, busy = runtime.lease(), runtime.lease()
    freed, target = runtime.allocate(1000), runtime.allocate(1000)
    pointer = freed.data.ptr
    gate = Gate(busy)
    busy.launch(fill(freed, 1))
    with runtime.capture([captured]) as capture:
        captured.launch(fill(target, 7))
        del freed
        during = runtime.allocate(1000)
        assert during.data.ptr != pointer
        before = len(machine.calls)
        runtime.memory.trim()
        assert not {call.name for call in machine.calls[before:]} & {"free", "eventRecord", "streamQuery"}
    assert runtime.allocate(1000).data.ptr != pointer
    gate.open()
    assert busy.synchronize()
    again = [runtime.allocate(1000) for _ in range(2)]
    assert pointer in {array.data.ptr for array in again}
    capture.replay()
    assert captured.synchronize()
    assert machine.races == []


@pytest.mark.slow
def test_a_capture_keeps_the_memory_that_its_kernels_use(machine: Machine) -> None:
    runtime = cuda()
    stream, array = runtime.lease(), runtime.allocate(1000)
    pointer = array.data.ptr
    with runtime.capture([stream]) as capture:
        stream.launch(fill(array, 7))
    del array
    gc.collect()
    assert runtime.allocate(1000).data.ptr != pointer
    capture.replay()
    assert stream.synchronize()
    del capture
    gc.collect()
    assert runtime.allocate(1000).data.ptr == pointer


def test_no_bytes_need_no_memory(machine: Machine) -> None:
    array = cuda().allocate(0)
    assert (array.shape, blocks_taken(machine)) == ((0,), 0)


@pytest.mark.slow
def test_kernels_of_many_threads_never_find_memory_of_others(machine: Machine) -> None:
    """Each thread allocates, fills and frees on its own stream; the machine tells of touches that nothing orders."""
    runtime = cuda()

    def work(value: int) -> None:
        stream = runtime.lease()
        for _ in range(20):
            array = runtime.allocate(600)
            stream.launch(fill(array, value))
            stream.launch(Kernel(lambda: None, "nothing"))
        stream.synchronize()

    threads = [threading.Thread(target=work, args=(value,)) for value in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert machine.races == []
    assert runtime.memory.held <= 600
    assert current.stream is None
