"""Synchronization: what orders the chains of a plan on their devices, beyond the counts that order their launches.

A chain is started on the host when all its parents were. If the parents are on the host, their work is done then. A
chain on a device has only been launched by then, so a chain that depends on it waits for an event recorded at its end:
another stream without the host, a host chain by blocking. Within one stream order is free.

`AsyncDAGNet` does exactly what is written here, and `dagexec check` proves exactly this.
"""

from __future__ import annotations

from collections.abc import Sequence

from dagexec.core.device import CPU, Device
from dagexec.platform.records import dataclass
from dagexec.scheduler.plan.plan import Plan


@dataclass(frozen=True)
class Synchronization:
    """Waits, records and mutexes of a plan.

    Attributes:
        devices: the device of each chain.
        waits: per chain, the parent chains whose event it waits for (unless it is on their stream).
        records: per chain, whether an event is recorded at its end.
        guards: per operator, the names of the mutexes that it holds while it is launched (on the host: runs).
    """

    devices: tuple[Device, ...]
    waits: tuple[tuple[int, ...], ...]
    records: tuple[bool, ...]
    guards: tuple[tuple[str, ...], ...]

    @property
    def events(self) -> int:
        """How many events a run records at most."""
        return sum(self.records)


def synchronize(plan: Plan, guards: Sequence[tuple[str, ...]], streams: int | None = None) -> Synchronization:
    """The events that `plan` needs whichever stream each chain runs on; `guards` names the mutexes of each operator.

    With `streams` (on each device) of 1, chains of one device need no event between them.
    """
    devices = _devices(plan)
    waits: list[list[int]] = [[] for _ in plan.chains]
    records = [False] * len(plan.chains)
    for parent, children in enumerate(plan.children):
        if devices[parent] == CPU:
            continue
        for child in children:
            if streams != 1 or devices[child] != devices[parent]:
                waits[child].append(parent)
                records[parent] = True
    return Synchronization(devices, tuple(map(tuple, waits)), tuple(records), tuple(guards))


def finished_chains(plan: Plan, guards: Sequence[tuple[str, ...]]) -> Synchronization:
    """No events: for a net whose workers wait for each chain before they go on."""
    count = len(plan.chains)
    return Synchronization(_devices(plan), ((),) * count, (False,) * count, tuple(guards))


def _devices(plan: Plan) -> tuple[Device, ...]:
    return tuple(plan.graph.device(chain[0]) if chain else CPU for chain in plan.chains)
