"""Device: where tensors are and operators run, by name: `cpu`, `cuda:0`, `sim:0`.

`dagexec.core.runtime` says what a device can do, and what kinds of devices there are.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from dagexec.core.proto import DeviceOption
from dagexec.errors import DeviceError
from dagexec.platform.plugins import PluginGroup

_MAX_INDEX = (1 << 31) - 1  # as a DeviceOption holds it


_numbers: dict[str, int] = {}
"""The `device_type` in a DeviceOption of each kind that is registered."""
_plugins: list[PluginGroup[Any]] = []


def name_kind(name: str, number: int) -> None:
    """Let devices of a kind be named (`dagexec.core.runtime.register_kind`)."""
    _numbers[name] = number


def use_plugins(group: PluginGroup[Any]) -> None:
    """Ask plugins of this group, which register their kinds, for kinds that are not there."""
    _plugins.append(group)


def has_kind(name: str) -> bool:
    """True when there is a kind of that name, of a plugin if need be."""
    if name not in _numbers:
        for group in _plugins:
            group.find(name)
    return name in _numbers


def _kind_of_number(number: int) -> str | None:
    if number not in _numbers.values():
        for group in _plugins:
            group.load()
    return next((name for name, other in _numbers.items() if other == number), None)


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
        if match is None or not has_kind(match[1]):
            names = ", ".join(name if name == "cpu" else f"{name}:N" for name in _numbers)
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
        name = _kind_of_number(option.device_type)
        if name is None:
            names = {number: name for name, number in _numbers.items()}
            raise DeviceError(f"device type number {option.device_type} is not one dagexec has: {names}")
        return Device(name, option.device_id)

    def to_option(self) -> DeviceOption:
        """The DeviceOption message that names this device. Raises DeviceError when its kind is unknown."""
        if not has_kind(self.kind):
            raise DeviceError(f"device {self} is not available here; available kinds: {', '.join(_numbers)}")
        return DeviceOption(device_type=_numbers[self.kind], device_id=self.index)


CPU = Device()
