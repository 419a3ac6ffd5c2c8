"""Requests that are joined in random compositions, each result compared byte by byte with that of a lone run.

Threads and tasks ask one executor at the same time, for one row or several, with priorities; some give up, some are
cancelled, and some are fed a row that an operator fails at. Which requests are joined is left to chance.
"""

from __future__ import annotations

import asyncio
import math
import random
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

import dagexec
from dagexec.analysis.comparison import random_feeds
from dagexec.core.feeds import Array
from dagexec.core.model import Model
from dagexec.core.operator import Operator, Step
from dagexec.core.proto import NetDef, OperatorDef
from dagexec.core.registry import new_operator
from dagexec.core.rows import first_axis
from dagexec.core.schema import OperatorCall, TensorType, first_to_first
from dagexec.errors import DagexecError, RunCancelledError, RunTimeoutError
from dagexec.platform.locks import new_lock
from dagexec.platform.records import dataclass
from dagexec.stress.operators import InjectedError

ROWS_OPERATOR = "StressRows"

_MOST_ROWS = 3
_FEEDS = 24  # of each number of rows
_TROUBLE = 0.05  # of requests, for each kind of it
_PATIENCE = 0.004  # seconds, at most, of a request that gives up or is cancelled


def _infer(call: OperatorCall) -> list[TensorType]:
    return [call.inputs[0]]


@new_operator(
    ROWS_OPERATOR,
    infer=_infer,
    doc="Y = X, unless X has an infinite element: then it fails. For stress tests only.",
    input_names=("X",),
    output_names=("Y",),
    inplace=first_to_first,
    rows=first_axis,
)
class StressRows(Operator):
    """Copies, or fails at a row that asks for it."""

    def prepare(self) -> Step:
        """A step that looks at every element."""
        x, y = self.x(0), self.y(0)

        def step() -> None:
            if np.isinf(x).any():
                raise InjectedError("a row was infinite")
            np.copyto(y, x)

        return step


@dataclass(frozen=True)
class Plan:
    """The requests to one executor.

    Attributes:
        requests: how many.
        seed: of the inputs, and of what each caller does.
        max_batch, max_wait: options of the executor.
        threads, tasks: how many callers there are of each kind.
    """

    requests: int
    seed: int = 0
    max_batch: int = 8
    max_wait: float = 0.001
    threads: int = 8
    tasks: int = 24


@dataclass(frozen=True)
class Compositions:
    """The outcome of the requests.

    Attributes:
        outcomes: how many there were of each kind; "differing" must be 0, and "wrong error".
        batch_sizes: runs by number of rows.
        retried: requests that ran again alone.
        problems: the first ones, in words.
    """

    outcomes: Mapping[str, int]
    batch_sizes: Mapping[int, int]
    retried: int
    problems: tuple[str, ...]


class _Case:
    """The feeds of one request, and its expected results."""

    def __init__(self, feeds: dict[str, Array], expected: dict[str, bytes] | None) -> None:
        """`expected` is None for feeds that an operator fails at."""
        self.feeds = feeds
        self.expected = expected


