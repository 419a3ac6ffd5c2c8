"""Predicting a run: the machine that decides in runs, driven on a virtual clock, from the time each operator takes.

On the host, workers take pieces of tasks as they do in a pool. On a device, a chain is ready once its parents have been
launched; the worker launches its operators on one of its own streams, which executes them in order and waits, without
the host, for the events of parents on other streams.

`Hardware` describes the machine and the costs of scheduling, which `scheduler.run.overhead` measures. With hardware
without such costs, a measured run can reach the prediction but not beat `lower_bound`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from heapq import heappop, heappush

from dagexec.platform.records import dataclass
from dagexec.scheduler.plan.plan import Plan
from dagexec.scheduler.plan.task_graph import TaskGraph, chain_tasks
from dagexec.scheduler.run.policy_machine import machine_of
from dagexec.scheduler.run.work import Work, chain_work
from dagexec.scheduling.paths import longest_paths


@dataclass(frozen=True)
class Hardware:
    """The workers of a plan, and what they cost beyond the operators.

    Attributes:
        workers: threads.
        streams: of the device, shared out evenly; at least one a worker. 0 runs the plan on the host.
        piece_seconds: for a worker to take a piece, or a chain of a device, and to settle it.
        wake_seconds: until an idle worker starts on a task.
        launch_seconds: for a worker to launch one operator on a stream.
        slowdown: the factor on operators when 1, 2, ... workers compute; the last holds for more of them.
    """

    workers: int = 1
    streams: int = 0
    piece_seconds: float = 0.0
    wake_seconds: float = 0.0
    launch_seconds: float = 0.0
    slowdown: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        if self.workers < 1 or self.streams < 0:
            raise ValueError(f"hardware needs at least 1 worker and at least 0 streams, found {self}")

    @property
    def streams_per_worker(self) -> int:
        """How many streams each worker launches on."""
        return max(1, self.streams // self.workers)


@dataclass(frozen=True, eq=False)
class TimedTasks:
    """Tasks and their times.

    Attributes:
        graph: the tasks.
        seconds: of each one, all its pieces together.
        held: the part of these in which it holds the interpreter lock; empty for none.
    """

    graph: TaskGraph
    seconds: Sequence[float]
    held: Sequence[float] = ()

    @property
    def work(self) -> float:
        """Seconds of all tasks together: the time of one worker."""
        return sum(self.seconds)

    def taking(self, seconds: float) -> TimedTasks:
        """The same tasks, scaled so that all together take `seconds`."""
        scale = seconds / self.work if self.work else 0.0
        return replace(self, seconds=[task * scale for task in self.seconds], held=[task * scale for task in self.held])

    def critical_path(self, workers: int) -> float:
        """Seconds along the longest path where up to `workers` workers share the pieces of each task."""
        counted = zip(self.seconds, self.graph.pieces, strict=True)
        shared = [seconds * -(-pieces // workers) / pieces for seconds, pieces in counted]
        return max(longest_paths(self.graph.children, shared), default=0.0)


@dataclass(frozen=True, eq=False)
class OperatorTasks:
    """The tasks that the operators of a plan are handed out as.

    Attributes:
        plan: of the net.
        work: the tasks.
        shares: for each task, the operators that it computes, and its part of the time of each.
    """

    plan: Plan
    work: Work
    shares: Sequence[Sequence[tuple[int, float]]]

    def timed(self, operator_seconds: Sequence[float], held: Sequence[float] = ()) -> TimedTasks:
        """The tasks where operators take `operator_seconds`, and hold the interpreter lock for `held` of these."""
        return TimedTasks(self.work.graph, self._of_tasks(operator_seconds), self._of_tasks(held) if held else ())

    def operator_seconds(self, task_seconds: Sequence[float], seconds: Sequence[float]) -> list[float]:
        """The time of each operator, by `task_seconds` where these are known (not 0), and by `seconds` elsewhere.

        Operators of a task divide its time as they do in `seconds`.
        """
        result = list(seconds)
        for row, took, whole in zip(self.shares, task_seconds, self._of_tasks(seconds), strict=True):
            for index, part in row:
                if took:
                    result[index] += (took / whole - 1) * part * seconds[index] if whole else took * part / len(row)
        return result

    def _of_tasks(self, seconds: Sequence[float]) -> list[float]:
        return [sum(seconds[index] * part for index, part in row) for row in self.shares]


def tasks_of_chains(plan: Plan) -> OperatorTasks:
    """Each chain of `plan` as one task of one piece."""
    shares = [[(index, 1.0) for index in chain] for chain in plan.chains]
    return OperatorTasks(plan, chain_work(plan, [()] * len(plan.chains)), shares)


def timed_chains(plan: Plan) -> TimedTasks:
    """Each chain of `plan`, with its `seconds`, as one task of one piece."""
    return TimedTasks(chain_tasks(plan), plan.seconds)


def predict_makespan(plan: Plan, workers: int) -> float:
    """Seconds from start to end of a run of the chains of `plan` (with its `seconds`) on `workers` workers, at no cost.

    List scheduling (Graham 1969), at most 2 - 1/workers times the optimum.
    """
    return predict_host(timed_chains(plan), Hardware(workers))


def predict_host(tasks: TimedTasks, hardware: Hardware) -> float:
    """Seconds of one run on the workers of `hardware`, one of which is awake.

    Pieces of a task take equally long. Tasks that hold the interpreter lock wait for each other: tasks that run side by
    side slow down until no more than one of them holds it at a time, as all work does where many workers compute.
    """
    machine = machine_of(tasks.graph, hardware.workers)
    shares = _held_shares(tasks, hardware)
    left: list[tuple[float, int, int, int]] = []  # by worker under way: its end if it were alone, a number, its piece
    now = passed = 0.0  # seconds, and the progress of each task under way in them, as if it were alone
    idle, last, started = hardware.workers, -1, 0
    held = 0.0
    while machine.remaining:
        is_awake = True  # the first worker, or the one that is done; others that had nothing to do sleep
        while idle and (answer := machine.take(last)) is not None:
            task, piece = answer
            seconds = tasks.seconds[task] / tasks.graph.pieces[task] + hardware.piece_seconds
            heappush(left, (passed + seconds + (0.0 if is_awake else hardware.wake_seconds), started, task, piece))
            held += shares[task]
            started, idle, last, is_awake = started + 1, idle - 1, -1, False
        slowdown = hardware.slowdown[min(len(left), len(hardware.slowdown)) - 1]
        end, _, last, piece = heappop(left)
        now += (end - passed) * max(slowdown, held)
        held = held - shares[last] if left else 0.0
        passed, idle = end, idle + 1
        machine.end(last, piece)
    return now


def _held_shares(tasks: TimedTasks, hardware: Hardware) -> list[float]:
    """The part of each task's time in which it holds the interpreter lock; 0 if unknown."""
    if not tasks.held:
        return [0.0] * len(tasks.seconds)
    costs = [hardware.piece_seconds * pieces for pieces in tasks.graph.pieces]
    rows = zip(tasks.seconds, tasks.held, costs, strict=True)
    return [(held + cost) / (seconds + cost) if held else 0.0 for seconds, held, cost in rows]


