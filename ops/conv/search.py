"""exhaustive_search: the algorithms that apply to a geometry are measured once, and the fastest one is kept.

A choice holds for one processor, geometry, dtype, layout and limit. Choices are kept for the process; `save_choices`
and `load_choices` carry them to others. Two threads that measure the same geometry at once end with the same choice.
"""

from __future__ import annotations

import json
import logging
import math
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dagexec.core.arithmetic import operator_arithmetic
from dagexec.core.device import CPU, make_context, processor_name
from dagexec.core.errors import ModelFormatError
from dagexec.core.net_file import write_atomically
from dagexec.core.operator import Step, in_sequence
from dagexec.core.tensor import Constant
from dagexec.ops.conv.choice import ENGINES, default_algorithm
from dagexec.ops.conv.problem import Algorithm, Array, ConvProblem

logger = logging.getLogger("dagexec")

_ROUNDS = (7, 20)  # at least and at most
_SECONDS = 0.02  # for each algorithm, unless that is too few or too many rounds
_GAIN = 0.93  # another algorithm than the default must take at most this part of its time: measured times vary
_FORMAT = "dagexec convolution choices"

_OTHER_WORK = 24 << 20  # bytes: more than the caches of a core, and most of what cores share

_lock = threading.Lock()
_measured: dict[str, str] = {}
_loaded: dict[str, str] = {}


def searched_algorithm(problem: ConvProblem, label: str, *, may_measure: bool) -> Algorithm:
    """The algorithm chosen for `problem`: loaded or, if that is allowed, measured before or now; else the default."""
    default = default_algorithm(problem, label)
    key = _key(problem)
    with _lock:
        name = _loaded.get(key) or (_measured.get(key) if may_measure else None)
    if name is None and may_measure:
        found = _fastest(problem, default, label)
        with _lock:
            name = _measured.setdefault(key, found)
    algorithm = ENGINES.get(name or "", default)
    return default if algorithm.refusal(problem) else algorithm


def save_choices(path: str | Path) -> int:
    """Write all choices, measured and loaded, to a JSON file, atomically. Returns how many there are.

    Raises ModelFormatError when the file cannot be written.
    """
    with _lock:
        choices = _measured | _loaded
    content = {"format": _FORMAT, "version": 1, "choices": dict(sorted(choices.items()))}
    write_atomically(Path(path), json.dumps(content, indent=1).encode())
    return len(choices)


def load_choices(path: str | Path) -> int:
    """Read choices that `save_choices` wrote; they go before measured ones. Returns how many there are.

    Choices of other processors are kept, and not used. Raises ModelFormatError when the file cannot be read or is
    something else.
    """
    try:
        content = json.loads(Path(path).read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFormatError(f"{path}: choices of algorithms cannot be read: {error}") from None
    if not isinstance(content, dict) or content.get("format") != _FORMAT or content.get("version") != 1:
        raise ModelFormatError(f"{path}: expected a file of {_FORMAT}, version 1")
    choices = content.get("choices")
    names = {"DEFAULT", *ENGINES}
    if not isinstance(choices, dict) or not all(isinstance(name, str) and name in names for name in choices.values()):
        raise ModelFormatError(f"{path}: choices must map geometries to one of {', '.join(sorted(names))}")
    with _lock:
        _loaded.update(choices)
    return len(choices)


def forget_choices() -> None:
    """Drop all choices, measured and loaded."""
    with _lock:
        _measured.clear()
        _loaded.clear()


def choices() -> dict[str, str]:
    """All choices, by the key of their geometry."""
    with _lock:
        return _measured | _loaded


def _key(problem: ConvProblem) -> str:
    """What a choice depends on, as text: processor, shapes, dtype, layout, geometry, limit, constant filters."""
    axes = ";".join(f"{axis.stride},{axis.dilation},{axis.head},{axis.tail}" for axis in problem.axes)
    parts = [
        processor_name(),
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
    applicable = {name: algorithm for name, algorithm in ENGINES.items() if not algorithm.refusal(trial)}
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

    They run in turns, and before each something else uses the cache, as other operators do in a run.
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
    return make_context(CPU).allocate(nbytes).view(dtype).reshape(tuple(shape))


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
