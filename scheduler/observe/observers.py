"""Observers: told when runs, chains and operators start and stop, on the host and on the streams of devices.

An `ObservedRun` is one run under observation: it gives wrapped steps in place of the plain ones, so a run that nobody
observes calls the plain steps and pays nothing. `scheduler.trace` collects what it is told for a file,
`scheduler.trace_lines` prints it; the small observers here keep counts and mean times.

What stops is reported also when it raised, with the error. Times on the host are nanoseconds of
`time.perf_counter_ns`. An observer is called by the worker that does the work, several at once: it must be quick and
must guard what it keeps; what it raises ends the run as if the operator had raised it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from dagexec.core.conversion import Conversion, ConvertedStep
from dagexec.core.graph import Graph
from dagexec.core.native import grouped, phases_of, piece_step
from dagexec.core.operator import Operator, Prepared, Step, parts_of
from dagexec.core.profiled import Profiled, ProfiledStep
from dagexec.platform.threads import threads
from dagexec.scheduler.plan.culprit import stand_for
from dagexec.scheduler.plan.dynamic import CheckedStep

if TYPE_CHECKING:
    from dagexec.core.stream import Event, Kernel, Stream
    from dagexec.scheduler.plan.plan import Plan
    from dagexec.scheduler.run.machine import TaskGraph
    from dagexec.scheduler.run.run import Run

Pieces = Sequence[tuple[Step, ...]]
"""Of a task: the steps of each piece."""

_now = time.perf_counter_ns


class Observer:
    """Lets your code follow a run: override the methods for the events you want; by default they do nothing.

        class Slow(Observer):
            def operator_stopped(self, run, operator, worker, start, end, error):
                if end - start > 10_000_000:  # nanoseconds
                    print(run.graph.label(operator), "on", worker)

        executor.run(feeds, trace=Slow())

    `run` identifies the run and its net; operators are indices into its graph, chains into its chains. An Observer is
    also a `core.runtime.StreamObserver`.
    """

    def run_started(self, run: ObservedRun) -> None:
        """`run` was created; its first chains are ready."""

    def run_stopped(self, run: ObservedRun, end: int, error: BaseException | None) -> None:
        """`run` has ended; `error` is what it raises."""

    def chain_started(self, run: ObservedRun, chain: int, worker: str, ready: int, start: int) -> None:
        """`worker` starts `chain`, which became ready at `ready` and waited in the queue since then."""

    def event_waited(self, run: ObservedRun, chain: int, worker: str, start: int, end: int) -> None:
        """`chain` had to wait for events of its parents; for another kind of device the worker itself blocked."""

    def operator_started(self, run: ObservedRun, operator: int, worker: str) -> None:
        """`worker` starts `operator`: it computes it, or launches it on a stream."""

    def converted(
        self, run: ObservedRun, operator: int, worker: str, conversion: Conversion, start: int, end: int
    ) -> None:
        """`operator`, which is under way, had the layout of a tensor converted."""

    def inner_stopped(
        self,
        run: ObservedRun,
        operator: int,
        inner: str,
        worker: str,
        start: int,
        end: int,
        error: BaseException | None,
    ) -> None:
        """`operator`, which is under way, did its part `inner`: an operator of a net that it runs, or of an island."""

    def piece_started(self, run: ObservedRun, operator: int, phase: int, piece: int, worker: str) -> None:
        """`worker` starts a piece of `operator`, which is under way and which several workers may share."""

    def piece_stopped(
        self,
        run: ObservedRun,
        operator: int,
        phase: int,
        piece: int,
        worker: str,
        start: int,
        end: int,
        error: BaseException | None,
    ) -> None:
        """`worker` is done with a piece of `operator`, or met `error`."""

    def operator_stopped(
        self, run: ObservedRun, operator: int, worker: str, start: int, end: int, error: BaseException | None
    ) -> None:
        """`worker` is done with `operator`: has computed it, or launched it, or met `error`.

        Where workers shared it, from the first of its pieces to the last, and `worker` is one of them.
        """

    def chain_stopped(
        self, run: ObservedRun, chain: int, worker: str, start: int, end: int, error: BaseException | None
    ) -> None:
        """`worker` is done with `chain`, or met `error` in it."""

    def launched(self, stream: Stream, kernel: Kernel) -> None:
        """`kernel` was put on `stream`."""

    def recorded(self, stream: Stream, event: Event) -> None:
        """`event` was recorded at the present end of `stream`."""

    def waits(self, stream: Stream, event: Event) -> None:
        """What follows on `stream` waits for `event`."""

    def host_waited(self, event: Event | Stream) -> None:
        """The calling thread has found `event`, or all of a stream, done."""

    def executed(self, stream: Stream, kernel: Kernel, start: float, end: float) -> None:
        """`kernel` has run, from `start` to `end` in seconds of the device's clock."""

    def waited(self, stream: Stream, event: Event, start: float, end: float) -> None:
        """`stream` stood still for `event` from `start` to `end` in seconds of the device's clock."""


