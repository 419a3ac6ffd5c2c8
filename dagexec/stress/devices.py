"""The devices of a case: how they are set up, what goes wrong on them, and what must be back when the case is over."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from dagexec.core.device import Device
from dagexec.core.runtime import DeviceRuntime, runtime_of
from dagexec.stress.case import SimSettings


@dataclass(frozen=True)
class Holdings:
    """What a process holds at a moment: threads, and for each device its leased streams and bytes of memory."""

    threads: frozenset[threading.Thread]
    leased: tuple[tuple[str, int], ...]
    allocated: tuple[tuple[str, int], ...]

    @staticmethod
    def now(devices: Sequence[str]) -> Holdings:
        """The moment's."""
        statistics = [(str(runtime.device), runtime.statistics()) for runtime in _runtimes(devices)]
        return Holdings(
            threads=frozenset(threading.enumerate()),
            leased=tuple((name, moment.leased) for name, moment in statistics),
            allocated=tuple((name, moment.allocated_bytes) for name, moment in statistics),
        )

    @staticmethod
    def settled(devices: Sequence[str]) -> Holdings:
        """The moment's, with what nobody refers to any more collected: only a device's memory depends on that."""
        if any(Device.parse(name).kind != "cpu" for name in devices):
            gc.collect()
        return Holdings.now(devices)

    def lost_since(self, before: Holdings) -> list[str]:
        """What is held now and was not `before`. The threads that drive a device's streams are the device's own."""
        started = [thread.name for thread in self.threads - before.threads if not thread.name.startswith("sim:")]
        lost = [f"thread {name!r} is still there" for name in sorted(started) if name.startswith(("dagexec", "stress"))]
        for what, now, then in (
            ("streams leased", self.leased, before.leased),
            ("bytes", self.allocated, before.allocated),
        ):
            lost += [
                f"{name}: {count} {what}, {earlier} before"
                for (name, count), (_, earlier) in zip(now, then, strict=True)
                if count != earlier
            ]
        return lost


@contextmanager
def prepared_devices(devices: Sequence[str], settings: SimSettings | None) -> Iterator[None]:
    """Within it, simulated devices work as `settings` say."""
    yield


def _runtimes(devices: Sequence[str]) -> list[DeviceRuntime]:
    places = [Device.parse(name) for name in devices]
    return [runtime_of(place) for place in places if place.kind != "cpu"]
