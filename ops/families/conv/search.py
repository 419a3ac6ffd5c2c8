"""exhaustive_search: the algorithms that apply to a geometry are measured once, and the fastest one is kept.

A choice holds for one processor, geometry, dtype, layout and limit, and is kept in `dagexec.core.choices`, without a
budget: who asks for a search gets one. Two threads that measure the same geometry at once end with the same choice.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from dagexec.core.choices import choices
from dagexec.core.constant import Constant
from dagexec.core.device import CPU
from dagexec.core.operator import Step, in_sequence
from dagexec.core.runtime import runtime_of
from dagexec.ops.families.conv.choice import ENGINES, algorithm_of, default_algorithm
from dagexec.ops.families.conv.problem import Algorithm, Array, ConvProblem
from dagexec.platform.arithmetic import operator_arithmetic
from dagexec.platform.lazy import LazyModule
from dagexec.platform.processor import processor_key

if not TYPE_CHECKING:
    statistics = LazyModule("statistics")
else:
    import statistics


logger = logging.getLogger("dagexec")

_ROUNDS = (7, 20)  # at least and at most
_SECONDS = 0.02  # for each algorithm, unless that is too few or too many rounds
_GAIN = 0.93  # another algorithm than the default must take at most this part of its time: measured times vary
_OTHER_WORK = 24 << 20  # bytes: more than the caches of a core, and most of what cores share


def searched_algorithm(problem: ConvProblem, label: str, *, may_measure: bool) -> Algorithm:
    """The algorithm chosen for `problem`: loaded or, if that is allowed, measured before or now; else the default."""
    default = default_algorithm(problem, label)
    key = _key(problem)
    name = choices.find(key, given_only=not may_measure)
    if name is None and may_measure:
        name = choices.keep(key, _fastest(problem, default, label))
    algorithm = algorithm_of(name) if name in ENGINES else default
    return default if algorithm.refusal(problem) else algorithm


def _key(problem: ConvProblem) -> str:
    """What a choice depends on, as text: processor, shapes, dtype, layout, geometry, limit, constant filters."""
    axes = ";".join(f"{axis.stride},{axis.dilation},{axis.head},{axis.tail}" for axis in problem.axes)
    parts = [
        "convolution by NumPy",
        processor_key(),
        f"x {_shape(problem.x)}",
        f"filter {_shape(problem.weights)}",
        f"stride,dilation,head,tail {axes}",
        f"group {problem.group}",
        "NHWC" if problem.channels_last else "NCHW",
        f"{problem.x.dtype} in {problem.work}",
        f"limit {problem.limit}",
        "constant" if problem.constant is not None else "variable",
    ]
    return " | ".join(parts)


def _shape(array: Array) -> str:
    return "x".join(map(str, array.shape))


def _fastest(problem: ConvProblem, default: Algorithm, label: str) -> str:
    """The name of the fastest algorithm on arrays of random numbers, or DEFAULT when none gains enough on that."""
    trial = _trial(problem)
    applicable = {name: algorithm_of(name) for name in ENGINES if not algorithm_of(name).refusal(trial)}
    candidates = {"DEFAULT": default} | applicable
    steps = {name: in_sequence(algorithm.steps(trial, _allocate)) for name, algorithm in candidates.items()}
    with operator_arithmetic():  # as in a run
        times = measure(steps)
    fastest = min(times, key=times.__getitem__)
    chosen = fastest if times[fastest] < _GAIN * times["DEFAULT"] else "DEFAULT"
    logger.info("%s: measured %s; chosen: %s", label, {name: f"{t * 1e3:.3f} ms" for name, t in times.items()}, chosen)
    return chosen


def measure(steps: dict[str, Step]) -> dict[str, float]:
    """The median time in seconds of each step; one that is twice as slow as another is run twice only.

    They run alternately, and before each something else uses the cache, as other operators do in a run.
    """
    other = np.zeros(_OTHER_WORK, np.uint8)

    def seconds(step: Step) -> float:
        np.add(other, 1, out=other)
        start = time.perf_counter()
        step()
        return time.perf_counter() - start

    times: dict[str, float] = {}
    for name, step in steps.items():
        step()
        times[name] = seconds(step)
    best = min(times.values())
    contenders = [(steps[name], [times[name]], name) for name in steps if times[name] <= 2 * best]
    least, most = _ROUNDS
    for _ in range(max(least, min(most, int(_SECONDS / best))) if len(contenders) > 1 else 0):
        for step, samples, _ in contenders:
            samples.append(seconds(step))
    return times | {name: statistics.median(samples) for _, samples, name in contenders}


def _allocate(shape: Sequence[int], dtype: npt.DTypeLike) -> Array:
    """Memory as operators get it, aligned to a cache line."""
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    return runtime_of(CPU).allocate(nbytes).view(dtype).reshape(tuple(shape))


def _trial(problem: ConvProblem) -> ConvProblem:
    """The same problem on arrays of its own."""
    rng = np.random.default_rng(0)

    def normal(array: Array) -> Array:
        copy = _allocate(array.shape, array.dtype)
        copy[...] = rng.standard_normal(array.shape, np.float32)
        return copy

    return replace(
        problem,
        x=normal(problem.x),
        weights=normal(problem.weights),
        bias=None if problem.bias is None else normal(problem.bias),
        y=_allocate(problem.y.shape, problem.y.dtype),
        constant=None if problem.constant is None else Constant(),
    )
