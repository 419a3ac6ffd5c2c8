"""Copies of CUDA devices: every pair of places, packed and strided, waited for and not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from dagexec.core.device import Device
from dagexec.core.stream import Kernel
from dagexec.core.tensor import Tensor
from dagexec.devices.cuda import copies, staging
from dagexec.devices.cuda.copies import runtime_at
from dagexec.devices.cuda.in_flight import staged_downloads
from dagexec.errors import DeviceError, ShapeError
from tests.cuda.emulated import emulated
from tests.cuda.emulated.machine import Machine
from tests.devices.test_cuda_memory import Gate
from tests.devices.test_cuda_streams import cuda


@pytest.fixture
def machine() -> Iterator[Machine]:
    with emulated(asynchronous=True) as machine:
        yield machine


def on_device(values: Any, index: int = 0) -> Any:
    """A packed device array of these values."""
    host = np.ascontiguousarray(values)
    array = cuda(index).allocate(host.nbytes).view(host.dtype).reshape(host.shape)
    cuda().copy_now(array, host)
    return array


def fetched(array: Any) -> Any:
    """The values of a device array."""
    found = np.empty(array.shape, array.dtype)
    cuda().copy_now(found, array)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("peers", [True, False])
@pytest.mark.parametrize("way", ["to", "from", "within", "across"])
@pytest.mark.parametrize("dtype", [np.float32, np.int8, np.float64, np.float16, np.complex128])
def test_strided_arrays_are_copied_between_all_places(way: str, dtype: type, peers: bool) -> None:
    values = np.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5).astype(dtype)
    with emulated(asynchronous=True, seed=2, peer_access=peers):
        source: Any = values if way == "to" else on_device(values)
        target: Any = np.zeros((5, 3, 4), dtype)
        if way != "from":
            target = on_device(target, int(way == "across"))
        cuda().copy_now(target[::2, :, 1:], source[1].transpose(2, 0, 1)[1:4, :, 1:])
        found = target if way == "from" else fetched(target)
    expected = np.zeros((5, 3, 4), dtype)
    expected[::2, :, 1:] = values[1].transpose(2, 0, 1)[1:4, :, 1:]
    np.testing.assert_array_equal(found, expected)


@pytest.mark.slow
def test_a_copy_within_one_device_can_be_asked_of_a_stream_of_another(machine: Machine) -> None:
    values = np.arange(12.0).reshape(3, 4)
    source, target = on_device(values, 1), on_device(np.zeros((4, 3)), 1)
    stream = cuda(0).lease()
    cuda(0).copy(target, source.T, stream)
    stream.synchronize()
    np.testing.assert_array_equal(fetched(target), values.T)


def test_large_copies_go_through_staging_in_pieces(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (copies, staging):
        monkeypatch.setattr(module, "CHUNK", 1 << 16)
    values = np.random.default_rng(0).integers(0, 255, 300_001).astype(np.uint8)
    np.testing.assert_array_equal(fetched(on_device(values)), values)
    sizes = [call.arguments[2] for call in machine.calls if call.name == "memcpyAsync"]
    assert sizes == [65536] * 4 + [37857] + [65536] * 4 + [37857]
    for _ in range(10):
        np.testing.assert_array_equal(fetched(on_device(values)), values)
    blocks = sum(call.name == "hostAlloc" for call in machine.calls)
    assert blocks <= 10, "one for each piece of a copy there and of one back: they are used again"


def test_a_copy_on_a_stream_waits_for_nobody(machine: Machine) -> None:
    runtime = cuda()
    stream, values, found = runtime.lease(), np.arange(4.0), np.zeros(4)
    array = on_device(np.zeros(4))
    gate = Gate(stream)
    runtime.copy(array, values, stream)
    values[:] = -1  # was read as the copy was launched
    runtime.copy(found, array, stream)
    assert not found.any()
    gate.open()
    stream.synchronize()
    np.testing.assert_array_equal(found, np.arange(4.0))


def test_memory_of_the_host_that_a_copy_has_yet_to_reach_is_waited_for(machine: Machine) -> None:
    runtime = cuda()
    one, other = runtime.lease(), runtime.lease()
    source, target, between = on_device(np.full(4, 7.0)), on_device(np.zeros(4)), np.zeros(4)
    gate = Gate(one)
    runtime.copy(between, source, one)
    timer = threading.Timer(0.05, gate.open)
    timer.start()
    runtime.copy(target, between, other)
    other.synchronize()
    timer.join()
    np.testing.assert_array_equal(fetched(target), np.full(4, 7.0))


def test_what_is_copied_to_the_host_is_there_for_whoever_waits_for_anything_behind_it(machine: Machine) -> None:
    one, other = cuda(0), cuda(1)
    stream, behind = one.lease(), other.lease()
    waits: list[Callable[[Any], object]] = [
        lambda event: event.finish(),
        lambda event: event.finish(30),
        lambda event: behind.synchronize(),
        lambda event: behind.synchronize(30),
        lambda event: _until(lambda: event.is_done),
        lambda event: _until(lambda: behind.is_idle),
        _until_told,
    ]
    for number, wait in enumerate(waits, 1):
        found, array = np.zeros(4), on_device(np.full(4, float(number)))
        gate = Gate(stream)
        one.copy(found, array, stream)
        copied, event = one.event("copied"), other.event("behind it")
        copied.record(stream)
        behind.wait(copied)
        event.record(behind)
        assert not found.any()
        gate.open()
        wait(event)
        assert found.tolist() == [number] * 4
    assert not staged_downloads._expected


def _until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end


def _until_told(event: Any) -> None:
    told = threading.Event()
    event.when_done(told.set)
    assert told.wait(30)


def test_memory_of_the_host_that_is_read_only_is_refused_as_a_copy_is_launched(machine: Machine) -> None:
    found = np.zeros(4)
    found.flags.writeable = False
    stream, array = cuda().lease(), on_device(np.ones(4))
    cuda().copy(found, array, stream)
    assert stream.failure is not None
    assert "an array of the host that is read-only" in str(stream.failure.error)


def test_pinned_memory_is_copied_directly_and_can_be_captured(machine: Machine) -> None:
    runtime = cuda()
    stream = runtime.lease()
    source, found = runtime.pinned(8), runtime.pinned(8)
    array = runtime.allocate(8)
    source[:], found[:] = 1, 0
    with runtime.capture([stream]) as capture:
        runtime.copy(array, source, stream)
        runtime.copy(found, array, stream)
    for value in (3, 4):
        source[:] = value
        capture.replay()
        stream.synchronize()
        assert found.tolist() == [value] * 8
    del source
    again = runtime.pinned(8)
    assert staging.is_pinned(again[2:].view(np.int16))
    assert not staging.is_pinned(np.zeros(8))


@pytest.mark.parametrize("to_device", [True, False])
def test_a_copy_of_memory_that_may_move_cannot_be_captured(machine: Machine, to_device: bool) -> None:
    runtime = cuda()
    stream, host, array = runtime.lease(), np.zeros(8, np.uint8), runtime.allocate(8)
    pair = (array, host) if to_device else (host, array)
    label = "from cpu to cuda:0" if to_device else "from cuda:0 to cpu"
    with (
        pytest.raises(DeviceError, match=f"copy {label} cannot be captured: .*the host that is not pinned"),
        runtime.capture([stream]),
    ):
        runtime.copy(*pair, stream)
    stream.launch(Kernel(lambda: None, "k"))
    assert stream.failure is None
    assert stream.synchronize()


@pytest.mark.slow
def test_a_fetch_comes_after_what_is_on_the_current_stream_and_gives_its_failure(machine: Machine) -> None:
    runtime = cuda()
    stream, array = runtime.lease(), on_device(np.zeros(4))
    gate = Gate(stream)
    runtime.copy(array, np.arange(4.0), stream)
    timer = threading.Timer(0.05, gate.open)
    timer.start()
    with runtime.using(stream):
        np.testing.assert_array_equal(fetched(array), np.arange(4.0))
        stream.launch(Kernel(lambda: 1 / 0, "division"))
        for pair in ((np.zeros(4), array), (array, np.zeros(4))):
            with pytest.raises(ZeroDivisionError):
                runtime.copy_now(*pair)
    timer.join()


def test_a_fetch_without_a_current_stream_waits_for_its_own_copy_only(machine: Machine) -> None:
    runtime = cuda()
    stream, array = runtime.lease(), on_device(np.arange(4.0))
    gate = Gate(stream)
    np.testing.assert_array_equal(fetched(array), np.arange(4.0))
    assert not stream.is_idle
    gate.open()
    assert stream.synchronize()
    assert runtime.statistics().leased == 1


@pytest.mark.slow
def test_shapes_are_broadcast_by_a_blocking_copy_and_otherwise_equal(machine: Machine) -> None:
    runtime = cuda()
    array = on_device(np.zeros((2, 3)))
    runtime.copy_now(array, np.arange(3.0))
    np.testing.assert_array_equal(fetched(array), [[0, 1, 2]] * 2)
    runtime.copy_now(array, on_device(np.array([[5.0], [6.0]])))
    np.testing.assert_array_equal(fetched(array), [[5] * 3, [6] * 3])
    for wrong in (np.zeros(4), on_device(np.zeros(4)), np.zeros((2, 3), np.float32)):
        with pytest.raises((ShapeError, ValueError)):
            runtime.copy_now(array, wrong)
    with pytest.raises(ShapeError, match="expected the same"):
        runtime.copy(array, np.zeros(3), runtime.lease())


def test_tensors_are_fed_and_fetched_with_any_strides(machine: Machine) -> None:
    tensor = Tensor(Device("cuda", 1))
    values = np.arange(24.0).reshape(2, 3, 4)
    for view in (values, values[:, ::2], values.T, values[..., 0], np.float32(3)[None], np.zeros((0, 3))):
        tensor.feed(view)
        np.testing.assert_array_equal(tensor.fetch(), view)


def test_axes_that_one_step_runs_through_are_one(machine: Machine) -> None:
    array = on_device(np.zeros((2, 1, 3, 4, 5)))
    assert len(copies._merged(list(array.shape), list(array.strides), list(array.strides))) == 1
    many = on_device(np.zeros((3,) * 9, np.int8))
    with pytest.raises(DeviceError, match="a strided copy of 9 axes"):
        copies.strided(many, many.transpose(*reversed(range(9))))


def test_peers_are_enabled_once(machine: Machine) -> None:
    array, target = on_device(np.arange(4.0)), on_device(np.zeros(4), 1)
    for _ in range(2):
        cuda().copy_now(target, array)
    np.testing.assert_array_equal(fetched(target), np.arange(4.0))
    assert machine.devices[0].peers == {1}
    assert copies.enable_peers(runtime_at(0), 1, 0)
