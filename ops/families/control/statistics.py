"""Statistics that operators count under names, in a registry of the process or in one of a workspace; and timers.

A registry holds int64 counters; those of an average of "loss" are "loss/stat_value/sum" and "loss/stat_value/count".
StatRegistryExport gives and, by default, resets them. Timers count the time between TimerBegin and TimerEnd in the
registry of the process.
"""

from __future__ import annotations

import math
import time
from abc import abstractmethod
from collections.abc import Mapping

import numpy as np

from dagexec.core.dtypes import BOOL, FLOAT32, FLOAT64, INT32, INT64, STRING
from dagexec.core.gradient import no_gradient
from dagexec.core.operator import Operator, Step
from dagexec.core.registry import declares, new_operator
from dagexec.core.schema import OperatorCall, OpSchema, TensorType
from dagexec.errors import ArgumentError, ShapeError
from dagexec.ops.base.blocks import Array
from dagexec.platform.forking import ProcessLock

_MOST = np.iinfo(np.int64).max


class StatRegistry:
    """Counters by name, which several nets may change at once."""

    def __init__(self) -> None:
        """One without counters."""
        self._counts: dict[str, int] = {}
        self._firsts: dict[str, int] = {}
        self._lock = ProcessLock()

    def add(self, counts: Mapping[str, int]) -> None:
        """Add to counters; one that leaves int64 starts again at the other end, as in C++."""
        with self._lock.own:
            for key, count in counts.items():
                self._counts[key] = (self._counts.get(key, 0) + count + _MOST + 1) % (2 * _MOST + 2) - _MOST - 1

    def first(self, key: str, value: int) -> int:
        """The value that the first caller with this key had."""
        with self._lock.own:
            return self._firsts.setdefault(key, value)

    def read(self, *, reset: bool) -> list[tuple[str, int]]:
        """The counters, sorted by name; `reset` sets them to 0."""
        with self._lock.own:
            found = sorted(self._counts.items())
            if reset:
                self._counts = dict.fromkeys(self._counts, 0)
        return found


PROCESS = StatRegistry()
"""Where operators count that name no registry."""


class _OfRegistry(Operator):
    """Base of operators whose last input may be a registry."""

    def registry(self, index: int) -> StatRegistry:
        """The registry in input `index`, or that of the process. Raises BlobTypeError for another object."""
        return self.handle(index, StatRegistry) if len(self.input_blobs) > index else PROCESS


@new_operator(
    "StatRegistryCreate",
    infer=None,
    doc="Makes a registry of statistics. Every run makes a new one.",
    output_names=("registry",),
    effects=True,
)
class StatRegistryCreate(Operator):
    """A registry in a blob."""

    def prepare(self) -> Step:
        """Put a new registry into the output blob."""
        blob = self.output_blobs[0]

        def create() -> None:
            blob.value = StatRegistry()

        return create


@new_operator(
    "StatRegistryExport",
    inputs=(0, 1),
    infer=None,
    doc="Names, counts and times (nanoseconds since 1970) of all statistics of a registry, by default that of the "
    "process; then the counts are 0.",
    input_names=("registry",),
    output_names=("keys", "values", "timestamps"),
    args={"reset": "0: counts stay as they are (default 1)"},
    handles=(0,),
    mutates=(0,),
    effects=True,
    reproducible=False,
    on_host=True,
)
class StatRegistryExport(_OfRegistry):
    """Counters as tensors."""

    def prepare(self) -> Step:
        """Three vectors, as long as there are counters."""
        reset = self.arguments.bool("reset", True)

        def export() -> None:
            found = self.registry(0).read(reset=reset)
            keys = np.empty(len(found), np.object_)
            keys[:] = [key.encode() for key, _ in found]
            values = np.array([value for _, value in found], np.int64)
            times = np.full(len(found), time.time_ns(), np.int64)
            for index, (array, meta) in enumerate(((keys, STRING), (values, INT64), (times, INT64))):
                np.copyto(self.output(index).resize(array.shape, meta), array)

        return export


def _infer_update(call: OperatorCall) -> list[TensorType]:
    call.require_types(0, STRING)
    call.require_types(1, INT64)
    call.require_shape(1, call.require_rank(0, 1), "a value for each key")
    return []


@new_operator(
    "StatRegistryUpdate",
    inputs=(2, 3),
    infer=_infer_update,
    doc="Adds values to the statistics of a registry, by default that of the process.",
    input_names=("keys", "values", "registry"),
    handles=(2,),
    mutates=(2,),
    effects=True,
    on_host=True,
)
class StatRegistryUpdate(_OfRegistry):
    """Tensors as counters."""

    def prepare(self) -> Step:
        keys, values = self.x(0), self.x(1)

        def update() -> None:
            for key, value in zip(keys.tolist(), values.tolist(), strict=True):
                self.registry(2).add({key.decode(errors="surrogateescape"): value})

        return update


def _infer_put(call: OperatorCall) -> list[TensorType]:
    call.require_types(0, BOOL, INT32, INT64, FLOAT32, FLOAT64)
    if call.arguments.int("magnitude_expand", 1) < 1:
        raise ArgumentError(f"{call.label}: argument 'magnitude_expand' must be at least 1")
    return []


