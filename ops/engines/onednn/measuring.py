"""Measuring the implementations of a problem: which is fastest, among those that are exact.

They run alternately on tensors of random numbers. Weights of a problem that is `cold` are read from memory, not from a
cache: implementations differ in how many bytes they make of them. An implementation is skipped when its result is
further from the first one's than rounding explains.

A run is timed by what its thread computed, where that is less than what the clock says: others may use the machine.

What an implementation takes is known only once it has run, and nothing can interrupt it then. So each is made and run
for the first time in a thread that is left behind when it takes far longer than the fastest so far, or longer than
there is time; one that is so slow is not run again.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from dagexec.core.choices import at_end_of_measuring
from dagexec.core.dtypes import TypeMeta
from dagexec.core.operator import Step, in_sequence, nothing_to_do
from dagexec.errors import DagexecError, UnsupportedFeatureError
from dagexec.ops.engines.onednn.descriptors import WEIGHTS, Array, Descriptor, aligned_empty
from dagexec.ops.engines.onednn.operator import reorder
from dagexec.ops.engines.onednn.packing import Making
from dagexec.ops.engines.onednn.problem import Assembled, Candidate, Problem, assemble
from dagexec.ops.kernels.sharing import MOST_OF_ONE, pieces_of
from dagexec.platform.deadline import Deadline, call_with_timeout, check_stop
from dagexec.platform.processor import last_level_cache
from dagexec.platform.records import dataclass

logger = logging.getLogger("dagexec")

TOLERANCE = 1e-5
"""Difference from the first implementation's result, relative to the largest element, that float32 rounding explains.

