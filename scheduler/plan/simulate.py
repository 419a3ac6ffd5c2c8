"""Predicting a run: list scheduling of a plan on any number of workers and streams, from the time each operator takes.

The policy is that of the pool and of the nets. On the host, a worker that is free takes the ready chain of the highest
priority. On a device, a chain is ready once its parents have been launched; the worker launches its operators on one of
its own streams, which does them in order and waits, without the host, for the events of parents on other streams.

A `Machine` says what there is and what scheduling costs; `scheduler.run.overhead` measures that. With a machine whose
costs are nothing, a measured run can reach the prediction but not beat it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush

from dagexec.scheduler.plan.plan import Plan


@dataclass(frozen=True)
class Machine:
    """Who runs a plan, and what it costs beyond the operators.

    Attributes:
        workers: threads.
        streams: of the device, shared out evenly; at least one a worker. 0 runs the plan on the host.
        chain_seconds: for a worker to settle a chain and take the next.
        wake_seconds: until a worker that has nothing to do starts on a chain.
        launch_seconds: for a worker to launch one operator on a stream.
        slowdown: by what an operator takes longer when 1, 2, ... workers compute; the last holds for more of them.
    """

    workers: int = 1
    streams: int = 0
    chain_seconds: float = 0.0
    wake_seconds: float = 0.0
    launch_seconds: float = 0.0
    slowdown: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        if self.workers < 1 or self.streams < 0:
            raise ValueError(f"a machine needs at least 1 worker and at least 0 streams, found {self}")

    @property
    def streams_per_worker(self) -> int:
        """How many streams each worker launches on."""
        return max(1, self.streams // self.workers)


def predict_makespan(plan: Plan, workers: int) -> float:
    """Seconds from start to end of one run of `plan` (with its `seconds`) on `workers` workers, at no cost.

    List scheduling (Graham 1969), at most 2 - 1/workers times the optimum.
    """
    return predict_host(plan, Machine(workers))


def predict(plan: Plan, machine: Machine, operator_seconds: Sequence[float] = ()) -> float:
    """Seconds one run of `plan` takes on `machine`; with streams, by what each operator takes there."""
    return predict_device(plan, machine, operator_seconds) if machine.streams else predict_host(plan, machine)


def predict_host(plan: Plan, machine: Machine, held: Sequence[float] = ()) -> float:
    """Seconds one run of `plan` (with its `seconds`) takes on the workers of `machine`, one of which is awake.

    With `held`, the seconds in which each operator holds the interpreter lock, chains wait for each other: those that
    run side by side slow down to where no more than one of them holds it, as all scheduling does.
    """
    shares = _held_shares(plan, machine, held)
    counts = list(plan.parent_counts)
    ready = list(plan.frontier)
    heapify(ready)
    left: dict[int, float] = {}  # seconds of each chain under way, as if nobody else computed
    now, awake = 0.0, 1
    while ready or left:
        while ready and len(left) < machine.workers:
            chain = heappop(ready)
            left[chain] = plan.seconds[chain] + machine.chain_seconds + (0.0 if awake else machine.wake_seconds)
            awake = 0
        done = min(left, key=left.__getitem__)
        slowdown = machine.slowdown[min(len(left), len(machine.slowdown)) - 1]
        now += left[done] * max(slowdown, sum(shares[chain] for chain in left))
        passed = left.pop(done)
        for chain in left:
            left[chain] -= passed
        awake = 1  # the worker that is done; others that found nothing to do sleep
        for child in plan.children[done]:
            counts[child] -= 1
            if counts[child] == 0:
                heappush(ready, child)
    return now


def _held_shares(plan: Plan, machine: Machine, held: Sequence[float]) -> list[float]:
    """The part of each chain's time in which it holds the interpreter lock; 0 where `held` says nothing."""
    if not held:
        return [0.0] * len(plan.chains)
    shares = []
    for chain, seconds in zip(plan.chains, plan.seconds, strict=True):
        locked = machine.chain_seconds + sum(held[index] for index in chain)
        shares.append(locked / (seconds + machine.chain_seconds) if locked else 0.0)
    return shares