class _Put(Operator):
    """Base of operators that count a number, times `magnitude_expand` and without what is behind its point."""

    def prepare(self) -> Step:
        x, key = self.x(0).reshape(-1), self.arguments.string("stat_name", self.definition.name)

        def put() -> None:
            PROCESS.add({f"{key}/stat_value{name}": count for name, count in self.counts(self._count(x), key).items()})

        return put

    def _count(self, x: Array) -> int:
        """The first element, or the default. Raises ShapeError for none without a default, and for one out of range."""
        has_default, factor = "default_value" in self.arguments, self.arguments.int("magnitude_expand", 1)
        if not x.size and not has_default:
            raise ShapeError(f"{self.label}: there is no element, and no argument 'default_value'")
        value, limit = x[0].item() if x.size else self.arguments.float("default_value", 0.0), _MOST // factor
        if self.arguments.bool("bound"):
            if math.isnan(value):
                value = self.arguments.float("default_value", 0.0)
            value = min(max(value, -limit), limit)
        elif math.isnan(value) or abs(value) > limit:
            raise ShapeError(f"{self.label}: {value} is too large to count; with bound=1 it would be {limit}")
        return min(max(int(value * factor), -_MOST), _MOST)

    @staticmethod
    @abstractmethod
    def counts(count: int, key: str) -> Mapping[str, int]:
        """What is added, by the end of the statistic's name."""


@declares
def _put(name: str, doc: str) -> OpSchema:
    return OpSchema(
        name,
        infer=_infer_put,
        doc=doc,
        input_names=("value",),
        args={
            "stat_name": "the name that the statistic begins with (default: that of the operator)",
            "magnitude_expand": "what values are multiplied with, as counters are integers (default 1)",
            "bound": "1: a value that is too large, or NaN, is no error (default 0)",
            "default_value": "what counts where there is no element",
        },
        effects=True,
    )


@_put("IncrementPut", "Adds its value to a statistic.")
class IncrementPut(_Put):
    """A sum."""

    @staticmethod
    def counts(count: int, key: str) -> Mapping[str, int]:
        """The value."""
        return {"": count}


@_put("AveragePut", "Adds its value to the statistic of a sum, and 1 to that of a count.")
class AveragePut(_Put):
    """A mean."""

    @staticmethod
    def counts(count: int, key: str) -> Mapping[str, int]:
        """The value, and how many."""
        return {"/sum": count, "/count": 1}


@_put(
    "StdDevPut",
    "As AveragePut; and adds the value's distance from the first one, and its square, from which a deviation follows.",
)
class StdDevPut(_Put):
    """A mean and a deviation."""

    @staticmethod
    def counts(count: int, key: str) -> Mapping[str, int]:
        """Sums around the first value, so that squares stay small."""
        distance = count - PROCESS.first(key, count)
        return {"/sum": count, "/count": 1, "/sumoffset": distance, "/sumsqoffset": distance * distance}


class Timer:
    """When something began, in nanoseconds, and what it is called."""

    def __init__(self, name: str) -> None:
        """One that begins now."""
        self.name = name
        self._begin = time.perf_counter_ns()

    def elapsed(self) -> int:
        """Nanoseconds since it began."""
        return time.perf_counter_ns() - self._begin

    def end(self) -> None:
        """Count the time."""
        PROCESS.add({f"{self.name}/time_ns/sum": self.elapsed(), f"{self.name}/time_ns/count": 1})


@new_operator(
    "TimerBegin",
    infer=None,
    doc="Begins a timer.",
    output_names=("timer",),
    args={"counter_name": "what the statistic is called (default: the name of the operator)"},
    effects=True,
)
class TimerBegin(Operator):
    """A timer in a blob."""

    def prepare(self) -> Step:
        """Put a new timer into the output blob."""
        blob, name = self.output_blobs[0], self.arguments.string("counter_name", self.definition.name)

        def begin() -> None:
            blob.value = Timer(name)

        return begin


@declares
def _of_timer(name: str, doc: str, *, gives: bool) -> OpSchema:
    return OpSchema(
        name,
        infer=lambda call: [TensorType((), INT64)] * len(call.definition.output),
        doc=doc,
        input_names=("timer",),
        output_names=("nanoseconds",) if gives else (),
        handles=(0,),
        effects=True,
        reproducible=False,
    )


class _OfTimer(Operator):
    """Base of operators of a timer."""

    ends = True

    def prepare(self) -> Step:
        """What has passed to the output, then the count. Raises BlobTypeError when input 0 is no timer."""
        outputs = [self.y(index) for index in range(len(self.output_blobs))]

        def step() -> None:
            timer = self.handle(0, Timer)
            for output in outputs:
                output[...] = timer.elapsed()
            if self.ends:
                timer.end()

        return step


@_of_timer("TimerEnd", "Counts the time since a timer began: its sum, and how often.", gives=False)
class TimerEnd(_OfTimer):
    """A time counted."""


@_of_timer("TimerGetAndEnd", "As TimerEnd, and gives the time.", gives=True)
class TimerGetAndEnd(_OfTimer):
    """A time counted and given."""


@_of_timer("TimerGet", "Nanoseconds since a timer began.", gives=True)
class TimerGet(_OfTimer):
    """A time."""

    ends = False


no_gradient(
    "StatRegistryCreate", "StatRegistryExport", "StatRegistryUpdate", "IncrementPut", "AveragePut", "StdDevPut",
    "TimerBegin", "TimerEnd", "TimerGet", "TimerGetAndEnd",
)  # fmt: skip
