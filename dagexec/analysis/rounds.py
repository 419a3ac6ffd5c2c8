"""Rounds of a comparison: in each, every contender runs once, in a random order.

Their number is given, or they go on until all intervals are narrow or the time is over.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Generic, TypeVar

import numpy as np

from dagexec.analysis.statistics import FEWEST_ROUNDS, half_width, warm_up
from dagexec.platform.records import dataclass

Key = TypeVar("Key", bound=Hashable)

_LOOKS = 4  # rounds from one check of the intervals to the next
_ALWAYS = 15  # rounds, however narrow intervals are


@dataclass(frozen=True)
class Limits:
    """How long to measure.

    Attributes:
        rounds: their exact number; None for as many as the others allow.
        seconds: after which no further round begins, once there are enough for intervals.
        precision: half the width of an interval, as a part of the time, that is narrow enough.
    """

    rounds: int | None = None
    seconds: float = 20.0
    precision: float = 0.01


@dataclass(frozen=True)
class Rounds(Generic[Key]):
    """The measurements.

    Attributes:
        seconds: of each contender and round, in order.
        warm_up: how many of the first rounds do not count.
    """

    seconds: Mapping[Key, list[float]]
    warm_up: int

    def counted(self, key: Key) -> list[float]:
        """Seconds of the rounds that count."""
        return self.seconds[key][self.warm_up :]


def measure(
    contenders: Mapping[Key, Callable[[], object]],
    limits: Limits,
    *,
    after_round: Callable[[], object] = lambda: None,
    seed: int = 0,
    progress: Callable[[float], object] = lambda _done: None,
) -> Rounds[Key]:
    """Run all contenders, the first of which is the base, in rounds; `after_round` is called behind each.

    `progress` is called after each round with the share that is done, up to 1.
    """
    order = random.Random(seed)
    seconds: dict[Key, list[float]] = {key: [] for key in contenders}
    began = time.perf_counter()
    number = 0
    while True:
        for key in order.sample(list(contenders), len(contenders)):
            start = time.perf_counter()
            contenders[key]()
            seconds[key].append(time.perf_counter() - start)
        after_round()
        number += 1
        share = _share(limits, number, time.perf_counter() - began)
        if share < 1 and limits.rounds is None and number >= _ALWAYS and not number % _LOOKS:
            share = 1.0 if _are_narrow(seconds, limits.precision) else share
        progress(min(share, 1.0))
        if share >= 1:
            return Rounds(seconds, _warm_up(seconds))


def _share(limits: Limits, rounds: int, seconds: float) -> float:
    """The share of the rounds or the time; below 1 while there are too few for intervals."""
    if limits.rounds is not None:
        return rounds / limits.rounds
    return min(seconds / limits.seconds if limits.seconds else 1.0, rounds / FEWEST_ROUNDS)


def _are_narrow(seconds: Mapping[Key, list[float]], precision: float) -> bool:
    base, *others = (np.asarray(row[_warm_up(seconds) :]) for row in seconds.values())
    return all(half_width(other, base) <= precision for other in others)


def _warm_up(seconds: Mapping[Key, list[float]]) -> int:
    times = np.array(list(seconds.values())).T
    return warm_up(times) if len(times) >= 2 * FEWEST_ROUNDS else 0
