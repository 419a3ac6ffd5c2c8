"""Counters and flags that several nets share, behind a lock each, and AtomicFetchAdd, which works under a mutex.

Operators of one net on one counter run in the order of the net; those of nets that run at once take turns.
"""

from __future__ import annotations

import numpy as np

from dagexec.core.dtypes import BOOL, INT32, INT64
from dagexec.core.gradient import no_gradient
from dagexec.core.operator import Operator, Step
from dagexec.core.registry import new_operator
from dagexec.core.schema import Cost, OperatorCall, TensorType
from dagexec.errors import ArgumentError
from dagexec.ops.families.optimize.counter import Mutex
from dagexec.platform.forking import ProcessLock

_INT64 = np.iinfo(np.int64)


class Counter:
    """A number that is changed by one operator at a time."""

    def __init__(self, start: int) -> None:
        """A counter that holds `start`."""
        self._value = start
        self._lock = ProcessLock()

    @property
    def value(self) -> int:
        """What it holds."""
        return self._value

    def add(self, step: int) -> int:
        """Add, and return what it held before. Raises ArgumentError where that leaves int64."""
        with self._lock.own:
            before = self._value
            if not _INT64.min <= before + step <= _INT64.max:
                raise ArgumentError(f"a counter at {before} cannot count on: it is an int64")
            self._value = before + step
        return before

    def reset(self, start: int) -> int:
        """Let it hold `start`, and return what it held before."""
        with self._lock.own:
            before, self._value = self._value, start
        return before


class Flag:
    """A truth value that only ever becomes true.

    Attributes:
        value: false until somebody sets it.
    """

    value = False


_START = {"init_count": "what it holds then (default: 0)"}


def _infer_count(call: OperatorCall) -> list[TensorType]:
    return [TensorType((), INT64)] * len(call.definition.output)


def _infer_truth(_call: OperatorCall) -> list[TensorType]:
    return [TensorType((), BOOL)]


@new_operator(
    "CreateCounter",
    infer=None,
    doc="Makes a counter, of int64. Every run makes a new one.",
    output_names=("counter",),
    args=_START,
    effects=True,
)
class CreateCounter(Operator):
    """A counter in a blob."""

    def prepare(self) -> Step:
        """Put a new counter into the output blob."""
        start, blob = self.arguments.int("init_count", 0), self.output_blobs[0]

        def create() -> None:
            blob.value = Counter(start)

        return create


@new_operator(
    "ResetCounter",
    outputs=(0, 1),
    infer=_infer_count,
    doc="Sets a counter. The output, if it is asked for, is what it held before.",
    input_names=("counter",),
    output_names=("previous",),
    args=_START,
    handles=(0,),
    mutates=(0,),
    effects=True,
)
class ResetCounter(Operator):
    """A counter set anew."""

    def prepare(self) -> Step:
        start = self.arguments.int("init_count", 0)
        previous = self.y(0) if self.output_blobs else np.empty((), np.int64)

        def reset() -> None:
            previous[...] = self.handle(0, Counter).reset(start)

        return reset


@new_operator(
    "CountUp",
    infer=_infer_count,
    doc="Adds 1 to a counter; the output is what it held before.",
    input_names=("counter",),
    output_names=("previous",),
    handles=(0,),
    mutates=(0,),
    effects=True,
)
class CountUp(Operator):
    """One more."""

    def prepare(self) -> Step:
        previous = self.y(0)

        def count() -> None:
            previous[...] = self.handle(0, Counter).add(1)

        return count


@new_operator(
    "CountDown",
    infer=_infer_truth,
    doc="Takes 1 from a counter; the output is true where that left less than 0.",
    input_names=("counter",),
    output_names=("done",),
    handles=(0,),
    mutates=(0,),
    effects=True,
)
class CountDown(Operator):
    """One less."""

    def prepare(self) -> Step:
        done = self.y(0)

        def count() -> None:
            done[...] = self.handle(0, Counter).add(-1) <= 0

        return count