def predict_device(
    plan: Plan,
    machine: Machine,
    operator_seconds: Sequence[float],
    on_device: Sequence[bool] | None = None,
    *,
    finish: bool = False,
) -> float:
    """Seconds one run of `plan` takes when its chains are launched on the streams of `machine`.

    Streams compute side by side and do not slow each other down. `operator_seconds` are those of the kernels;
    `on_device` says which chains are launched, by default all; the others run on their worker, which waits for the
    events of their parents first. With `finish`, a worker waits for each chain that it has launched, as DAGNet does.
    """
    launched = [True] * len(plan.chains) if on_device is None else on_device
    most = max(1, len(plan.chains))  # workers and streams beyond that would never be used
    workers = [_LaunchingWorker(machine, most) for _ in range(min(machine.workers, most))]
    parents: list[list[int]] = [[] for _ in plan.chains]
    counts = list(plan.parent_counts)
    ready = list(plan.frontier)
    heapify(ready)
    free = list(range(len(workers)))  # a heap, for the same choice every time
    busy: list[tuple[float, int, int]] = []  # (when done, chain, worker)
    events: dict[int, _SimulatedEvent] = {}
    now = 0.0
    while ready or busy:
        while ready and free:
            chain, number = heappop(ready), heappop(free)
            seconds = [operator_seconds[index] for index in plan.chains[chain]]
            worker = workers[number]
            waits = [events[parent] for parent in sorted(parents[chain])]
            if launched[chain]:
                host, events[chain] = worker.launch(now, seconds, waits)
                host = max(host, events[chain].time) if finish else host
            else:
                host = max([now, *(event.time for event in waits)]) + sum(seconds)
                events[chain] = _SimulatedEvent(host, None)
            heappush(busy, (host + machine.chain_seconds, chain, number))
        now, done, number = heappop(busy)
        heappush(free, number)
        for child in plan.children[done]:
            parents[child].append(done)
            counts[child] -= 1
            if counts[child] == 0:
                heappush(ready, child)
    return max([now, *(event.time for event in events.values())])


class _SimulatedStream:
    """A stream: when it has done all that was launched, and the event after that."""

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

    def __init__(self, machine: Machine, most: int) -> None:
        self._launch_seconds = machine.launch_seconds
        self._streams = [_SimulatedStream() for _ in range(min(machine.streams_per_worker, most))]

    def launch(
        self, now: float, seconds: Sequence[float], waits: Sequence[_SimulatedEvent]
    ) -> tuple[float, _SimulatedEvent]:
        """Launch a chain at `now`, behind the events of `waits`. Gives when the worker is done, and the event."""
        stream = self._choose(now, waits)
        stream.time = max([stream.time, *(event.time for event in waits)])
        for kernel in seconds:
            now += self._launch_seconds
            stream.time = max(stream.time, now) + kernel
        stream.tail = _SimulatedEvent(stream.time, stream)
        return now, stream.tail

    def _choose(self, now: float, waits: Sequence[_SimulatedEvent]) -> _SimulatedStream:
        """One of this worker's that ends with a parent, else one that is idle, else the next in turn."""
        chosen = next((stream for event in waits for stream in self._streams if stream.tail is event), None)
        if chosen is None:
            chosen = next((stream for stream in self._streams if stream.time <= now), self._streams[0])
        self._streams.remove(chosen)
        self._streams.append(chosen)
        return chosen


def retimed(plan: Plan, operator_seconds: Sequence[float]) -> Plan:
    """The plan with measured times. Its chains keep their order, as a net's do, which has estimates to go by."""
    seconds = tuple(sum(operator_seconds[index] for index in chain) for chain in plan.chains)
    levels = list(seconds)
    for chain in reversed(range(len(plan.chains))):  # a chain comes after all it waits for
        levels[chain] += max((levels[child] for child in plan.children[chain]), default=0.0)
    return replace(plan, seconds=seconds, levels=tuple(levels))


def lower_bound(plan: Plan, workers: int) -> float:
    """No schedule on `workers` workers is shorter: max(critical path, work / workers)."""
    return max(plan.critical_path, plan.work / workers)


def machine_bound(plan: Plan, machine: Machine) -> float:
    """No schedule on `machine` is shorter: `lower_bound` on what computes there, and the launching of all operators."""
    if not machine.streams:
        return lower_bound(plan, machine.workers)
    streams = machine.streams_per_worker * machine.workers
    launching = machine.launch_seconds * sum(len(chain) for chain in plan.chains) / machine.workers
    return max(lower_bound(plan, streams), launching)