It is four times what sums over taps in two different orders differ by, and Winograd's F(4x4, 3x3) from them, with 512
channels. For 16-bit floats it is one unit of rounding instead.
"""

_GAIN = 0.97  # another implementation than the first must take at most this part of its time: measured times vary
_UNSHARED = 1.25  # times the time of what has fewer pieces than it is worth: another thread waits for it
_ROUNDS = (5, 25)  # at least and at most
_TRYOUT = 3  # rounds of all
_LONG, _LONG_ROUNDS = 0.005, 1  # of what takes so many seconds: rounds of all, and then of those not hopeless
_SECONDS = 0.01  # for each implementation, unless that is too few or too many rounds
_HOPELESS = 1.4  # times the best time after the first rounds
_FAR_BEHIND = 2.0  # times the best time after one round
_FIRST_BEHIND, _FIRST_SECONDS = 8.0, 0.002  # times the best first run, and beyond it: not run again
_MAKING = 0.1  # seconds beyond that: to make one takes longer than to run it
_FILL = 2e9  # a second: bytes of tensors filled with numbers
_PERIOD = 65_521  # random numbers, repeated: a prime, so that no two rows of a tensor are alike
_PAGE = 4096
_POOL = 2  # times the largest cache: memory that weights are read from


class _Pool:
    """Memory that weights are read from, each time from where nobody has read for the longest time.

    Candidates share it: were each to go through places of its own, one would find in the cache what another has read.
    """

    def __init__(self, nbytes: int, meta: TypeMeta) -> None:
        self.nbytes = nbytes
        self._memory = aligned_empty(nbytes)
        self._memory.view(meta.numpy)[...] = np.resize(_numbers(WEIGHTS), nbytes // meta.itemsize)
        self._start = 0

    def place(self, nbytes: int) -> Array:
        """The next place for so many bytes."""
        if self._start + nbytes > self.nbytes:
            self._start = 0
        place: Array = self._memory[self._start : self._start + nbytes]
        self._start += -(-max(1, nbytes) // _PAGE) * _PAGE
        return place


@dataclass
class _Trial:
    """A candidate on tensors of its own."""

    candidate: Candidate
    assembled: Assembled
    result: Array
    first: float
    """The time of its first run, by the clock."""
    samples: list[float]
    elsewhere: _Pool | None
    """Where its weights are read from; None: always from the same memory."""

    def seconds(self) -> float:
        """The time of one run."""
        if self.elsewhere is not None:
            bound = self.assembled.bound
            bound.move(WEIGHTS, self.elsewhere.place(bound.nbytes(WEIGHTS)))
        steps = self.assembled.steps
        begun, start = time.thread_time(), time.perf_counter()
        for step in steps:
            step()
        passed = time.perf_counter() - start
        return min(passed, time.thread_time() - begun)

    @property
    def score(self) -> float:
        """The lower quartile of its times: other work on the machine only ever adds to them."""
        return sorted(self.samples)[len(self.samples) // 4]


def fastest(problem: Problem, candidates: Sequence[Candidate], seconds: float) -> str | None:
    """The name of the fastest candidate, the first when none gains enough on that; None when `seconds` are over."""
    deadline = Deadline(seconds)
    if sum(tensor.nbytes for tensor, _ in problem.tensors.values()) / _FILL > seconds:
        return None
    arrays = {number: _random(number, *tensor, problem) for number, tensor in problem.tensors.items()}
    first = _make(problem, candidates[0], arrays, deadline.left())
    if first is None:
        return None if deadline.is_over else candidates[0].name
    trials = [first]
    expected = _values(problem, first.result)
    for candidate in candidates[1:]:
        check_stop()
        if deadline.is_over:
            return None
        trial = _make(problem, candidate, arrays, min(_longest_first(trials) + _MAKING, deadline.left()))
        if trial is None:
            continue
        error = _distance(_values(problem, trial.result), expected)
        if error > _tolerance(problem):
            logger.info("%s: %s skipped: its error is %.1e", problem.label, candidate.name, error)
            continue
        trials.append(trial)
    longest = _longest_first(trials)
    _take_turns([trial for trial in trials if trial.first <= longest], deadline)
    measured = [trial for trial in trials if trial.samples]
    if not measured:
        return None
    ranked = sorted(measured, key=lambda trial: _rank(problem, trial) / (1.0 if trial is first else _GAIN))
    chosen = ranked[0].candidate.name
    times = {trial.candidate.name: f"{trial.score * 1e3:.3f} ms" for trial in measured}
    logger.info("%s: measured %s; chosen: %s", problem.label, times, chosen)
    return chosen


def _rank(problem: Problem, trial: _Trial) -> float:
    """What a trial takes, and more where it cannot be shared as it is worth."""
    few = not trial.candidate.is_in_pieces and 0 < problem.blocks < pieces_of(trial.score, MOST_OF_ONE)
    return trial.score * (_UNSHARED if few else 1.0)


def _longest_first(trials: Sequence[_Trial]) -> float:
    """The seconds beyond which a first run is hopeless."""
    return _FIRST_BEHIND * min(trial.first for trial in trials) + _FIRST_SECONDS


def _take_turns(trials: Sequence[_Trial], deadline: Deadline) -> None:
    """Run all trials in rounds; those that are hopeless are left out soon. None has a sample when there is no time."""
    contenders = list(trials)
    if deadline.left() < sum(trial.first for trial in contenders):
        return
    best = _round(contenders)
    long = best > _LONG
    contenders = _within(_HOPELESS if long else _FAR_BEHIND, contenders, best)
    for _ in range(0 if long else _TRYOUT - 1):
        if deadline.is_over:
            return
        best = min(best, _round(contenders))
    contenders = _within(_HOPELESS, contenders, best)
    least, most = _ROUNDS
    rounds = _LONG_ROUNDS if long else max(least, min(most, int(_SECONDS / best)))
    for _ in range(rounds if len(contenders) > 1 else 0):
        if deadline.left() < best * len(contenders):
            return
        _round(contenders)


def _round(trials: Sequence[_Trial]) -> float:
    """Run each once. Returns the least of their times."""
    for trial in trials:
        trial.samples.append(trial.seconds())
    return min(trial.samples[-1] for trial in trials)


def _within(factor: float, trials: Sequence[_Trial], best: float) -> list[_Trial]:
    return [trial for trial in trials if min(trial.samples) < factor * best]


def _make(problem: Problem, candidate: Candidate, arrays: dict[int, Array], seconds: float) -> _Trial | None:
    """A trial that has run once; None when the candidate cannot be made, or not within `seconds`."""

    def first() -> tuple[Assembled, Array, float]:
        assembled, result = _assembled(problem, candidate, arrays)
        start = time.perf_counter()
        for step in assembled.steps:
            step()
        return assembled, result, time.perf_counter() - start

    try:
        assembled, result, took = call_with_timeout(first, seconds)
    except (DagexecError, MemoryError) as error:
        logger.info("%s: %s skipped: %s", problem.label, candidate.name, error)
        return None
    elsewhere = None
    if WEIGHTS in problem.constant and problem.cold:
        pool = _pool(problem.tensors[WEIGHTS][1])
        if assembled.bound.nbytes(WEIGHTS) <= pool.nbytes:  # larger ones drive themselves out of the cache
            elsewhere = pool
    return _Trial(candidate, assembled, result.copy(), took, [], elsewhere)


def _assembled(problem: Problem, candidate: Candidate, arrays: dict[int, Array]) -> tuple[Assembled, Array]:
    """The primitive on `arrays`, and a result that holds what it is given to hold."""
    result = arrays[problem.result].copy()

    def pack(
        number: int, array: Array, source: Descriptor, target: Descriptor, making: Making | None = None
    ) -> tuple[Array, Step]:
        if making is not None:
            filled = aligned_empty(making.nbytes)
            making.fill(filled)
            return filled, nothing_to_do
        packed = aligned_empty(target.nbytes)
        ask = (problem.library, problem.label)
        try:
            step: Step = reorder(*ask, source, target, array, packed, aligned_empty).step
        except UnsupportedFeatureError:
            plain, copy = problem.plain[number], aligned_empty(source.nbytes)
            copied = reorder(*ask, source, plain, array, copy, aligned_empty).step
            step = in_sequence([copied, reorder(*ask, plain, target, copy, packed, aligned_empty).step])
        step()
        return packed, nothing_to_do if number in problem.constant else step

    given = {**arrays, problem.result: result}
    return assemble(problem, candidate, given, aligned_empty, pack), result


def _random(number: int, layout: Descriptor, meta: TypeMeta, problem: Problem) -> Array:
    """Memory of a tensor, filled with random numbers that are not close to 0; weights are small."""
    scale = 1 / math.sqrt(max(1, problem.fan_in)) if number == WEIGHTS else 1.0
    buffer = aligned_empty(layout.nbytes)
    buffer.view(meta.numpy)[...] = np.resize(_numbers(number) * scale, layout.nbytes // meta.itemsize)
    return buffer


@lru_cache(maxsize=8)
def _numbers(seed: int) -> Array:
    rng = np.random.default_rng(seed)
    values: Array = rng.uniform(0.5, 1.5, _PERIOD) * rng.choice([-1, 1], _PERIOD)
    return values.astype(np.float32)


def _values(problem: Problem, result: Array) -> Array:
    """A result as numbers of at least float32."""
    meta = problem.tensors[problem.result][1]
    values: Array = result.view(meta.numpy)
    return values if meta.itemsize >= 4 else values.astype(np.float32)


def _distance(found: Array, expected: Array) -> float:
    """The largest difference, relative to the largest element; infinite where only one of the two is a number."""
    with np.errstate(invalid="ignore"):
        difference = np.subtract(found, expected)
    error = np.abs(difference, out=difference).max(initial=0.0)
    if np.isfinite(error):
        return float(error / max(expected.max(initial=0.0), -expected.min(initial=0.0), 1e-30))
    if not np.array_equal(np.isfinite(found), np.isfinite(expected)):
        return math.inf
    finite = np.isfinite(expected)
    largest = np.abs(expected[finite]).max(initial=0.0)
    return float(np.abs(found[finite] - expected[finite]).max(initial=0.0) / max(largest, 1e-30))


def _tolerance(problem: Problem) -> float:
    meta = problem.tensors[problem.result][1]
    if meta.itemsize == 4:
        return TOLERANCE
    return 2.0**-7 if meta.name == "bfloat16" else 2.0**-10


@lru_cache(maxsize=1)
def _pool(meta: TypeMeta) -> _Pool:
    at_end_of_measuring(_pool.cache_clear)
    return _Pool(_POOL * last_level_cache(), meta)
