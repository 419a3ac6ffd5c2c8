"""The emulation's streams: launches return before the work, nothing but events orders streams, races are found."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from dagexec.devices.cuda.binding import cupy
from dagexec.devices.cuda.current import current
from dagexec.devices.cuda.kernels import Launch, compiled
from tests.cuda.emulated import emulated
from tests.cuda.emulated.errors import CUDADriverError, CUDARuntimeError, EmulationError, RaceError
from tests.cuda.emulated.machine import Fault
from tests.cuda.memory_copies import from_device, to_device

COPY = 'extern "C" __global__ void copied(const float* x, float* y) { FOR_EACH(i, 64) y[i] = x[i] + 1; }'


def launch(x: Any, y: Any, stream: Any) -> None:
    """y = x + 1 on a stream."""
    before, current.stream_pointer = current.stream_pointer, stream.ptr
    try:
        Launch(compiled("copied", COPY), (x, y), elements=64)()
    finally:
        current.stream_pointer = before


def arrays(count: int) -> list[Any]:
    return [to_device(np.full(64, float(number), np.float32)) for number in range(count)]


def two_streams() -> tuple[Any, Any]:
    return cupy().cuda.Stream(non_blocking=True), cupy().cuda.Stream(non_blocking=True)


def pinned(count: int) -> np.ndarray[Any, Any]:
    """Pinned memory of the host."""
    return np.frombuffer(cupy().cuda.alloc_pinned_memory(4 * count), np.float32)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_work_is_done_later_in_the_order_of_its_stream(seed: int) -> None:
    with emulated(asynchronous=True, seed=seed):
        (stream, _), (x, y) = two_streams(), arrays(2)
        host = pinned(64)
        host[:] = -1
        runtime = cupy().cuda.runtime
        launch(x, y, stream)
        launch(y, x, stream)
        runtime.memcpyAsync(host.ctypes.data, x.data.ptr, 256, runtime.memcpyDefault, stream.ptr)
        assert (host == -1).all(), "the copy is done before anybody waited"
        assert not stream.done
        stream.synchronize()
        assert stream.done
        assert (host == 2).all()


@pytest.mark.slow
def test_pageable_memory_is_read_before_the_call_returns_and_written_before_it_does() -> None:
    with emulated(asynchronous=True, seed=1):
        (stream, _), (x,) = two_streams(), arrays(1)
        runtime, host = cupy().cuda.runtime, np.full(64, 5, np.float32)
        runtime.memcpyAsync(x.data.ptr, host.ctypes.data, 256, runtime.memcpyDefault, stream.ptr)
        host[:] = 6
        found = np.zeros(64, np.float32)
        runtime.memcpyAsync(found.ctypes.data, x.data.ptr, 256, runtime.memcpyDefault, stream.ptr)
        assert (found == 5).all()


def test_pinned_memory_is_read_when_the_copy_is_done() -> None:
    with emulated(asynchronous=True, seed=1):
        (stream, _), (x,) = two_streams(), arrays(1)
        runtime, host = cupy().cuda.runtime, pinned(64)
        host[:] = 5
        runtime.memcpyAsync(x.data.ptr, host.ctypes.data, 256, runtime.memcpyDefault, stream.ptr)
        host[:] = 6
        stream.synchronize()
        assert (from_device(x) == 6).all()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_two_streams_that_meet_in_memory_race_unless_an_event_is_between(seed: int) -> None:
    with emulated(asynchronous=True, seed=seed) as gpu:
        (one, other), (x, y, z) = two_streams(), arrays(3)
        launch(x, y, one)
        launch(y, z, other)
        one.synchronize()
        other.synchronize()
        assert len(gpu.races) == 1
        assert "copied on stream" in gpu.races[0]
        assert "bytes 0 to 256" in gpu.races[0]
    with emulated(asynchronous=True, seed=seed) as gpu:
        (one, other), (x, y, z) = two_streams(), arrays(3)
        launch(x, y, one)
        other.wait_event(one.record())
        launch(y, z, other)
        other.synchronize()
        assert not gpu.races
        assert (from_device(z) == 2).all()


def test_what_the_host_has_waited_for_is_before_all_it_asks_for_later() -> None:
    with emulated(asynchronous=True, seed=3) as gpu:
        (one, other), (x, y, z) = two_streams(), arrays(3)
        launch(x, y, one)
        one.record().synchronize()
        launch(y, z, other)
        other.synchronize()
        assert not gpu.races


def test_an_event_of_before_does_not_order_what_came_after_it() -> None:
    with emulated(asynchronous=True, seed=3) as gpu:
        (one, other), (x, y, z) = two_streams(), arrays(3)
        event = one.record()
        launch(x, y, one)
        other.wait_event(event)
        launch(y, z, other)
        other.synchronize()
        one.synchronize()
        assert len(gpu.races) == 1


def test_two_that_only_read_do_not_race_and_neither_do_parts_of_one_block() -> None:
    with emulated(asynchronous=True, seed=3) as gpu:
        (one, other), (x, y) = two_streams(), arrays(2)
        whole = to_device(np.zeros(128, np.float32))
        launch(x, whole[:64], one)
        launch(x, whole[64:], other)
        one.synchronize()
        other.synchronize()
        assert not gpu.races
        launch(x, whole[:64], one)
        launch(y, whole[32:96], other)
        one.synchronize()
        other.synchronize()
        assert "bytes 128 to 256" in gpu.races[0]


def test_a_race_that_nobody_asks_about_is_raised_at_the_end() -> None:
    with pytest.raises(RaceError, match="copied"), emulated(asynchronous=True):  # noqa: PT012
        (one, other), (x, y, z) = two_streams(), arrays(3)
        launch(x, y, one)
        launch(z, y, other)
        cupy().cuda.runtime.deviceSynchronize()


def test_blocking_streams_are_in_order_with_the_default_stream() -> None:
    with emulated(asynchronous=True, seed=3) as gpu:
        cuda = cupy().cuda
        one, null, other, (x, y) = cuda.Stream(), cuda.Stream(null=True), cuda.Stream(), arrays(2)
        launch(x, y, one)
        launch(y, x, null)
        launch(x, y, other)
        other.synchronize()
        assert not gpu.races
        assert (from_device(y) == 3).all()


def test_memory_is_freed_by_streams_in_their_order() -> None:
    with emulated(asynchronous=True, seed=3) as gpu:
        runtime, (one, other) = cupy().cuda.runtime, two_streams()
        pointer = runtime.mallocAsync(256, one.ptr)
        runtime.memsetAsync(pointer, 0, 256, other.ptr)
        runtime.freeAsync(pointer, one.ptr)
        runtime.deviceSynchronize()
        assert len(gpu.races) == 2
        with pytest.raises(EmulationError, match="freed"):
            runtime.memsetAsync(pointer, 0, 256, one.ptr)


def test_a_kernel_is_refused_freed_memory_of_the_host_and_of_devices_it_does_not_reach() -> None:
    with emulated():
        runtime = cupy().cuda.runtime
        (stream, _), (x, y) = two_streams(), arrays(2)
        with cupy().cuda.Device(1):
            (far,) = arrays(1)
        with pytest.raises(EmulationError, match=r"pointer 1 .* of 1"):
            launch(x, far, stream)
        runtime.deviceEnablePeerAccess(1)
        launch(x, far, stream)
        with pytest.raises(CUDARuntimeError, match="already enabled"):
            runtime.deviceEnablePeerAccess(1)
        host = np.zeros(64, np.float32)
        elsewhere = cupy().cuda.UnownedMemory(host.ctypes.data, 256, host, 0)
        pageable = cupy().ndarray((64,), np.float32, memptr=cupy().cuda.MemoryPointer(elsewhere, 0))
        with pytest.raises(EmulationError, match="no memory of a device"):
            launch(pageable, y, stream)
        step = Launch(compiled("copied", COPY), (x, y), elements=64)
        step._kept = ()  # type: ignore[misc]
        del x
        with pytest.raises(EmulationError, match="in a freed block"):
            step()


def test_a_stream_of_another_device_than_the_current_one_is_refused() -> None:
    with emulated():
        (stream, _), (x, y) = two_streams(), arrays(2)
        cupy().cuda.runtime.setDevice(1)
        with pytest.raises(CUDADriverError, match="invalid resource handle"):
            launch(x, y, stream)
        with pytest.raises(CUDARuntimeError, match="invalid resource handle"):
            cupy().cuda.Event().record(stream)


def test_a_write_beside_a_block_is_noticed_when_it_is_freed() -> None:
    with emulated() as gpu:
        (x,) = arrays(1)
        block = gpu.memories.find(x.data.ptr)
        assert block is not None
        block._held[block._begin + 256 + 3] = 1
        with pytest.raises(EmulationError, match="behind a block of 256 bytes, at its byte 259"):
            gpu.free(block)
        x.data.mem.ptr = 0


def test_a_full_device_is_out_of_memory_and_what_is_freed_can_be_had_again() -> None:
    with emulated(memory_limit=1000):
        cuda = cupy().cuda
        held = cuda.Memory(600)
        assert cuda.runtime.memGetInfo() == (400, 1000)
        with pytest.raises(cuda.memory.OutOfMemoryError):
            cuda.Memory(600)
        del held
        cuda.Memory(600)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_kernel_that_fails_makes_every_later_call_fail(asynchronous: bool) -> None:
    with emulated(asynchronous=asynchronous, faults=[Fault("kernel", "copied", nth=2)]):
        (stream, _), (x, y) = two_streams(), arrays(2)
        launch(x, y, stream)
        launch(x, y, stream)
        with pytest.raises(CUDARuntimeError, match="unspecified launch failure"):
            stream.synchronize()
        with pytest.raises(CUDARuntimeError, match="unspecified launch failure"):
            cupy().cuda.runtime.malloc(4)
        assert cupy().cuda.runtime.streamQuery(stream.ptr) == 719


def test_a_host_function_may_not_call_cuda() -> None:
    with emulated(asynchronous=True, seed=0):
        (stream, _), met = two_streams(), []

        def function(number: int) -> None:
            try:
                cupy().cuda.runtime.malloc(4)
            except CUDARuntimeError as error:
                met.append((number, str(error)))

        stream.launch_host_func(function, 7)
        assert not met
        stream.synchronize()
        assert met == [(7, "cudaErrorNotPermitted: operation not permitted")]


def test_events_with_timing_tell_the_time_between_and_others_refuse() -> None:
    with emulated(asynchronous=True, seed=0, kernel_seconds=0.25):
        cuda, (stream, _), (x, y) = cupy().cuda, two_streams(), arrays(2)
        start, end = cuda.Event(), cuda.Event()
        start.record(stream)
        launch(x, y, stream)
        launch(x, y, stream)
        end.record(stream)
        with pytest.raises(CUDARuntimeError, match="not ready"):
            cuda.get_elapsed_time(start, end)
        end.synchronize()
        assert cuda.get_elapsed_time(start, end) == pytest.approx(500, rel=0.5)
        without = cuda.Event(disable_timing=True)
        without.record(stream)
        with pytest.raises(CUDARuntimeError, match="invalid resource handle"):
            cuda.get_elapsed_time(start, without)


def test_calls_are_recorded_with_stream_and_thread() -> None:
    with emulated() as gpu:
        (stream, _), (x, y) = two_streams(), arrays(2)
        del gpu.calls[:]
        launch(x, y, stream)
        stream.record()
        names = [(call.name, call.stream) for call in gpu.calls]
        assert names == [("launchKernel", stream.ptr), ("eventCreateWithFlags", None), ("eventRecord", stream.ptr)]
        assert {call.thread for call in gpu.calls} == {threading.get_ident()}


# Capture


def captured(streams: tuple[Any, Any], x: Any, y: Any, z: Any) -> Any:
    """A graph of two launches on two streams, the second after the first."""
    one, other = streams
    one.begin_capture()
    launch(x, y, one)
    other.wait_event(one.record())
    launch(y, z, other)
    one.wait_event(other.record())
    return one.end_capture()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_graph_of_two_streams_does_its_work_at_every_launch_and_none_before(seed: int) -> None:
    with emulated(asynchronous=True, seed=seed) as gpu:
        streams, (x, y, z) = two_streams(), arrays(3)
        cupy().cuda.runtime.memset(z.data.ptr, 0, 256)
        graph = captured(streams, x, y, z)
        assert (from_device(z) == 0).all()
        graph.launch(streams[1])
        launch(z, x, streams[1])
        graph.launch(streams[1])
        streams[1].synchronize()
        assert (from_device(z) == 5).all()
        assert not gpu.races


def test_nodes_of_a_graph_with_nothing_between_race() -> None:
    with emulated(asynchronous=True, seed=1) as gpu:
        (one, other), (x, y, z) = two_streams(), arrays(3)
        one.begin_capture()
        other.wait_event(one.record())
        launch(x, y, one)
        launch(y, z, other)
        one.wait_event(other.record())
        graph = one.end_capture()
        graph.launch(one)
        one.synchronize()
        assert len(gpu.races) == 1


@pytest.mark.slow
def test_what_a_capture_forbids_is_refused_and_spoils_it() -> None:
    with emulated(asynchronous=True, seed=1):
        cuda, (one, other), (x, y, z) = cupy().cuda, two_streams(), arrays(3)
        before = other.record()
        for wrong, message in (
            (one.synchronize, "cudaErrorStreamCaptureUnsupported"),
            (lambda: one.wait_event(before), "cudaErrorStreamCaptureIsolation"),
            (lambda: cuda.runtime.mallocAsync(4, one.ptr), "cudaErrorStreamCaptureUnsupported"),
            (lambda: one.record().synchronize(), "cudaErrorCapturedEvent"),
            (
                lambda: cuda.runtime.memcpyAsync(x.data.ptr, np.zeros(1).ctypes.data, 4, 4, one.ptr),
                "cudaErrorStreamCaptureUnsupported",
            ),
        ):
            one.begin_capture()
            launch(x, y, one)
            with pytest.raises(CUDARuntimeError, match=message):
                wrong()
            with pytest.raises(CUDARuntimeError, match="cudaErrorStreamCaptureInvalidated"):
                one.end_capture()
        one.begin_capture()
        launch(x, y, one)
        other.wait_event(one.record())
        launch(y, z, other)
        with pytest.raises(CUDARuntimeError, match="cudaErrorStreamCaptureUnmatched"):
            other.end_capture()
        with pytest.raises(CUDARuntimeError, match="cudaErrorStreamCaptureUnjoined"):
            one.end_capture()
        with pytest.raises(CUDARuntimeError, match="Unsupported"):
            cuda.Stream(null=True).begin_capture()
