"""Devices by name and number, and a kind of device that the test registers."""

from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest

from dagexec.core import device as device_module
from dagexec.core import runtime as runtime_module
from dagexec.core.device import CPU, Device
from dagexec.core.proto import DeviceOption
from dagexec.core.runtime import DeviceKind, register_kind, runtime_of
from dagexec.core.tensor import Tensor
from dagexec.devices.host import HostRuntime
from dagexec.errors import DeviceError


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
    with pytest.raises(DeviceError, match=r"device vulkan:2 is not available here; available kinds: cpu, cuda, sim"):
        runtime_of(Device("vulkan", 2))


class CountedMemory(HostRuntime):
    """A pretended device in host memory. Its arrays count what was asked of it and tell which way data crossed."""

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self.allocations: list[int] = []
        self.copies = 0

    def allocate(self, nbytes: int) -> npt.NDArray[Any]:
        self.allocations.append(nbytes)
        return super().allocate(nbytes)

    def copy_now(self, destination: npt.NDArray[Any], source: npt.NDArray[Any]) -> None:
        self.copies += 1
        super().copy_now(destination, source)


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> list[CountedMemory]:
    """Devices 0 and 1 of a kind that the test registers."""
    monkeypatch.setattr(device_module, "_numbers", dict(device_module._numbers))
    monkeypatch.setattr(runtime_module, "_kinds", dict(runtime_module._kinds))
    monkeypatch.setattr(runtime_module, "_runtimes", {})
    register_kind(DeviceKind("counted", 4711, CountedMemory))
    found = [runtime_of(Device.parse(name)) for name in ("counted", "counted:1")]
    assert all(isinstance(runtime, CountedMemory) for runtime in found)
    return cast(list[CountedMemory], found)


def test_a_kind_of_device_is_registered_once(devices: list[CountedMemory]) -> None:
    one = Device("counted", 1)
    assert [Device.parse("counted:1"), Device.from_option(one.to_option())] == [one, one]
    assert runtime_of(one) is devices[1]
    with pytest.raises(DeviceError, match="expected one of cpu, cuda:N, sim:N, counted:N"):
        Device.parse("other")


def test_a_tensor_is_fed_and_fetched_by_its_device(devices: list[CountedMemory]) -> None:
    near, far = devices
    one = Tensor(near.device)
    one.feed(np.arange(6, dtype=np.float32).reshape(2, 3))
    assert one.fetch().tolist() == [[0, 1, 2], [3, 4, 5]]
    assert (near.copies, far.copies) == (2, 0)
    assert one.runtime is near
    assert near.allocations == [24]