class _Session:
    """The callers of one executor."""

    def __init__(self, executor: dagexec.Executor, cases: list[_Case], bad: list[_Case], plan: Plan) -> None:
        self._executor = executor
        self._cases = cases
        self._bad = bad
        self._plan = plan
        self._left = plan.requests
        self._lock = new_lock()
        self.outcomes: Counter[str] = Counter()
        self.problems: list[str] = []

    def run(self) -> None:
        """Have all callers ask until all requests are made."""
        callers = [threading.Thread(target=self._thread, args=(number,)) for number in range(self._plan.threads)]
        for caller in callers:
            caller.start()
        asyncio.run(self._all_tasks())
        for caller in callers:
            caller.join()

    def _take(self) -> bool:
        with self._lock:
            self._left -= 1
            return self._left >= 0

    def _thread(self, number: int) -> None:
        source = random.Random(f"{self._plan.seed} thread {number}")
        while self._take():
            case, timeout = self._chosen(source)
            try:
                self._judge(case, self._executor.run(case.feeds, timeout=timeout, priority=_priority(source)), None)
            except Exception as error:
                self._judge(case, None, error)

    async def _all_tasks(self) -> None:
        await asyncio.gather(*(self._task(number) for number in range(self._plan.tasks)))

    async def _task(self, number: int) -> None:
        source = random.Random(f"{self._plan.seed} task {number}")
        while self._take():
            case, timeout = self._chosen(source)
            asked = asyncio.ensure_future(
                self._executor.run_async(case.feeds, timeout=timeout, priority=_priority(source))
            )
            if source.random() < _TROUBLE:
                await asyncio.sleep(source.uniform(0, _PATIENCE))
                asked.cancel()
            try:
                self._judge(case, await asked, None)
            except asyncio.CancelledError:
                self._count("cancelled")
            except Exception as error:
                self._judge(case, None, error)

    def _chosen(self, source: random.Random) -> tuple[_Case, float | None]:
        case = source.choice(self._bad if source.random() < _TROUBLE else self._cases)
        return case, source.uniform(0, _PATIENCE) if source.random() < _TROUBLE else None

    def _judge(self, case: _Case, found: Mapping[str, Array] | None, error: Exception | None) -> None:
        if found is not None:
            same = case.expected == {name: array.tobytes() for name, array in found.items()}
            self._count("completed" if same else "differing", "" if same else "a result has other bytes than alone")
        elif isinstance(error, RunTimeoutError | RunCancelledError):
            self._count("timed out")
        elif isinstance(error, DagexecError) and isinstance(error.__cause__, InjectedError) and case.expected is None:
            self._count("failed")
        else:
            self._count("wrong error", f"{type(error).__name__}: {error}")

    def _count(self, outcome: str, problem: str = "") -> None:
        with self._lock:
            self.outcomes[outcome] += 1
            if problem and len(self.problems) < 10:
                self.problems.append(problem)


def run_compositions(model: Model, plan: Plan) -> Compositions:
    """Join the requests of `plan`, to a model whose first axes are free, and compare. Raises what `compile` does."""
    watched = _with_failures(model)
    good, bad = _feeds(model, plan.seed)
    with dagexec.compile(watched, replicas=1) as alone:
        cases = [_Case(feeds, {name: array.tobytes() for name, array in alone.run(feeds).items()}) for feeds in good]
    with dagexec.compile(watched, max_batch=plan.max_batch, max_wait=plan.max_wait) as executor:
        session = _Session(executor, cases, [_Case(feeds, None) for feeds in bad], plan)
        session.run()
        statistics = executor.statistics()
    if statistics.running or statistics.queued:
        session.problems.append(f"{statistics.running} running and {statistics.queued} queued when all were over")
    return Compositions(dict(session.outcomes), statistics.batch_sizes, statistics.retried, tuple(session.problems))


def _priority(source: random.Random) -> int:
    return source.choice((0, 0, 0, 1, -1))


def _with_failures(model: Model) -> Model:
    """The model, the first input of which passes an operator that fails at infinite rows."""
    name = sorted(model.needed_inputs())[0]
    net = NetDef()
    net.CopyFrom(model.net)
    inner = f"{name}_looked_at"
    for definition in net.op:
        definition.input[:] = [inner if blob == name else blob for blob in definition.input]
    net.op.insert(0, OperatorDef(type=ROWS_OPERATOR, input=[name], output=[inner]))
    return replace(model, net=net)


def _feeds(model: Model, seed: int) -> tuple[list[dict[str, Array]], list[dict[str, Array]]]:
    """Feeds of one to three rows, and some with an infinite element in the first input."""
    good = []
    for rows in range(1, _MOST_ROWS + 1):
        shapes = {name: (rows, *_sizes(model, name)) for name in model.needed_inputs()}
        good += [random_feeds(model, shapes, seed=seed + number) for number in range(_FEEDS)]
    bad = []
    for feeds in good[:: _FEEDS // 3]:
        first = sorted(feeds)[0]
        spoiled = feeds[first].copy()
        spoiled.flat[0] = math.inf
        bad.append({**feeds, first: spoiled})
    return good, bad


def _sizes(model: Model, name: str) -> tuple[int, ...]:
    shape = model.inputs[name].shape
    assert shape is not None
    return tuple(1 if size is None else size for size in shape[1:])
