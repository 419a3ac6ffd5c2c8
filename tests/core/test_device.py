"""Devices by name and number, the host's context, and a second kind of device registered by the test."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from dagexec.core import device as device_module
from dagexec.core.device import (
    CPU,
    CPUContext,
    Device,
    element_count,
    make_context,
    register_context,
    register_copy,
)
from dagexec.core.dtypes import FLOAT32
from dagexec.core.proto import DeviceOption
from dagexec.core.tensor import Tensor, copy_tensor
from dagexec.errors import DeviceError, ResourceError


@pytest.mark.parametrize(
    ("text", "device"),
    [("cpu", CPU), ("cuda", Device("cuda", 0)), ("cuda:3", Device("cuda", 3)), ("sim:1", Device("sim", 1))],
)
def test_a_device_has_a_name_and_an_option(text: str, device: Device) -> None:
    assert Device.parse(text) == device
    assert Device.parse(str(device)) == device
    assert Device.from_option(device.to_option()) == device


@pytest.mark.parametrize("text", ["", "gpu", "cuda:", "cuda:x", "cpu 0", "CUDA:0"])
def test_an_unknown_device_name_is_refused(text: str) -> None:
    with pytest.raises(DeviceError, match=f"device {text!r} is unknown; expected one of cpu, cuda:N, sim:N"):
        Device.parse(text)


def test_an_unknown_device_number_is_refused() -> None:
    with pytest.raises(DeviceError, match="device type number 6 is not one dagexec has"):
        Device.from_option(DeviceOption(device_type=6))


def test_an_unavailable_device_names_the_available_ones() -> None:
    with pytest.raises(DeviceError, match=r"device vulkan:2 is not available here; available kinds: .*cpu"):
        make_context(Device("vulkan", 2))


def test_the_host_allocates_aligned_memory_and_copies() -> None:
    context = make_context(CPU)
    for nbytes in (0, 1, 100):
        buffer = context.allocate(nbytes)
        assert (buffer.dtype, buffer.size) == (np.dtype(np.uint8), nbytes)
        assert buffer.ctypes.data % 64 == 0 or nbytes == 0
    target = np.zeros(3)
    context.copy_within(target, np.arange(3.0))
    assert target.tolist() == [0, 1, 2]
    context.free(context.allocate(8))
    context.finish()


def test_the_host_has_one_stream() -> None:
    context = make_context(CPU)
    context.switch(0)
    with pytest.raises(DeviceError, match="stream 1 asked for; cpu has stream 0 only"):
        context.switch(1)


def test_a_seed_repeats_the_random_numbers_of_a_context() -> None:
    first = make_context(CPU, 5).random.random(4).tolist()
    assert make_context(CPU, 5).random.random(4).tolist() == first
    assert make_context(CPU, 6).random.random(4).tolist() != first
    assert make_context(CPU).random.random(4).tolist() != make_context(CPU).random.random(4).tolist()
    context = make_context(CPU, 5)
    assert context.random is context.random


def test_more_than_any_machine_has_is_refused() -> None:
    with pytest.raises(ResourceError):
        make_context(CPU).allocate(2**60)


def test_element_count_refuses_what_no_array_can_have() -> None:
    assert element_count(()) == 1
    assert element_count((3, 0, 2)) == 0
    assert element_count((2**31, 2**31)) == 2**62
    for shape, message in (((2**32, 2**31), "overflows"), ((2**62, 0, 4), "overflows"), ((0, -1), "negative size")):
        with pytest.raises(ResourceError, match=message):
            element_count(shape)


class SlowMemory(CPUContext):
    """A pretended device: host memory that counts what was asked of it."""

    def __init__(self, device: Device, seed: int | None) -> None:
        super().__init__(device, seed)
        self.allocations: list[int] = []

    def allocate(self, nbytes: int) -> npt.NDArray[np.uint8]:
        self.allocations.append(nbytes)
        return super().allocate(nbytes)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, str]]]:
    """A device kind `sim` with copies to and from the host; the list tells which way data crossed."""
    monkeypatch.setattr(device_module, "_contexts", dict(device_module._contexts))
    monkeypatch.setattr(device_module, "_copies", {})
    crossings: list[tuple[str, str]] = []

    def crossing(to: str, source: str) -> Any:
        def copy(destination: npt.NDArray[Any], values: npt.NDArray[Any]) -> None:
            crossings.append((to, source))
            np.copyto(destination, values)

        return copy

    register_context("sim", SlowMemory)
    for pair in (("sim", "cpu"), ("cpu", "sim"), ("sim", "sim")):
        register_copy(*pair, crossing(*pair))
    return crossings


def test_a_tensor_is_copied_across_devices_by_the_registered_function(fake: list[tuple[str, str]]) -> None:
    host, near, far = Tensor(), Tensor(make_context(Device("sim", 0))), Tensor(make_context(Device("sim", 1)))
    host.feed(np.arange(6, dtype=np.float32).reshape(2, 3))
    copy_tensor(near, host)
    copy_tensor(far, near)
    back = Tensor()
    copy_tensor(back, far)
    assert fake == [("sim", "cpu"), ("sim", "sim"), ("cpu", "sim")]
    assert (back.shape, back.meta, back.device) == ((2, 3), FLOAT32, CPU)
    assert back.fetch().tolist() == [[0, 1, 2], [3, 4, 5]]
    assert isinstance(near.context, SlowMemory)
    assert near.context.allocations == [24]


def test_a_copy_within_a_device_does_not_cross(fake: list[tuple[str, str]]) -> None:
    one, two = (Tensor(make_context(Device("sim", 1))) for _ in range(2))
    one.feed(np.array([1, 2], np.int32))
    copy_tensor(two, one)
    assert fake == [("sim", "cpu")]  # feeding it
    assert two.fetch().tolist() == [1, 2]
    assert fake == [("sim", "cpu"), ("cpu", "sim")]


def test_a_copy_nobody_registered_is_refused(fake: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_module, "_copies", {})
    host = Tensor()
    host.feed(np.zeros(1))
    with pytest.raises(DeviceError, match="no copy from cpu to sim:0 is registered"):
        copy_tensor(Tensor(make_context(Device("sim"))), host)


def test_memory_that_the_system_refuses_is_a_resource_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: object) -> None:
        raise MemoryError

    monkeypatch.setattr(np, "empty", refuse)
    with pytest.raises(ResourceError, match="1,000 bytes: the system refuses it"):
        make_context(CPU).allocate(1000)
