"""The devices of a case: their settings, their faults, and the resources that must be back when the case is over."""

from __future__ import annotations

import gc
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from dagexec.core.device import Device
from dagexec.core.exclusive import LibraryState, library_state
from dagexec.core.runtime import DeviceRuntime, runtime_of
from dagexec.devices.cuda.runtime import CudaRuntime
from dagexec.devices.sim import Fault, sim_runtime, simulated
from dagexec.platform.records import dataclass
from dagexec.platform.threads import new_gate, threads
from dagexec.platform.timer_thread import THREAD_NAME
from dagexec.stress.case import CaseSimSettings, DeviceFault
from dagexec.stress.nets import LIBRARY_STATES


@dataclass(frozen=True)
class HeldResources:
    """Resources of a process at one moment: threads, and for each device its leased streams and bytes of memory."""

    threads: frozenset[threading.Thread]
    leased: tuple[tuple[str, int], ...]
    allocated: tuple[tuple[str, int], ...]

    @staticmethod
    def now(devices: Sequence[str]) -> HeldResources:
        """The moment's."""
        statistics = [(str(runtime.device), runtime.statistics()) for runtime in _runtimes(devices)]
        return HeldResources(
            threads=frozenset(threading.enumerate()),
            leased=tuple(
                (name, moment.leased - _streams_of_device(runtime))
                for (name, moment), runtime in zip(statistics, _runtimes(devices), strict=True)
            ),
            allocated=tuple(
                (name, moment.allocated_bytes - _kept_by_streams(runtime))
                for (name, moment), runtime in zip(statistics, _runtimes(devices), strict=True)
            ),
        )

    def leaked_since(self, before: HeldResources) -> list[str]:
        """Resources that are held now and were not `before`.

        Threads that drive a device's streams belong to the device, and the timer thread to the process.
        """
        started = sorted(thread.name for thread in self.threads - before.threads if thread.name != THREAD_NAME)
        leaks = [f"thread {name!r} is still there" for name in started if name.startswith(("dagexec", "stress"))]
        for what, now, then in (
            ("streams leased", self.leased, before.leased),
            ("bytes", self.allocated, before.allocated),
        ):
            leaks += [
                f"{name}: {count} {what}, {earlier} before"
                for (name, count), (_, earlier) in zip(now, then, strict=True)
                if count != earlier
            ]
        return leaks


def leaked(devices: Sequence[str], before: HeldResources, patience: float = 5.0) -> list[str]:
    """Resources still held after `patience` seconds that were not held `before`; empty as soon as there are none.

    A device's thread may still be on its way out of the callback that reported the end of the last run, and abandoned
    work may still be queued: the devices are waited for.
    """
    for runtime in _runtimes(devices):
        runtime.synchronize()
    deadline = threads().monotonic() + patience
    while leaks := HeldResources.now(devices).leaked_since(before):
        if any(Device.parse(name).kind != "cpu" for name in devices):
            gc.collect()  # memory of a device is free when nothing refers to it any more
            leaks = HeldResources.now(devices).leaked_since(before)
        if threads().monotonic() > deadline:
            return leaks
        new_gate().acquire(timeout=0.005)
    return []


class PreparedDevices:
    """The simulated devices of a case as its settings have them. `failing` and `hanging` say which faults they have."""

    def __init__(self, places: Sequence[str] = ()) -> None:
        self.failing = False
        self.hanging = False
        self._places = places
        self._states: list[LibraryState] = []

    def make_states(self) -> None:
        """Have the library states made that nets may use: they are the device's, and stay with it."""
        self._states = [
            library_state(Device.parse(name), index) for name in self._places for index in range(LIBRARY_STATES)
        ]

    def wait_idle(self) -> None:
        """Wait for the devices, and let library states forget failures, as they else do at their next use."""
        for runtime in _runtimes(self._places):
            runtime.synchronize()
        for state in self._states:
            state.stream.reset()

    def faults_met(self) -> Counter[str]:
        """How many faults of each kind the devices have had so far."""
        met: Counter[str] = Counter()
        for place in self._places:
            met.update(sim_runtime(Device.parse(place)).faults.met)
        return met

    def fault(self, kind: DeviceFault, at: int) -> Fault:
        """The fault of `kind` at occurrence `at`, counted from 0, of those while such faults are had."""
        return Fault(kind, match=lambda _label: self.hanging if kind == "hang" else self.failing, nth=at + 1)


@contextmanager
def prepared_devices(devices: Sequence[str], settings: CaseSimSettings | None) -> Iterator[PreparedDevices]:
    """Within it, simulated devices work as `settings` say, with no faults at first."""
    if settings is None:
        yield PreparedDevices()
        return
    places = [name for name in devices if Device.parse(name).kind == "sim"]
    prepared = PreparedDevices(places)
    with simulated(
        places,
        seed=settings.seed if settings.driver == "seeded" else None,
        launch_seconds=settings.launch_seconds,
        memory_limit=settings.limit_bytes,
        faults=[prepared.fault(kind, at) for kind, at in settings.faults],
    ):
        prepared.make_states()
        yield prepared


def _streams_of_device(runtime: DeviceRuntime) -> int:
    """Streams leased by what the device has one each of, such as library states: whoever comes first has them made."""
    return sum(getattr(made, "stream", None) is not None for made in runtime.made())


def _kept_by_streams(runtime: DeviceRuntime) -> int:
    """Bytes of what the streams of a CUDA device have one each of, such as workspaces of cuBLAS: they are for whoever
    leases the stream next."""
    if not isinstance(runtime, CudaRuntime):
        return 0
    return sum(getattr(made, "nbytes", 0) for stream in runtime.streams() for made in stream.made())


def _runtimes(devices: Sequence[str]) -> list[DeviceRuntime]:
    places = [Device.parse(name) for name in devices]
    return [runtime_of(place) for place in places if place.kind != "cpu"]