@new_operator(
    "CheckCounterDone",
    infer=_infer_truth,
    doc="Whether a counter holds 0 or less.",
    input_names=("counter",),
    output_names=("done",),
    handles=(0,),
    reproducible=False,
)
class CheckCounterDone(Operator):
    """Whether it was counted down."""

    def prepare(self) -> Step:
        done = self.y(0)

        def check() -> None:
            done[...] = self.handle(0, Counter).value <= 0

        return check


@new_operator(
    "RetrieveCount",
    infer=_infer_count,
    doc="What a counter holds.",
    input_names=("counter",),
    output_names=("count",),
    handles=(0,),
    reproducible=False,
)
class RetrieveCount(Operator):
    """The count as a tensor."""

    def prepare(self) -> Step:
        held = self.y(0)

        def retrieve() -> None:
            held[...] = self.handle(0, Counter).value

        return retrieve


@new_operator(
    "CreateAtomicBool",
    infer=None,
    doc="Makes a flag, false, for nets that run at once. Every run makes a new one.",
    output_names=("flag",),
    effects=True,
)
class CreateAtomicBool(Operator):
    """A flag in a blob."""

    def prepare(self) -> Step:
        """Put a new flag into the output blob."""
        blob = self.output_blobs[0]

        def create() -> None:
            blob.value = Flag()

        return create


def _infer_set(call: OperatorCall) -> list[TensorType]:
    call.require_types(1, BOOL)
    if call.inputs[1].elements != 1:
        raise call.fail(f"the condition must be one bool, found {call.inputs[1]}")
    return []


@new_operator(
    "ConditionalSetAtomicBool",
    infer=_infer_set,
    doc="Makes a flag true where the condition, one bool, is.",
    input_names=("flag", "condition"),
    handles=(0,),
    mutates=(0,),
    effects=True,
)
class ConditionalSetAtomicBool(Operator):
    """A flag that may become true."""

    def prepare(self) -> Step:
        condition = self.x(1)

        def set_it() -> None:
            if condition.item():
                self.handle(0, Flag).value = True

        return set_it


@new_operator(
    "CheckAtomicBool",
    infer=_infer_truth,
    doc="Whether a flag is true.",
    input_names=("flag",),
    output_names=("value",),
    handles=(0,),
    reproducible=False,
)
class CheckAtomicBool(Operator):
    """A flag as a tensor."""

    def prepare(self) -> Step:
        value = self.y(0)

        def check() -> None:
            value[...] = self.handle(0, Flag).value

        return check


def _infer_fetch_add(call: OperatorCall) -> list[TensorType]:
    meta = call.require_types(1, INT32, INT64)
    call.require_types(2, meta)
    for place in (1, 2):
        if call.inputs[place].elements != 1:
            raise call.fail(f"input {place} must be one integer, found {call.inputs[place]}")
    return [call.inputs[1], call.inputs[1]]


@new_operator(
    "AtomicFetchAdd",
    infer=_infer_fetch_add,
    doc="While it holds the mutex: the sum of two integers, and the first of them. The sum may take its place.",
    input_names=("mutex", "value", "step"),
    output_names=("sum", "previous"),
    inplace=lambda source, target: (source, target) == (1, 0),
    cost=lambda _call, _outputs: Cost(1, 16, 16),
    handles=(0,),
    effects=True,
)
class AtomicFetchAdd(Operator):
    """A sum under a mutex."""

    def prepare(self) -> Step:
        """One sum. Raises BlobTypeError when input 0 is no mutex."""
        value, step, total, previous = self.x(1), self.x(2).reshape(self.x(1).shape), self.y(0), self.y(1)

        def fetch_and_add() -> None:
            with self.handle(0, Mutex).lock.own:
                np.copyto(previous, value)
                np.add(value, step, out=total)

        return fetch_and_add


no_gradient(
    "CreateCounter", "ResetCounter", "CountUp", "CountDown", "CheckCounterDone", "RetrieveCount", "CreateAtomicBool",
    "ConditionalSetAtomicBool", "CheckAtomicBool", "AtomicFetchAdd",
)  # fmt: skip
