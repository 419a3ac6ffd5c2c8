"""Task Bench's dependence patterns: points in a row, step after step (Slaughter and others, SC 2020).

A task `step.point` waits for points of the step before, as its pattern says. With an imbalance, tasks take longer or
shorter by up to that fraction, by chance.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from dagexec.errors import SettingError
from dagexec.lab.graph import WorkGraph, check_size, work_graph
from dagexec.platform.records import dataclass


@dataclass(frozen=True)
class Bench:
    """How large a graph is, and what its pattern asks for.

    Attributes:
        width: points of a step.
        steps: how many there are.
        seconds: of a task.
        radix: how many points others of `nearest` and `spread` wait for.
        connected: the part of these that those of the random patterns wait for.
        imbalance: from 0, all take equally long, to 1.
        seed: of whatever is random.
    """

    width: int = 4
    steps: int = 50
    seconds: float = 100e-6
    radix: int = 3
    connected: float = 0.5
    imbalance: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises SettingError for what is out of range."""
        for name in ("width", "steps", "radix"):
            if getattr(self, name) < 1:
                raise SettingError(f"{name} of a Task Bench graph: expected at least 1, found {getattr(self, name)}")
        for name in ("connected", "imbalance"):
            if not 0 <= getattr(self, name) <= 1:
                raise SettingError(f"{name} of a Task Bench graph: expected 0 to 1, found {getattr(self, name)}")


Pattern = Callable[[Bench, int, int], Iterable[int]]
"""The points of the step before that point p of a step waits for; steps are counted from 0, and the first waits not."""


def _window(bench: Bench, step: int, point: int) -> list[int]:
    first = point - bench.radix // 2
    return list(range(max(0, first), min(bench.width, first + bench.radix)))


def _spread(bench: Bench, step: int, point: int) -> list[int]:
    radix = min(bench.radix, bench.width)
    return [(point + number * bench.width // radix + (step if number else 0)) % bench.width for number in range(radix)]


def _some_of(pattern: Pattern) -> Pattern:
    def chosen(bench: Bench, step: int, point: int) -> list[int]:
        chance = random.Random(f"{bench.seed} {step} {point}")
        return [one for one in pattern(bench, step, point) if chance.random() < bench.connected]

    return chosen


def _fft(bench: Bench, step: int, point: int) -> list[int]:
    stages = max(1, math.ceil(math.log2(bench.width)))
    distance = 1 << (step - 1) % stages
    return [one for one in (point - distance, point, point + distance) if 0 <= one < bench.width]


PATTERNS: dict[str, Pattern] = {
    "trivial": lambda bench, step, point: (),
    "no_comm": lambda bench, step, point: (point,),
    "stencil_1d": lambda bench, step, point: _window(replace(bench, radix=3), step, point),
    "stencil_1d_periodic": lambda bench, step, point: ((point + shift) % bench.width for shift in (-1, 0, 1)),
    "dom": lambda bench, step, point: (one for one in (point - 1, point) if one >= 0),
    "tree": lambda bench, step, point: (point // 2 if 1 << min(step - 1, 30) < bench.width else point,),
    "fft": _fft,
    "all_to_all": lambda bench, step, point: range(bench.width),
    "nearest": _window,
    "spread": _spread,
    "random_nearest": _some_of(_window),
    "random_spread": _some_of(_spread),
}


def bench_graph(pattern: str, bench: Bench) -> WorkGraph:
    """The graph of a pattern. Raises SettingError for an unknown one, ResourceError for one too large to be made."""
    if pattern not in PATTERNS:
        raise SettingError(f"Task Bench has no pattern {pattern!r}; expected {', '.join(PATTERNS)}")
    count = bench.width * bench.steps
    degree = bench.width if pattern == "all_to_all" else min(bench.width, max(3, bench.radix))
    check_size(f"pattern {pattern!r} of width {bench.width:,} and {bench.steps:,} steps", count, count * degree)
    return work_graph(pattern, _rows(PATTERNS[pattern], bench, is_tree=pattern == "tree"))


def _rows(pattern: Pattern, bench: Bench, *, is_tree: bool) -> Iterator[tuple[str, float, list[int]]]:
    chance = random.Random(bench.seed)
    before, first = 0, 0  # points of the step before, and the number of its first task
    for step in range(bench.steps):
        width = min(bench.width, 1 << min(step, 30)) if is_tree else bench.width
        for point in range(width):
            seconds = bench.seconds * (1 + bench.imbalance * chance.uniform(-1, 1))
            parents = [first + one for one in pattern(bench, step, point)] if step else []
            yield f"{step}.{point}", seconds, parents
        first, before = first + before, width
