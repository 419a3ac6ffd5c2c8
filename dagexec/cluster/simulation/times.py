"""Distributions of durations, in seconds, of which a simulation draws."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dagexec.errors import SettingError
from dagexec.platform.records import dataclass


class Times(Protocol):
    """Independent draws of a duration."""

    def draw(self, generator: np.random.Generator, count: int) -> NDArray[np.float64]:
        """So many durations in seconds, each at least 0."""
        ...


@dataclass(frozen=True)
class Constant:
    """Always the same."""

    seconds: float

    def __post_init__(self) -> None:
        _require(self.seconds >= 0, self.seconds)

    def draw(self, generator: np.random.Generator, count: int) -> NDArray[np.float64]:
        return np.full(count, self.seconds)


@dataclass(frozen=True)
class Exponential:
    """Without memory, with this mean: what the formulas of queues assume."""

    seconds: float

    def __post_init__(self) -> None:
        _require(self.seconds > 0, self.seconds)

    def draw(self, generator: np.random.Generator, count: int) -> NDArray[np.float64]:
        return generator.exponential(self.seconds, count)


@dataclass(frozen=True)
class Empirical:
    """One of these measured durations, all with the same probability; in which order they came does not matter."""

    samples: Sequence[float]

    def __post_init__(self) -> None:
        _require(len(self.samples) > 0 and min(self.samples) >= 0, self.samples)

    def draw(self, generator: np.random.Generator, count: int) -> NDArray[np.float64]:
        return generator.choice(np.asarray(self.samples, np.float64), count)


def _require(is_right: bool, found: object) -> None:
    if not is_right:
        raise SettingError(f"durations are seconds, none negative and at least one, found {found!r}")


AT_ONCE = Constant(0.0)
