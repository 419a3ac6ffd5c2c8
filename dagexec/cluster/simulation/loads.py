"""Loads: when requests come."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dagexec.cluster.simulation.times import AT_ONCE, Times
from dagexec.errors import SettingError
from dagexec.platform.records import dataclass


@dataclass(frozen=True)
class Poisson:
    """Very many clients that know nothing of each other: `rate` requests a second on average, answered or not."""

    rate: float

    def __post_init__(self) -> None:
        if not self.rate > 0:
            raise SettingError(f"a rate is more than 0 requests a second, found {self.rate!r}")

    def arrivals(self, generator: np.random.Generator, count: int) -> NDArray[np.float64]:
        """The instants of so many requests, in seconds."""
        return np.cumsum(generator.exponential(1 / self.rate, count))


@dataclass(frozen=True)
class Trace:
    """Requests at recorded instants, in seconds; more than were recorded begin again from the first."""

    instants: Sequence[float]

    def __post_init__(self) -> None:
        if len(self.instants) < 2 or np.any(np.diff(self.instants) < 0):
            raise SettingError("a trace has at least two instants, in seconds, in ascending order")

    def arrivals(self, generator: np.random.Generator, count: int) -> NDArray[np.float64]:
        """The instants of so many requests, in seconds; the first at 0."""
        recorded = np.asarray(self.instants, np.float64) - self.instants[0]
        rounds = -(-count // len(recorded))
        length = recorded[-1] * len(recorded) / (len(recorded) - 1)  # a mean gap between the last and the first
        instants: NDArray[np.float64] = (recorded + length * np.arange(rounds)[:, None]).ravel()[:count]
        return instants


@dataclass(frozen=True)
class ClosedLoop:
    """So many clients, each with one request at a time: it waits for the answer, thinks, and asks again."""

    clients: int
    think: Times = AT_ONCE

    def __post_init__(self) -> None:
        if self.clients < 1:
            raise SettingError(f"a closed loop has at least 1 client, found {self.clients!r}")


Load = Poisson | Trace | ClosedLoop
