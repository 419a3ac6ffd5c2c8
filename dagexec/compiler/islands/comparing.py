"""Which model is fastest: the one on own kernels, or one with islands of a runtime that is installed.

Each is compiled and runs as it would run in an executor, in turns with the others. Own kernels are kept unless islands
gain more than times vary, and islands are only taken if they keep what the options promise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from dagexec.compiler.tuning.bench import Bench
from dagexec.compiler.tuning.runner import Trial
from dagexec.platform.records import dataclass


@dataclass(frozen=True)
class Candidate:
    """A model, and what it is called."""

    name: str
    trial: Trial


def fastest(
    own: Candidate,
    others: Sequence[Candidate],
    bench: Bench,
    seconds: float,
    gain: float,
    broken: Callable[[Trial], str | None],
    say: Callable[[str], object],
) -> str | None:
    """The name of the fastest candidate that takes at most `gain` times what own kernels take; None for these.

    `broken` says which promise a candidate does not keep, if any, and `say` is told how each was judged.
    """
    times = bench.run_seconds([own.trial, *(one.trial for one in others)], seconds)
    say(f"{own.name}: {times[0] * 1e3:.3f} ms")
    for time, one in sorted(zip(times[1:], others, strict=True), key=lambda pair: pair[0]):
        if math.isinf(time):
            say(f"{one.name}: it could not run in time")
        elif not time <= gain * times[0]:
            say(f"{one.name}: {time * 1e3:.3f} ms")
        elif (problem := broken(one.trial)) is not None:
            say(f"{one.name}: {time * 1e3:.3f} ms, left out: {problem}")
        else:
            say(f"{one.name}: {time * 1e3:.3f} ms, taken")
            return one.name
    return None