def predict_device(
    plan: Plan,
    hardware: Hardware,
    operator_seconds: Sequence[float],
    on_device: Sequence[bool] | None = None,
    *,
    finish: bool = False,
) -> float:
    """Seconds of one run of `plan` when its chains are launched on the streams of `hardware`.

    Streams compute side by side and do not slow each other down. `operator_seconds` are those of the kernels;
    `on_device` says which chains are launched, by default all; the others run on their worker, which waits for the
    events of their parents first. With `finish`, a worker waits for each chain that it has launched, as DAGNet does.
    """
    launched = [True] * len(plan.chains) if on_device is None else on_device
    limit = max(1, len(plan.chains))  # workers and streams beyond that would never be used
    workers = [_LaunchingWorker(hardware, limit) for _ in range(min(hardware.workers, limit))]
    parents: list[list[int]] = [[] for _ in plan.chains]
    machine = machine_of(chain_tasks(plan), hardware.workers)
    free = list(range(len(workers)))  # a heap, for the same choice every time
    busy: list[tuple[float, int, int]] = []  # (when done, chain, worker)
    events: dict[int, _SimulatedEvent] = {}
    now = 0.0
    while machine.remaining:
        while free and (answer := machine.take()) is not None:
            chain, number = answer[0], heappop(free)
            seconds = [operator_seconds[index] for index in plan.chains[chain]]
            worker = workers[number]
            waits = [events[parent] for parent in sorted(parents[chain])]
            if launched[chain]:
                host, events[chain] = worker.launch(now, seconds, waits)
                host = max(host, events[chain].time) if finish else host
            else:
                host = max([now, *(event.time for event in waits)]) + sum(seconds)
                events[chain] = _SimulatedEvent(host, None)
            heappush(busy, (host + hardware.piece_seconds, chain, number))
        now, done, number = heappop(busy)
        heappush(free, number)
        for child in plan.children[done]:
            parents[child].append(done)
        machine.end(done, 0)
    return max([now, *(event.time for event in events.values())])


class _SimulatedStream:
    """A stream: when it is done with all that was launched, and the event after that."""

    __slots__ = ("tail", "time")

    def __init__(self) -> None:
        self.time = 0.0
        self.tail: _SimulatedEvent | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _SimulatedEvent:
    """When a chain is done, and on which stream; None for the host."""

    time: float
    stream: _SimulatedStream | None


class _LaunchingWorker:
    """A worker and its streams, the one used least recently first."""

    def __init__(self, hardware: Hardware, limit: int) -> None:
        self._launch_seconds = hardware.launch_seconds
        self._streams = [_SimulatedStream() for _ in range(min(hardware.streams_per_worker, limit))]

    def launch(
        self, now: float, seconds: Sequence[float], waits: Sequence[_SimulatedEvent]
    ) -> tuple[float, _SimulatedEvent]:
        """Launch a chain at `now`, after the events of `waits`. Returns when the worker is done, and the event."""
        stream = self._choose(now, waits)
        stream.time = max([stream.time, *(event.time for event in waits)])
        for kernel in seconds:
            now += self._launch_seconds
            stream.time = max(stream.time, now) + kernel
        stream.tail = _SimulatedEvent(stream.time, stream)
        return now, stream.tail

    def _choose(self, now: float, waits: Sequence[_SimulatedEvent]) -> _SimulatedStream:
        """One of this worker's streams that ends with a parent, else one that is idle, else the next in turn."""
        chosen = next((stream for event in waits for stream in self._streams if stream.tail is event), None)
        if chosen is None:
            chosen = next((stream for stream in self._streams if stream.time <= now), self._streams[0])
        self._streams.remove(chosen)
        self._streams.append(chosen)
        return chosen


def lower_bound(tasks: TimedTasks, workers: int) -> float:
    """A bound on every schedule on `workers` workers: max(critical path, work / workers)."""
    return max(tasks.critical_path(workers), tasks.work / workers)


def device_bound(plan: Plan, hardware: Hardware) -> float:
    """A bound on every schedule on the streams of `hardware`: of computing there, and of launching all operators."""
    streams = hardware.streams_per_worker * hardware.workers
    launching = hardware.launch_seconds * sum(map(len, plan.chains)) / hardware.workers
    return max(plan.critical_path, plan.work / streams, launching)
