"""Which model is fastest: the one on own kernels, or one with islands of a runtime that is installed.

Each is compiled and runs as it would run in an executor, in turns with the others. Own kernels are kept unless islands
gain more than times vary, and islands are only taken if they keep what the options promise (`guarantees`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dagexec.compiler.islands.guarantees import Guarantees
from dagexec.compiler.islands.regions import find_regions, with_islands
from dagexec.compiler.tuning.bench import Bench
from dagexec.compiler.tuning.runner import Trial
from dagexec.core.model import Model
from dagexec.sessions import IslandRuntime, installed_runtimes

_GAIN = 0.98  # islands must take at most this part of the time of own kernels: measured times vary


@dataclass(frozen=True)
class IslandModelVariant:
    """A model with islands of a runtime."""

    runtime: IslandRuntime
    model: Model


def variants(model: Model, runtimes: Sequence[IslandRuntime]) -> list[IslandModelVariant]:
    """`model`, whose parameters are arrays, with all that each of the installed `runtimes` can compute in islands."""
    versions = installed_runtimes()
    asked = [runtime for runtime in runtimes if runtime in versions]
    regions = find_regions(model) if asked else []
    found = []
    for runtime in asked if regions else ():
        made = with_islands(model, regions, runtime, versions[runtime], f"{runtime} computes it in an island")
        if made is not model:
            found.append(IslandModelVariant(runtime, made))
    return found


def fastest(
    own: Trial,
    candidates: Mapping[str, Trial],
    bench: Bench,
    seconds: float,
    guarantees: Guarantees,
    cores: int,
    say: Callable[[str], object],
) -> str | None:
    """The name of the fastest candidate that keeps what is promised; None for own kernels.

    `say` is told how each was judged.
    """
    times = bench.run_seconds([own, *candidates.values()], seconds)
    say(f"own kernels: {times[0] * 1e3:.3f} ms")
    order = sorted(zip(times[1:], candidates, strict=True))
    for time, name in order:
        if math.isinf(time):
            say(f"{name}: it could not run in time")
        elif time > _GAIN * times[0]:
            say(f"{name}: {time * 1e3:.3f} ms")
        elif (problem := guarantees.broken(candidates[name], cores)) is not None:
            say(f"{name}: {time * 1e3:.3f} ms, left out: {problem}")
        else:
            say(f"{name}: {time * 1e3:.3f} ms, taken")
            return name
    return None
