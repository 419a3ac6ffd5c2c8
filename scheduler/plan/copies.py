"""Copies across devices: a net whose operators run on several devices, with a copy where a blob crosses.

Every blob has a home: the device of its first writer, or where it is before the net runs. An operator on another device
works on a local blob, `<blob>@<device>`, which is copied from home when needed, and copied back after a write. So each
blob name still means one place, and the graph orders the copies like all other operators.

An operator that is placed on a device without an implementation of its type, while the host has one, runs on the host:
bookkeeping (queues, databases, counters, rates) has no place elsewhere.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from dagexec.core.device import CPU, Device
from dagexec.core.node import Node
from dagexec.core.program import Program, program_of
from dagexec.core.proto import DeviceOption, NetDef
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

    net: Program
    constants: Program


def local_name(blob: str, device: Device) -> str:
    """The name of the blob that stands for `blob` on `device`."""
    return f"{blob}@{device}"


def names_devices(net: Program) -> bool:
    """True when the net or an operator asks for another device than the host."""
    return net.device not in (None, CPU) or any(
        operator.device_option is not None and operator.device != CPU for operator in net.op
    )


def insert_copies(
    net: NetDef | Program,
    home: Callable[[str], Device | None] = lambda _name: None,
    constants: frozenset[str] = frozenset(),
) -> PlacedNet:
    """`net` with copies where blobs cross devices; the same net when none do and every operator can stay.

    `home` says where a blob is that exists before the net runs, None for one that does not exist or is empty: if it is
    read all the same, it will be fed on the host. `constants` are blobs that never change. A copy to a device, or
    between two of a kind, is an operator of the receiving device; a copy to the host is one of the sending device.
    Raises SchemaError when the net has a blob of a name that a copy needs.
    """
    net = program_of(net)
    blobs = {name for operator in net.op for name in (*operator.input, *operator.output)}
    if not names_devices(net) and all(home(name) in (None, CPU) for name in blobs):
        return PlacedNet(net, Program((), NetDef(name=net.name)))
    requested = [net.device_of(definition) for definition in net.op]
    devices = [_possible(definition, device) for definition, device in zip(net.op, requested, strict=True)]
    moved = _moved(net, requested, devices)
    homes: dict[str, Device] = {}
    for definition, device in zip(net.op, devices, strict=True):
        for name in _tensors_read(definition):
            homes.setdefault(name, home(name) or CPU)
        for name in definition.output:
            homes.setdefault(name, home(name) or _written_on(definition, device))
    crosses = any(_crosses(definition, device, homes) for definition, device in zip(net.op, devices, strict=True))
    if not (crosses or moved):
        return PlacedNet(net, Program((), NetDef(name=net.name)))
    return _Placing(net, homes, constants).place(devices)


def _crosses(definition: Node, device: Device, homes: Mapping[str, Device]) -> bool:
    """True when the operator reads or writes a blob that is elsewhere, and is not made for that."""
    crossing = _crossing(definition)
    if crossing is Crossing.IN_PLACE:
        return False
    if any(homes[name] != _written_on(definition, device) for name in definition.output):
        return True
    return crossing not in _COPIES and any(homes[name] != device for name in _tensors_read(definition))


class _Placing:
    """The state of `insert_copies`: which local blobs have the current value of the blob they stand for."""

    def __init__(self, net: Program, homes: dict[str, Device], constants: frozenset[str]) -> None:
        self._net = net
        self._homes = homes
        self._constants = constants
        self._valid: dict[str, set[Device]] = {}
        self._used = {name for op in net.op for name in (*op.input, *op.output)} | set(net.external_input)
        self._placed: list[Node] = []
        self._first: list[Node] = []

    def place(self, devices: list[Device]) -> PlacedNet:
        """Go through the operators in order.

        An operator that depends on a blob by name only comes after it, and before its next write, on all devices.
        """
        away: dict[str, dict[str, None]] = {}
        for definition, device in zip(self._net.op, devices, strict=True):
            written_on = _written_on(definition, device)
            for name in () if _crossing(definition) is Crossing.IN_PLACE else definition.output:
                if self._homes[name] != written_on:
                    away.setdefault(name, {})[local_name(name, written_on)] = None
        for definition, device in zip(self._net.op, devices, strict=True):
            placed = definition
            if definition.device_option is None or definition.device != device:
                placed = definition.changed(device_option=_moved_to(definition.device_option, device))
            crossing = _crossing(definition)
            if crossing is Crossing.IN_PLACE:
                self._placed.append(placed)
                self._valid.update((name, {self._homes[name]}) for name in definition.output)
                continue
            written_on = _written_on(definition, device)
            inputs = list(definition.input)
            if crossing not in _COPIES:
                tensors = _tensors_read(definition)
                inputs = [self._reading(name, device) if name in tensors else name for name in inputs]
            outputs = [
                name if self._homes[name] == written_on else self._local(name, written_on) for name in definition.output
            ]
            controls = [*definition.control_input]
            for name in definition.control_input:
                controls.extend(away.get(name, ()))
            self._placed.append(placed.changed(inputs=inputs, outputs=outputs, control_input=controls))
            for name in dict.fromkeys(definition.output):
                self._written(name, written_on)
        first = Program(tuple(self._first), NetDef(name=f"{self._net.name}: parameters to devices"))
        return PlacedNet(self._net.with_operators(self._placed), first)

    def _reading(self, name: str, device: Device) -> str:
        """The blob to read for `name` on `device`, copied there if it is not there yet."""
        if self._homes[name] == device:
            return name
        local = self._local(name, device)
        if device not in self._valid.setdefault(name, set()):
            target = self._first if name in self._constants else self._placed
            target.append(_copy(name, self._homes[name], local, device))
            self._valid[name].add(device)
        return local

    def _written(self, name: str, device: Device) -> None:
        """`name` was written on `device`: other places have an old value, and home gets the new one."""
        home = self._homes[name]
        self._valid[name] = {device}
        if home != device:
            self._placed.append(_copy(self._local(name, device), device, name, home))

    def _local(self, name: str, device: Device) -> str:
        local = local_name(name, device)
        if local in self._used:
            raise SchemaError(
                f"net {self._net.name!r}: blob {local!r} is reserved for {name!r} on {device}; rename yours"
            )
        return local


def _tensors_read(definition: Node) -> list[str]:
    """The inputs of an operator except its handles, which are on no device; of an unknown operator, all."""
    handles = schema_of(definition.type).handles if is_registered(definition.type) else ()
    return [name for index, name in enumerate(definition.input) if index not in handles]


def _moved_to(option: DeviceOption | None, device: Device) -> DeviceOption:
    """The rest of an operator's device option, moved to another device."""
    result = DeviceOption()
    if option is not None:
        result.CopyFrom(option)
    result.MergeFrom(device.to_option())
    return result


