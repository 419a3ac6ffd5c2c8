"""Copies across devices: a net whose operators run on several devices, with a copy where a blob crosses.

Every blob has a home: the device of its first writer, or where it is before the net runs. An operator on another device
works on a local blob, `<blob>@<device>`, that is copied from home when it has to be, and copied back after a write. So
each blob name still means one place, and the graph orders the copies like all other operators.

An operator that is asked for on a device that has no implementation of its type, while the host has one, runs on the
host: what keeps books (queues, databases, counters, rates) has no place elsewhere.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from dagexec.core.device import CPU, Device
from dagexec.core.proto import DeviceOption, NetDef, OperatorDef
from dagexec.core.registry import has_implementation, is_registered, schema_of
from dagexec.core.traits import Crossing
from dagexec.errors import SchemaError
from dagexec.platform.records import dataclass

logger = logging.getLogger("dagexec")

_COPIES = (Crossing.COPY, Crossing.FROM_HOST, Crossing.TO_HOST)


@dataclass(frozen=True)
class PlacedNet:
    """A net with its copies.

    Attributes:
        net: the net, each operator with its device.
        constants: copies of blobs that no operator writes and no run feeds, to be made once, before all runs.
    """

    net: NetDef
    constants: NetDef


def local_name(blob: str, device: Device) -> str:
    """The name of the blob that stands for `blob` on `device`."""
    return f"{blob}@{device}"


def names_devices(net: NetDef) -> bool:
    """True when the net or an operator says that it runs elsewhere than on the host."""
    options = (net.device_option, *(definition.device_option for definition in net.op))
    return any(Device.from_option(option) != CPU for option in options)


def insert_copies(
    net: NetDef, home: Callable[[str], Device | None] = lambda _name: None, constants: frozenset[str] = frozenset()
) -> PlacedNet:
    """`net` with copies where blobs cross devices; the same net when they never do and every operator can stay.

    `home` says where a blob is that exists before the net runs, None for one that does not exist or holds nothing: one
    that is read all the same will be fed on the host. `constants` are blobs that never change. A copy to a device, or
    between two of a kind, is an operator of the device that gets it; one to the host is of the device that gives.
    Raises SchemaError when the net has a blob of a name that a copy needs.
    """
    asked = [_device(definition, net) for definition in net.op]
    devices = [_possible(definition, device) for definition, device in zip(net.op, asked, strict=True)]
    moved = _moved(net, asked, devices)
    homes: dict[str, Device] = {}
    for definition, device in zip(net.op, devices, strict=True):
        for name in _tensors_read(definition):
            homes.setdefault(name, home(name) or CPU)
        for name in definition.output:
            homes.setdefault(name, home(name) or _written_on(definition, device))
    crosses = any(_crosses(definition, device, homes) for definition, device in zip(net.op, devices, strict=True))
    if not (crosses or moved):
        return PlacedNet(net, NetDef(name=net.name))
    return _Placing(net, homes, constants).place(devices)


def _crosses(definition: OperatorDef, device: Device, homes: Mapping[str, Device]) -> bool:
    """True when the operator reads or writes a blob that is elsewhere, and is not made for that."""
    crossing = _crossing(definition)
    if crossing is Crossing.IN_PLACE:
        return False
    if any(homes[name] != _written_on(definition, device) for name in definition.output):
        return True
    return crossing not in _COPIES and any(homes[name] != device for name in _tensors_read(definition))


class _Placing:
    """The state of `insert_copies`: which local blobs have the present value of the blob they stand for."""

    def __init__(self, net: NetDef, homes: dict[str, Device], constants: frozenset[str]) -> None:
        self._net = net
        self._homes = homes
        self._constants = constants
        self._valid: dict[str, set[Device]] = {}
        self._used = {name for op in net.op for name in (*op.input, *op.output)} | set(net.external_input)
        self._placed = NetDef()
        self._placed.CopyFrom(net)
        del self._placed.op[:]
        self._first = NetDef(name=f"{net.name}: parameters to devices")

    def place(self, devices: list[Device]) -> PlacedNet:
        """Go through the operators in order.

        What comes after an operator by name of a blob comes after it, and before the next write, on all devices.
        """
        away: dict[str, dict[str, None]] = {}
        for definition, device in zip(self._net.op, devices, strict=True):
            written_on = _written_on(definition, device)
            for name in () if _crossing(definition) is Crossing.IN_PLACE else definition.output:
                if self._homes[name] != written_on:
                    away.setdefault(name, {})[local_name(name, written_on)] = None
        for definition, device in zip(self._net.op, devices, strict=True):
            placed = OperatorDef()
            placed.CopyFrom(definition)
            if not placed.HasField("device_option") or Device.from_option(placed.device_option) != device:
                placed.device_option.MergeFrom(device.to_option())
            crossing = _crossing(definition)
            if crossing is Crossing.IN_PLACE:
                self._placed.op.append(placed)
                self._valid.update((name, {self._homes[name]}) for name in definition.output)
                continue
            written_on = _written_on(definition, device)
            if crossing not in _COPIES:
                tensors = _tensors_read(definition)
                for position, name in enumerate(definition.input):
                    if name in tensors:
                        placed.input[position] = self._reading(name, device)
            for position, name in enumerate(definition.output):
                if self._homes[name] != written_on:
                    placed.output[position] = self._local(name, written_on)
            for name in definition.control_input:
                placed.control_input.extend(away.get(name, ()))
            self._placed.op.append(placed)
            for name in dict.fromkeys(definition.output):
                self._written(name, written_on)
        return PlacedNet(self._placed, self._first)

    def _reading(self, name: str, device: Device) -> str:
        """The blob to read for `name` on `device`, copied there if it is not there yet."""
        if self._homes[name] == device:
            return name
        local = self._local(name, device)
        if device not in self._valid.setdefault(name, set()):
            target = self._first if name in self._constants else self._placed
            target.op.append(_copy(name, self._homes[name], local, device))
            self._valid[name].add(device)
        return local

    def _written(self, name: str, device: Device) -> None:
        """`name` was written on `device`: other places have an old value, and home gets the new one."""
        home = self._homes[name]
        self._valid[name] = {device}
        if home != device:
            self._placed.op.append(_copy(self._local(name, device), device, name, home))

    def _local(self, name: str, device: Device) -> str:
        local = local_name(name, device)
        if local in self._used:
            raise SchemaError(
                f"net {self._net.name!r}: blob {local!r} is reserved for {name!r} on {device}; rename yours"
            )
        return local


def _tensors_read(definition: OperatorDef) -> list[str]:
    """The inputs of an operator but its handles, which are on no device; of an unknown operator, all."""
    handles = schema_of(definition.type).handles if is_registered(definition.type) else ()
    return [name for index, name in enumerate(definition.input) if index not in handles]


def _device(definition: OperatorDef, net: NetDef) -> Device:
    if definition.HasField("device_option"):
        return Device.from_option(definition.device_option)
    return Device.from_option(net.device_option) if net.HasField("device_option") else CPU


def _possible(definition: OperatorDef, device: Device) -> Device:
    """`device`, or the host for an operator that only the host has."""
    kind = definition.type
    if device == CPU or has_implementation(device.kind, kind) or not has_implementation("cpu", kind):
        return device
    return CPU


def _moved(net: NetDef, asked: Sequence[Device], devices: Sequence[Device]) -> bool:
    """True when an operator does not run where it was requested; the log says which."""
    moved = Counter(
        f"{definition.type} from {before}"
        for definition, before, device in zip(net.op, asked, devices, strict=True)
        if before != device
    )
    if moved:
        names = ", ".join(f"{count} {name}" for name, count in sorted(moved.items()))
        logger.info("net %r: runs on the host, because the device has no implementation: %s", net.name, names)
    return bool(moved)


def _written_on(definition: OperatorDef, device: Device) -> Device:
    """The device that the outputs of an operator on `device` are on."""
    return CPU if _crossing(definition) is Crossing.TO_HOST else device


def _crossing(definition: OperatorDef) -> Crossing | None:
    return schema_of(definition.type).crossing if is_registered(definition.type) else None


def _copy(source: str, source_device: Device, target: str, target_device: Device) -> OperatorDef:
    """The operator that copies from one device to another."""
    kind = "EnsureCPUOutput" if target_device == CPU else "CopyFromCPUInput" if source_device == CPU else "Copy"
    where = source_device if target_device == CPU else target_device
    option: DeviceOption = where.to_option()
    return OperatorDef(type=kind, input=[source], output=[target], device_option=option)
