"""SimSettings: what a simulated device is like - who drives it, how long things take, how much it holds, what fails."""

from __future__ import annotations

from collections.abc import Callable

from dagexec.core.stream import Kernel, StreamObserver
from dagexec.devices.sim.command_queue import Driver
from dagexec.devices.sim.driver import SeededDriver, ThreadDriver
from dagexec.devices.sim.faults import Fault, RandomFaults
from dagexec.errors import DeviceError
from dagexec.platform.records import dataclass


@dataclass(frozen=True)
class SimSettings:
    """Settings of a simulated device. By default nothing takes time, memory is the machine's, and nothing fails.

    Attributes:
        driver: does the work; by default a `ThreadDriver` of the device's own.
        seed: makes the driver a `SeededDriver` of this seed.
        launch_seconds: what a launch takes of the host thread.
        kernel_seconds: what a kernel takes: the same for each, by a function of it, or None for its own estimate
            (`Kernel.seconds`, 0 where that is not known).
        copy_seconds: what any copy (a kernel with `copied_bytes`) takes.
        copy_seconds_per_byte: what it takes besides, for each byte.
        memory_limit: bytes the device can hold, None without a limit.
        faults: what goes wrong.
        observer: is notified of what happens.
    """

    driver: Driver | None = None
    seed: int | None = None
    launch_seconds: float = 0.0
    kernel_seconds: float | Callable[[Kernel], float] | None = 0.0
    copy_seconds: float = 0.0
    copy_seconds_per_byte: float = 0.0
    memory_limit: int | None = None
    faults: tuple[Fault | RandomFaults, ...] = ()
    observer: StreamObserver | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "faults", tuple(self.faults))
        if self.driver is not None and self.seed is not None:
            raise DeviceError("a simulated device has a driver or a seed, not both")
        times = [self.launch_seconds, self.copy_seconds, self.copy_seconds_per_byte]
        if isinstance(self.kernel_seconds, int | float):
            times.append(self.kernel_seconds)
        if not all(0 <= time < float("inf") for time in times):
            raise DeviceError(f"times of a simulated device are 0 or more seconds, found {times}")
        if self.memory_limit is not None and self.memory_limit < 0:
            raise DeviceError(f"a memory limit is 0 or more bytes, found {self.memory_limit}")

    @property
    def is_unmodeled(self) -> bool:
        """True when nothing takes time and nothing fails: streams need no model unless they are observed."""
        times = (self.launch_seconds, self.kernel_seconds, self.copy_seconds, self.copy_seconds_per_byte)
        return not self.faults and all(time is not None and not callable(time) and time == 0 for time in times)

    def new_driver(self, name: str) -> Driver:
        """The driver these settings ask for; a new one of the device called `name` unless one is given."""
        if self.driver is not None:
            return self.driver
        return ThreadDriver(name) if self.seed is None else SeededDriver(self.seed)