def _possible(definition: Node, device: Device) -> Device:
    """`device`, or the host for an operator that only the host has."""
    kind = definition.type
    if device == CPU or has_implementation(device.kind, kind) or not has_implementation("cpu", kind):
        return device
    return CPU


def _moved(net: Program, requested: Sequence[Device], devices: Sequence[Device]) -> bool:
    """True when an operator does not run where it was requested; the log says which."""
    moved = Counter(
        f"{definition.type} from {before}"
        for definition, before, device in zip(net.op, requested, devices, strict=True)
        if before != device
    )
    if moved:
        names = ", ".join(f"{count} {name}" for name, count in sorted(moved.items()))
        logger.info("net %r: runs on the host, because the device has no implementation: %s", net.name, names)
    return bool(moved)


def _written_on(definition: Node, device: Device) -> Device:
    """The device that the outputs of an operator on `device` are on."""
    return CPU if _crossing(definition) is Crossing.TO_HOST else device


def _crossing(definition: Node) -> Crossing | None:
    return schema_of(definition.type).crossing if is_registered(definition.type) else None


def _copy(source: str, source_device: Device, target: str, target_device: Device) -> Node:
    """The operator that copies from one device to another."""
    kind = "EnsureCPUOutput" if target_device == CPU else "CopyFromCPUInput" if source_device == CPU else "Copy"
    where = source_device if target_device == CPU else target_device
    return Node(kind, [source], [target], device_option=where.to_option())