_TOLD = tuple(name for name in vars(Observer) if not name.startswith("_"))


class ObserverGroup(Observer):
    """Passes every event on to several observers, in order."""

    def __init__(self, observers: Iterable[Observer]) -> None:
        self.observers = tuple(observers)
        for name in _TOLD:
            setattr(self, name, _call_each([getattr(observer, name) for observer in self.observers]))


def _call_each(methods: Sequence[Callable[..., object]]) -> Callable[..., None]:
    def call(*what: object) -> None:
        for method in methods:
            method(*what)

    return call


def together(*observers: Observer | None) -> Observer | None:
    """Combine observers into one; None if none is given."""
    present = [observer for observer in observers if observer is not None]
    return ObserverGroup(present) if len(present) > 1 else present[0] if present else None


class ObservedRun:
    """One run of a net under observation: makes its steps, and knows when each chain became ready.

    Attributes:
        observer: who is told.
        graph: the operators.
        operators: their objects, in list order.
        chains: operator indices of each chain; a single chain of all that run for a net that has no plan.
        parents: the chains that each chain waits for.
        prepared: the operators as they are prepared, in list order; empty where nobody knows.
        started: when the run was made.
        shared: of each operator that workers share, for each of its phases the number of its task, and of its pieces.
        tasks: what the run hands out; None before it is known, and for a run in one thread.
    """

    def __init__(
        self,
        observer: Observer,
        graph: Graph,
        operators: Sequence[Operator],
        plan: Plan | None = None,
        prepared: Sequence[Prepared] = (),
    ) -> None:
        """Tells the observer that the run started."""
        self.observer = observer
        self.prepared = prepared
        self.graph = graph
        self.operators = operators
        self.chains = (_unsettled(len(graph), prepared),) if plan is None else plan.chains
        parents: list[list[int]] = [[] for _ in self.chains]
        for chain, children in enumerate(() if plan is None else plan.children):
            for child in children:
                parents[child].append(chain)
        self.parents = tuple(tuple(row) for row in parents)
        self.stopped_at: list[int] = [0] * len(self.chains)
        self._indices: dict[int, int] | None = None
        self.shared: dict[int, list[tuple[int, int]]] = {}
        self.tasks: TaskGraph | None = None
        self._shared: list[_SharedOperator] = []
        self.started = _now()
        observer.run_started(self)

    def chain(
        self, number: int, steps: Sequence[Step], waits: Sequence[Step] = (), after: Sequence[Step] = ()
    ) -> tuple[Step, ...]:
        """The steps of chain `number` under observation, one for each given, in this order: `waits`, `steps`, `after`.

        `steps` are those of its operators, all of them; `waits` make it wait for its parents' events; `after` are for
        records and the like.
        """
        bodies: list[Step] = [self._wait(number, step) for step in waits]
        bodies += [_ObservedOperator(self, index, step) for index, step in zip(self.chains[number], steps, strict=True)]
        bodies += after
        chain = _ObservedChain(self, number)
        last = len(bodies) - 1
        return tuple(chain.step(body, position == 0, position == last) for position, body in enumerate(bodies))

    def all_chains(self, steps: Sequence[Step]) -> list[tuple[Step, ...]]:
        """The steps of every chain under observation, from those of the operators in list order."""
        return [self.chain(number, [steps[index] for index in row]) for number, row in enumerate(self.chains)]

    def tasks_of_chains(self, steps: Sequence[Step], most: int) -> list[list[Pieces]]:
        """The tasks of every chain under observation, with up to `most` pieces of a phase; see `scheduler.run.work`."""
        found: list[list[Pieces]] = []
        for number, row in enumerate(self.chains):
            found.append(self._tasks(number, [steps[index] for index in row], most, sum(map(len, found))))
        return found

    def _tasks(self, number: int, steps: Sequence[Step], most: int, first: int) -> list[Pieces]:
        """Those of a chain, of which the first has the number `first`."""
        bodies: list[Sequence[Step]] = []
        for index, step in zip(self.chains[number], steps, strict=True):
            shared = _SharedOperator(self, index, step, most)
            if all(len(phase) <= 1 for phase in shared.phases):
                bodies.append([_ObservedOperator(self, index, step)])
                continue
            self._shared.append(shared)
            bodies += [[shared.start], *shared.phases, [shared.stop]]
        chain = _ObservedChain(self, number)
        last = len(bodies) - 1
        tasks: list[Pieces] = []
        alone = False
        for position, pieces in enumerate(bodies):
            made = [(chain.step(body, position == 0, position == last),) for body in pieces]
            if len(made) == 1 and alone:
                tasks[-1] = [tasks[-1][0] + made[0]]
            else:
                tasks.append(made)
            alone = len(made) == 1
            if pieces and isinstance(pieces[0], _ObservedPiece):
                self.shared.setdefault(pieces[0].index, []).append((first + len(tasks) - 1, len(pieces)))
        return tasks or [[()]]

    def follow(self, run: Run) -> Run:
        """`run`, which tells the observer when it is over, before its owner is told."""
        self.tasks = run.work.graph
        finished = run.finished

        def stopped_and_finished() -> None:
            try:
                self.stopped(run.error)
            finally:
                finished()

        run.finished = stopped_and_finished
        return run

    def stopped(self, error: BaseException | None) -> None:
        """Tell the observer that the run is over, and before that of operators that were never done with."""
        for shared in self._shared:
            shared.give_up(error)
        self.observer.run_stopped(self, _now(), error)

    def ready(self, chain: int) -> int:
        """When the last parent of `chain` was done with; the start of the run when it has none."""
        return max((self.stopped_at[parent] for parent in self.parents[chain]), default=self.started)

    def index_of(self, operator: Operator) -> int | None:
        """The index of `operator`, None when it is not one of this run's."""
        if self._indices is None:
            self._indices = {id(found): index for index, found in enumerate(self.operators)}
        return self._indices.get(id(operator))

    def _wait(self, chain: int, step: Step) -> Step:
        def observed() -> None:
            start = _now()
            try:
                step()
            finally:
                self.observer.event_waited(self, chain, threading.current_thread().name, start, _now())

        return observed


