"""Device: where tensors are and operators run, by name: `cpu`, `cuda:0`, `sim:0`. And the kinds of devices there are.

`dagexec.core.runtime` says what a device can do. `dagexec.devices` has the kinds that come with dagexec.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from dagexec.core.proto import DeviceOption
from dagexec.errors import DeviceError
from dagexec.platform.records import dataclass

if TYPE_CHECKING:
    from dagexec.core.dtypes import TypeMeta
    from dagexec.core.runtime import DeviceRuntime

_MAX_INDEX = (1 << 31) - 1  # as a DeviceOption holds it


@dataclass(frozen=True, slots=True)
class DeviceKind:
    """A kind of device.

    Attributes:
        name: "cuda", as in `cuda:0`.
        number: the `device_type` of a DeviceOption.
        new_runtime: makes the runtime of a device of this kind. Raises DeviceError when there is no such device here.
        holds: whether its operators work on tensors of an element type; None: on any but strings.
    """

    name: str
    number: int
    new_runtime: Callable[[Device], DeviceRuntime]
    holds: Callable[[TypeMeta], bool] | None = None


_kinds: dict[str, DeviceKind] = {}


def register_kind(kind: DeviceKind) -> None:
    """Let devices of this kind be named, and used: all that dagexec needs to know of one."""
    _kinds[kind.name] = kind


def kind_of(device: Device) -> DeviceKind:
    """The kind of a device. Raises DeviceError when there is none of that name."""
    kind = _kinds.get(device.kind)
    if kind is None:
        raise DeviceError(f"device {device} is not available here; available kinds: {', '.join(_kinds)}")
    return kind


class Device(NamedTuple):
    """A device by kind and index, written `cpu` or `cuda:1`."""

    kind: str = "cpu"
    index: int = 0  # type: ignore[assignment]  # tuples have a method of that name

    def __str__(self) -> str:
        return self.kind if self.kind == "cpu" else f"{self.kind}:{self.index}"

    @staticmethod
    def parse(text: str) -> Device:
        """Read `cpu`, `cuda:0`, `sim:0`; the index defaults to 0. Raises DeviceError."""
        match = re.fullmatch(r"([a-z]+)(?::(\d+))?", text)
        if match is None or match[1] not in _kinds:
            names = ", ".join(name if name == "cpu" else f"{name}:N" for name in _kinds)
            raise DeviceError(f"device {text!r} is unknown; expected one of {names}")
        index = int(match[2] or 0)
        if index > _MAX_INDEX:
            raise DeviceError(f"device {text!r} is unknown; the largest index is {_MAX_INDEX}")
        return Device(match[1], index)

    @staticmethod
    def from_option(option: DeviceOption) -> Device:
        """The device a DeviceOption message names. Raises DeviceError for a device type dagexec does not have."""
        if not option.device_type and not option.device_id:
            return CPU
        kind = next((kind for kind in _kinds.values() if kind.number == option.device_type), None)
        if kind is None:
            numbers = {kind.number: kind.name for kind in _kinds.values()}
            raise DeviceError(f"device type number {option.device_type} is not one dagexec has: {numbers}")
        return Device(kind.name, option.device_id)

    def to_option(self) -> DeviceOption:
        """The DeviceOption message that names this device. Raises DeviceError when its kind is unknown."""
        return DeviceOption(device_type=kind_of(self).number, device_id=self.index)


CPU = Device()