Tell = Callable[[str, str, int, int, BaseException | None], None]
"""Told of an operator in a body: its label, the worker, start, end, and the error."""


class _Telling(threading.local):
    """Who is to be told of the operators in bodies that this thread executes."""

    tell: Tell | None = None


telling = _Telling()


@contextmanager
def telling_of_bodies(tell: Tell | None) -> Iterator[None]:
    """Within it, `tell` is told what bodies execute in this thread."""
    before, telling.tell = telling.tell, tell
    try:
        yield
    finally:
        telling.tell = before


def observed_in_body(label: str, step: Step, tell: Tell) -> Step:
    """The step of an operator in a body, which tells what it did, on whichever thread it is called."""

    def observed() -> None:
        error: BaseException | None = None
        start = _now()
        try:
            with telling_of_bodies(tell):
                step()
        except BaseException as caught:
            error = caught
            raise
        finally:
            tell(label, threading.current_thread().name, start, _now(), error)

    return observed


def _unsettled(count: int, prepared: Sequence[Prepared]) -> tuple[int, ...]:
    """The indices of `count` operators without those that are settled as they are `prepared`."""
    return tuple(index for index in range(count) if not (prepared and prepared[index].is_settled))


class _ObservedOperator:
    """The step of an operator, with what is told of it."""

    __slots__ = ("_profiled", "_run", "_step", "index")

    def __init__(self, run: ObservedRun, index: int, step: Step) -> None:
        self._run = run
        self.index = index
        self._step = step
        self._profiled = _profiling(step, run.observer)

    def __call__(self) -> None:
        """Run or launch the operator once."""
        run, index, step = self._run, self.index, self._step
        worker = threading.current_thread().name
        run.observer.operator_started(run, index, worker)
        error: BaseException | None = None
        start = _now()
        try:
            current = step.current() if isinstance(step, CheckedStep) else step
            if isinstance(current, ConvertedStep):
                self._convert(worker, current.before)
                if self._profiled is None:
                    current.step()
                else:
                    self._profile(worker, self._profiled)
                self._convert(worker, current.after)
            elif self._profiled is not None:
                self._profile(worker, self._profiled)
            elif run.graph.schemas[index].sub_nets:
                with telling_of_bodies(partial(run.observer.inner_stopped, run, index)):
                    current()
            else:
                current()
        except BaseException as caught:
            error = caught
            raise
        finally:
            run.observer.operator_stopped(run, index, worker, start, _now(), error)

    def _profile(self, worker: str, profiled: Profiled) -> None:
        for part in profiled():
            self._run.observer.inner_stopped(self._run, self.index, part.label, worker, part.start, part.end, None)

    def _convert(self, worker: str, conversions: Sequence[Conversion]) -> None:
        for conversion in conversions:
            start = _now()
            conversion.copy()
            self._run.observer.converted(self._run, self.index, worker, conversion, start, _now())


class _SharedOperator:
    """An operator whose pieces workers share: a step before them, one for each, and one behind them.

    Attributes:
        phases: the pieces.
    """

    def __init__(self, run: ObservedRun, index: int, step: Step, most: int) -> None:
        """The operator of this number and step, with up to `most` pieces of a phase."""
        self.index = index
        self.run = run
        self.began: list[int] = []
        self.ended: list[int] = []
        self.error: BaseException | None = None
        self._under_way = False
        self.phases: list[list[Step]] = []
        for part in parts_of(step):
            native = phases_of(part)
            for phase in [[part]] if native is None else [list(map(piece_step, grouped(one, most))) for one in native]:
                number = len(self.phases)
                self.phases.append([_ObservedPiece(self, number, piece, body) for piece, body in enumerate(phase)])

    def start(self) -> None:
        """Say that the operator starts."""
        self._under_way = True
        self.run.observer.operator_started(self.run, self.index, threading.current_thread().name)

    def stop(self) -> None:
        """Say that it is done with."""
        self._under_way = False
        now = _now()
        start, end = min(self.began, default=now), max(self.ended, default=now)
        worker = threading.current_thread().name
        self.run.observer.operator_stopped(self.run, self.index, worker, start, end, self.error)

    def give_up(self, error: BaseException | None) -> None:
        """The run is over: it has stopped, too."""
        if self._under_way:
            self.error = self.error or error
            self.stop()


class _ObservedPiece:
    """The step of a piece, with what is told of it."""

    __slots__ = ("_operator", "_phase", "_piece", "_step", "index")

    def __init__(self, operator: _SharedOperator, phase: int, piece: int, step: Step) -> None:
        self.index = operator.index
        self._operator, self._phase, self._piece, self._step = operator, phase, piece, step

    def __call__(self) -> None:
        """Execute the piece once."""
        operator, worker = self._operator, threading.current_thread().name
        run, observer, place = operator.run, operator.run.observer, (self.index, self._phase, self._piece)
        observer.piece_started(run, *place, worker)
        error: BaseException | None = None
        start = _now()
        operator.began.append(start)
        try:
            self._step()
        except BaseException as caught:
            error = operator.error = caught
            raise
        finally:
            end = _now()
            operator.ended.append(end)
            observer.piece_stopped(run, *place, worker, start, end, error)


def _profiling(step: Step, observer: Observer) -> Profiled | None:
    """What runs a step that can tell of its parts, if the observer wants to hear of them."""
    inner = step.step if isinstance(step, ConvertedStep) else step
    if not isinstance(inner, ProfiledStep) or not _hears_of_parts(observer):
        return None
    return inner.profiling()


def _hears_of_parts(observer: Observer) -> bool:
    if isinstance(observer, ObserverGroup):
        return any(map(_hears_of_parts, observer.observers))
    return type(observer).inner_stopped is not Observer.inner_stopped


class _ObservedChain:
    """One execution of a chain: its first step starts it, its last one or one that raises stops it."""

    __slots__ = ("_number", "_run", "_start", "_worker")

    def __init__(self, run: ObservedRun, number: int) -> None:
        self._run = run
        self._number = number
        self._start = 0
        self._worker = ""

    def step(self, body: Step, is_first: bool, is_last: bool) -> Step:
        def observed() -> None:
            if is_first:
                self._begin()
            try:
                body()
            except BaseException as error:
                self._end(error)
                raise
            if is_last:
                self._end(None)

        if isinstance(body, _ObservedOperator | _ObservedPiece):
            stand_for(observed, body.index)
        return observed

    def _begin(self) -> None:
        self._worker = threading.current_thread().name
        self._start = _now()
        run = self._run
        run.observer.chain_started(run, self._number, self._worker, run.ready(self._number), self._start)

    def _end(self, error: BaseException | None) -> None:
        end = self._run.stopped_at[self._number] = _now()
        self._run.observer.chain_stopped(self._run, self._number, self._worker, self._start, end, error)


class RunsUnderWay:
    """The observed runs that are not over, to tell which operator of which run a kernel belongs to."""

    def __init__(self) -> None:
        self._lock = threads().lock()
        self._runs: tuple[ObservedRun, ...] = ()

    def add(self, run: ObservedRun) -> None:
        """`run` started."""
        with self._lock:
            self._runs = (*self._runs, run)

    def remove(self, run: ObservedRun) -> None:
        """`run` is over."""
        with self._lock:
            self._runs = tuple(other for other in self._runs if other is not run)

    def find(self, kernel: Kernel) -> tuple[ObservedRun, int] | None:
        """The run and the index of the operator whose kernel this is. A net, and hence an operator, has one run at a
        time."""
        if kernel.operator is not None:
            for run in self._runs:
                index = run.index_of(kernel.operator)
                if index is not None:
                    return run, index
        return None


@dataclass(frozen=True)
class RunCounts:
    """What a `RunCountObserver` has seen; `operators` counts those that returned, `failed` runs are in `stopped`."""

    started: int
    stopped: int
    failed: int
    operators: int


class RunCountObserver(Observer):
    """Counts runs and operators."""

    def __init__(self) -> None:
        self._lock = threads().lock()
        self._started = self._stopped = self._failed = self._operators = 0

    def counts(self) -> RunCounts:
        """The counts at this moment."""
        with self._lock:
            return RunCounts(self._started, self._stopped, self._failed, self._operators)

    def run_started(self, run: ObservedRun) -> None:
        with self._lock:
            self._started += 1

    def run_stopped(self, run: ObservedRun, end: int, error: BaseException | None) -> None:
        with self._lock:
            self._stopped += 1
            self._failed += error is not None

    def operator_stopped(
        self, run: ObservedRun, operator: int, worker: str, start: int, end: int, error: BaseException | None
    ) -> None:
        """One more, if it returned."""
        if error is None:
            with self._lock:
                self._operators += 1


class TimeObserver(Observer):
    """Mean times: of runs, and of each operator. Of an operator on a device the time on its stream counts.

    Runs and operators that fail are left out. For the runs of one graph (any number of replicas of it).
    """

    def __init__(self) -> None:
        self._lock = threads().lock()
        self._run_times: _Sum = _Sum()
        self._host: dict[int, _Sum] = {}
        self._device: dict[int, _Sum] = {}
        self._under_way = RunsUnderWay()

    @property
    def mean_run_ms(self) -> float:
        """Milliseconds a run took, from when it was made; 0 before the first ended."""
        with self._lock:
            return self._run_times.mean * 1e3

    @property
    def mean_operator_ms(self) -> dict[int, float]:
        """Milliseconds that each operator took, by its index."""
        with self._lock:
            return {index: found.mean * 1e3 for index, found in sorted((self._host | self._device).items())}

    def run_started(self, run: ObservedRun) -> None:
        """Kernels may be of this run from now on."""
        self._under_way.add(run)

    def run_stopped(self, run: ObservedRun, end: int, error: BaseException | None) -> None:
        """Add the time of the run."""
        self._under_way.remove(run)
        if error is None:
            with self._lock:
                self._run_times.add((end - run.started) / 1e9)

    def operator_stopped(
        self, run: ObservedRun, operator: int, worker: str, start: int, end: int, error: BaseException | None
    ) -> None:
        """Add the time of the operator."""
        if error is None:
            with self._lock:
                self._host.setdefault(operator, _Sum()).add((end - start) / 1e9)

    def executed(self, stream: Stream, kernel: Kernel, start: float, end: float) -> None:
        """Add the time of the operator's kernel."""
        found = self._under_way.find(kernel)
        if found is not None:
            with self._lock:
                self._device.setdefault(found[1], _Sum()).add(end - start)


class _Sum:
    """A sum of seconds, and of how many times."""

    __slots__ = ("count", "total")

    def __init__(self) -> None:
        self.total = 0.0
        self.count = 0

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    def add(self, seconds: float) -> None:
        self.total += seconds
        self.count += 1
