"""Every state of a pool: threads that submit runs, call or cancel them, and workers that enter, leave, sleep and wake.

The real `Roster`, `Run` and `Machine` say which run a worker enters, which worker is woken and what it takes. What
threads do between is written here after `pool` and `executing`, for runs in Python: a section under the pool's lock is
one event; a wake-up is an event of its own, so it may come late. Pieces take any time.

Faults are: a worker sleeps although there is work for it and no other worker is on the way; a run is told of its end
twice, or while a worker is in it; no event can lead to the end of a run.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import NamedTuple, Protocol, TypeVar, cast

from dagexec.core.operator import nothing_to_do
from dagexec.errors import DagexecError, RunCancelledError, WorkerLostError
from dagexec.platform.records import dataclass
from dagexec.scheduler.exploration.state_search import ModelFault
from dagexec.scheduler.plan.task_graph import TaskGraph
from dagexec.scheduler.run.engine import NativeRun, PoolMemory
from dagexec.scheduler.run.fair_share import Share
from dagexec.scheduler.run.machine import Machine
from dagexec.scheduler.run.roster import Roster
from dagexec.scheduler.run.run import Run
from dagexec.scheduler.run.work import Work
from dagexec.scheduler.run.worker import Worker


@dataclass(frozen=True)
class Job:
    """A run that a thread asks for.

    Attributes:
        graph: its tasks.
        priority: the highest is served first.
        here: the thread that asks for it works for it, too.
        user: whose share of the pool it is charged to; None for nobody's.
        stops: it may be cancelled at any time.
    """

    graph: TaskGraph
    priority: int = 0
    here: bool = False
    user: int | None = None
    stops: bool = False


class Thread(NamedTuple):
    """Where a thread is.

    Attributes:
        at: what it does next.
        run: the number of the run that it is in or asks for; -1 for none.
        task, piece: what it executes.
        wakes: the number of the worker that it wakes before it goes on; -1 for none.
        advance: what its share was charged in advance.
    """

    at: str
    run: int = -1
    task: int = -1
    piece: int = -1
    wakes: int = -1
    advance: float = 0.0


@dataclass
class Pool:
    """All that changes. The first threads are the workers, the others ask for runs."""

    roster: Roster
    runs: list[Run]
    shares: list[Share]
    workers: list[Worker]
    threads: list[Thread]
    woken: list[bool]
    told: list[int]
    closed: bool = False
    failures: int = 0
    deaths: int = 0

    def copy(self) -> Pool:
        """A copy of the state."""
        other = copy.copy(self)
        other.roster = copy.copy(self.roster)
        other.shares = [copy.copy(share) for share in self.shares]
        other.runs = [_twin(run) for run in self.runs]
        runs = dict(zip(map(id, self.runs), other.runs, strict=True))
        for run in other.runs:
            run.machine, run.secondary = _decider(run).copy(), []
            run.share = None if run.share is None else other.shares[self.shares.index(run.share)]
        other.workers = [_twin(worker) for worker in self.workers]
        workers = dict(zip(map(id, self.workers), other.workers, strict=True))
        for worker in other.workers:
            worker.run = None if worker.run is None else runs[id(worker.run)]
        other.roster.workers = [workers[id(worker)] for worker in self.roster.workers]
        other.roster.idle = [workers.get(id(worker), worker) for worker in self.roster.idle]
        other.roster._native = [runs[id(run)] for run in self.roster._native]
        other.roster.memory = _twin(self.roster.memory)
        other.roster.memory._words = self.roster.memory._words.copy()
        other.roster.runs = [(*row[:3], runs[id(row[3])]) for row in self.roster.runs]
        other.threads, other.woken, other.told = self.threads[:], self.woken[:], self.told[:]
        return other


Slotted = TypeVar("Slotted", Run, Worker, PoolMemory)


def _twin(original: Slotted) -> Slotted:
    other = object.__new__(type(original))
    for name in original.__slots__:
        setattr(other, name, getattr(original, name))
    return other


class Decider(Protocol):
    """Decides what is taken in a run."""

    def copy(self) -> Machine | NativeRun:
        """A copy of the state."""

    def state(self) -> Hashable:
        """Everything that its future depends on."""


class PoolState:
    """A state of a pool; equal states differ only in which worker is which."""

    __slots__ = ("_hash", "_key", "pool")

    def __init__(self, pool: Pool, workers: int) -> None:
        """The first threads of `pool` are its `workers`."""
        self.pool: Pool | None = pool
        self._key = _key(pool, workers)
        self._hash = hash(self._key)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PoolState) and self._key == other._key


def _key(pool: Pool, workers: int) -> Hashable:
    roster = pool.roster
    idle = [worker.number for worker in roster.idle]
    wakes = [thread.wakes for thread in pool.threads]
    alike = [
        (
            thread._replace(wakes=-1),
            woken,
            idle.index(number) if number in idle else -1,
            wakes.count(number),
            pool.workers[number].has_thread,
        )
        for number, (thread, woken) in enumerate(zip(pool.threads[:workers], pool.woken, strict=False))
    ]
    order = sorted(range(workers), key=lambda number: (alike[number], wakes[number]))
    names = {number: name for name, number in enumerate(order)}
    threads = [pool.threads[number] for number in order] + pool.threads[workers:]
    return (
        tuple((thread.at, thread.run, thread.task, thread.piece, thread.advance) for thread in threads),
        tuple(names.get(thread.wakes, -1) for thread in threads),
        tuple((pool.woken[number], pool.workers[number].has_thread) for number in order),
        tuple(names[number] for number in idle),
        tuple(map(_run_key, pool.runs)),
        tuple(row[2] for row in roster.runs),
        tuple((share._finish, share._start, share._usual) for share in pool.shares),
        tuple(roster.memory._words.tolist()),
        (roster.inside, roster.virtual_time, len(roster.workers), pool.closed, pool.failures, pool.deaths),
        tuple(pool.told),
    )


def _run_key(run: Run) -> Hashable:
    flags = run.stopped, run.interrupted, run.over, run.listed
    return run.active, run.order, run.start_tag, run.advance, flags, _decider(run).state()


Event = Callable[[Pool, int], None]

_MORTAL = ("look", "asleep", "awake", "enter", "piece")
"""Where workers may die. One that dies in the call that tells an owner may have it told twice."""


class PoolStates:
    """The states of a pool whose threads want some runs.

    Attributes:
        on_the_way: where threads are that will soon look for work, and wake others if there is more.
    """

    on_the_way: tuple[str, ...] = (
        "look", "awake", "enter", "tell", "charge", "uncount", "wake all", "lose the run", "be replaced"
    )  # fmt: skip

    def __init__(
        self,
        jobs: Sequence[Job],
        workers: int,
        *,
        failures: int = 0,
        deaths: int = 0,
        shuts: bool = False,
        at_once: bool = True,
        roster: Callable[[int], Roster] = Roster,
    ) -> None:
        """Up to `failures` pieces fail and `deaths` workers die, and the pool is closed at any time if it `shuts`.

        Workers have threads `at_once`, or only when they are first woken.
        """
        self._jobs = jobs
        self._workers = workers
        self._failures, self._deaths = failures, deaths
        self._shuts = shuts
        self._at_once = at_once
        self._roster = roster

    def begin(self) -> Iterator[PoolState]:
        """No thread has begun, and workers are about to look for work, or have no threads yet."""
        users = sorted({job.user for job in self._jobs if job.user is not None})
        shares = [Share(f"user {user}") for user in users]
        runs = []
        for number, job in enumerate(self._jobs):
            run = Run(f"run {number}", Work(job.graph, ()), lambda *_: "it", nothing_to_do, job.priority)
            run.machine = self._new_run(job.graph)
            run.share = None if job.user is None else shares[users.index(job.user)]
            run.order = -1
            runs.append(run)
        roster = self._roster(self._workers)
        workers = [Worker(f"worker {number}", number) for number in range(self._workers)]
        workers += [Worker(f"caller of {run.name}") for run in runs]
        roster.workers += workers[: self._workers]
        threads = [Thread("look" if self._at_once else "asleep")] * self._workers
        for worker in roster.workers:
            worker.has_thread = self._at_once
            if not self._at_once:
                roster.sleep(worker)
        threads += [Thread("call" if job.here else "submit", number) for number, job in enumerate(self._jobs)]
        woken, tellings = [False] * self._workers, [0] * len(runs)
        pool = Pool(roster, runs, shares, workers, threads, woken, tellings, False, self._failures, self._deaths)
        yield PoolState(pool, self._workers)

    def _new_run(self, graph: TaskGraph) -> Machine | NativeRun:
        return Machine(graph)

    def steps(self, state: PoolState) -> Iterator[tuple[str, PoolState]]:
        """What any thread may do next. Raises ModelFault for a fault."""
        pool = state.pool
        assert pool is not None, "each state is looked at once"
        for label, event, number in self._events(pool):
            state.pool = None  # searches keep their states
            after = pool.copy()
            try:
                event(after, number)
            except _WrongError as error:
                raise ModelFault(str(error), label) from None
            yield label, PoolState(after, self._workers)

    def _events(self, pool: Pool) -> Iterator[tuple[str, Event, int]]:
        for number, thread in enumerate(pool.threads):
            name = pool.workers[number].name
            run = f" run {thread.run}" if thread.run >= 0 else ""
            if thread.wakes >= 0:
                yield f"{name} wakes worker {thread.wakes}", self._wake, number
            elif thread.at == "piece":
                what = f"piece {thread.piece} of task {thread.task} of{run}"
                yield f"{name} ends {what}", self._end, number
                if pool.failures and not pool.runs[thread.run].stopped:
                    yield f"{name} fails in {what}", self._fail, number
            elif thread.at == "asleep":
                if pool.woken[number]:
                    yield f"{name} wakes up", self._wake_up, number
            elif thread.at == "wait":
                if pool.told[thread.run]:
                    yield f"{name} goes on", self._done, number
            elif thread.at not in ("gone", "done", "refused"):
                yield f"{name}: {thread.at}{run}", getattr(self, f"_{thread.at.replace(' ', '_')}"), number
            if pool.deaths and pool.workers[number].has_thread and thread.at in _MORTAL:
                yield f"{name} dies", self._die, number
        for number, job in enumerate(self._jobs):
            run_ = pool.runs[number]
            if job.stops and not run_.stopped and not run_.over:
                yield f"run {number} is cancelled", self._cancel, number
        if self._shuts and not pool.closed:
            yield "the pool is closed", self._shut, 0

    # What `WorkerPool` and `Executing` do, a method for each section under the lock.

    def _look(self, pool: Pool, number: int) -> None:
        roster, worker = pool.roster, pool.workers[number]
        run = roster.next_run()
        if run is None:
            if pool.closed:
                roster.workers.remove(worker)
                pool.threads[number] = Thread("gone")
            elif roster.sleep(worker):
                pool.threads[number] = Thread("asleep")
            else:
                roster.woke(worker)
            return
        self._check_first(pool, run)
        advance = roster.begin(worker, run)
        self._go(pool, number, Thread("enter", pool.runs.index(run), advance=advance), roster.helper())

    def _check_first(self, pool: Pool, run: Run) -> None:
        """Raises a fault unless `run` is the next of all that could be entered."""
        first = min((other for other in pool.runs if _is_waiting(pool, other)), key=_turn, default=run)
        if _turn(first) != _turn(run):
            raise _WrongError(f"{run.name} is entered, but {first.name} is next")

    def _wake(self, pool: Pool, number: int) -> None:
        thread = pool.threads[number]
        pool.woken[thread.wakes] = True
        pool.threads[number] = thread._replace(wakes=-1)

    def _wake_up(self, pool: Pool, number: int) -> None:
        pool.woken[number], pool.workers[number].has_thread = False, True
        pool.threads[number] = Thread("awake")

    def _awake(self, pool: Pool, number: int) -> None:
        pool.roster.woke(pool.workers[number])
        pool.threads[number] = Thread("look")

    def _enter(self, pool: Pool, number: int) -> None:
        run = pool.runs[pool.threads[number].run]
        self._go_on(pool, number, None if run.stopped else _machine(run).take())

    def _end(self, pool: Pool, number: int) -> None:
        thread = pool.threads[number]
        run, roster = pool.runs[thread.run], pool.roster
        _machine(run).end(thread.task, thread.piece)
        if run.interrupted and (run.stopped or roster.gives_way(run)):
            self._go_on(pool, number, None)
            return
        self._go_on(pool, number, _machine(run).take(thread.task))
        if pool.threads[number].at == "piece" and number < self._workers:  # a caller has no other run to turn to
            for other in pool.runs:
                if other.priority > run.priority and _is_waiting(pool, other):
                    raise _WrongError(f"{run.name} is gone on with, but {other.name} has a higher priority")

    def _go_on(self, pool: Pool, number: int, piece: tuple[int, int] | None) -> None:
        """With the `piece` that was taken, or out of the run."""
        thread, worker, roster = pool.threads[number], pool.workers[number], pool.roster
        run = pool.runs[thread.run]
        if piece is not None:
            helper = None
            if (roster.idle or not run.listed) and run.machine.available:
                helper = roster.helper_for(run)
            self._go(pool, number, thread._replace(at="piece", task=piece[0], piece=piece[1]), helper)
            return
        roster.leave(worker, run)
        if not run.listed and run.has_place():
            roster.list_run(run)
        ends = not run.over and run.has_ended()
        run.over = run.over or ends
        pool.threads[number] = thread._replace(at="tell" if ends else self._after(number, run), task=-1, piece=-1)

    def _after(self, number: int, run: Run) -> str:
        """What a thread does after it has left `run`."""
        if number >= self._workers:
            return "uncount"
        return "look" if run.share is None else "charge"

    def _tell(self, pool: Pool, number: int) -> None:
        thread = pool.threads[number]
        self._finish(pool, thread.run)
        pool.threads[number] = thread._replace(at=self._after(number, pool.runs[thread.run]))

    def _finish(self, pool: Pool, number: int) -> None:
        pool.told[number] += 1
        if pool.told[number] > 1:
            raise _WrongError(f"the owner of run {number} is told of its end twice")
        if any(thread.at == "piece" and thread.run == number for thread in pool.threads):
            raise _WrongError(f"the owner of run {number} is told of its end while a piece of it is under way")

    def _charge(self, pool: Pool, number: int) -> None:
        thread = pool.threads[number]
        share = pool.runs[thread.run].share
        assert share is not None
        share.charge(1.0, thread.advance)
        pool.threads[number] = Thread("look")

    def _submit(self, pool: Pool, number: int) -> None:
        thread = pool.threads[number]
        if pool.closed:
            pool.threads[number] = thread._replace(at="refused")
            return
        pool.roster.submit(pool.runs[thread.run])
        self._go(pool, number, thread._replace(at="wait"), pool.roster.take_idle())

    def _call(self, pool: Pool, number: int) -> None:
        thread, worker, roster = pool.threads[number], pool.workers[number], pool.roster
        run = pool.runs[thread.run]
        if pool.closed or run.over:
            pool.threads[number] = thread._replace(at="wait" if run.over else "refused")
            return
        roster.admit(run)
        run.start_tag, run.has_caller = roster.virtual_time, True
        roster.workers.append(worker)
        roster.enter(worker, run)
        pool.threads[number] = thread._replace(at="enter")

    def _uncount(self, pool: Pool, number: int) -> None:
        pool.roster.workers.remove(pool.workers[number])
        self._go(pool, number, pool.threads[number]._replace(at="wait"), pool.roster.helper())

    def _go(self, pool: Pool, number: int, thread: Thread, helper: Worker | None) -> None:
        """To the next action, once a helper was woken; a dead worker wakes nobody."""
        pool.threads[number] = thread._replace(wakes=helper.number if helper in pool.workers else -1)

    def _done(self, pool: Pool, number: int) -> None:
        pool.threads[number] = pool.threads[number]._replace(at="done")

    def _fail(self, pool: Pool, number: int) -> None:
        pool.failures -= 1
        pool.runs[pool.threads[number].run].stop(DagexecError("an operator failed"))

    def _cancel(self, pool: Pool, number: int) -> None:
        run = pool.runs[number]
        over = run.over = run.active == 0
        run.stop(RunCancelledError("it was cancelled"))
        if over:
            if run.share is not None:
                run.share.give_back(run.advance)
            self._finish(pool, number)

    def _shut(self, pool: Pool, _number: int) -> None:
        pool.closed = True
        _wake_all(pool)

    def _die(self, pool: Pool, number: int) -> None:
        pool.deaths -= 1
        pool.roster.workers.remove(pool.workers[number])
        pool.threads[number] = Thread("wake all", pool.threads[number].run)

    def _wake_all(self, pool: Pool, number: int) -> None:
        """Wake all workers: the one that died may have picked a sleeping worker and not woken it."""
        _wake_all(pool)
        pool.threads[number] = pool.threads[number]._replace(at="lose the run")

    def _lose_the_run(self, pool: Pool, number: int) -> None:
        worker = pool.workers[number]
        run = worker.run
        pool.threads[number] = pool.threads[number]._replace(at="be replaced")
        if run is None:
            return
        pool.roster.leave(worker, run)
        run.stop(WorkerLostError("a worker died"))
        if not run.active and not run.over:
            run.over = True
            self._finish(pool, pool.runs.index(run))

    def _be_replaced(self, pool: Pool, number: int) -> None:
        pool.roster.died(pool.workers[number])
        pool.workers[number] = Worker(f"worker {number}", number)
        pool.workers[number].has_thread = True
        pool.roster.workers.append(pool.workers[number])
        pool.threads[number] = Thread("look")

    def fault(self, state: PoolState) -> str | None:
        """A worker sleeps that should not, or the roster's counts are wrong."""
        pool = state.pool
        if pool is None:
            return None
        roster, threads = pool.roster, pool.threads
        inside = [worker.run for worker in pool.workers if worker.run is not None]
        if roster.inside != len(inside):
            return f"{len(inside)} threads are in runs, but the roster counts {roster.inside}"
        for number, run in enumerate(pool.runs):
            count = sum(entered is run for entered in inside)
            if run.active != count:
                return f"run {number} counts {run.active} threads in it, and {count} are"
        asleep = [number for number, thread in enumerate(threads) if thread.at == "asleep"]
        expected = {worker.number for worker in roster.idle} | {thread.wakes for thread in threads}
        lost = [number for number in asleep if number not in expected and not pool.woken[number]]
        if lost and not any(thread.at == "wake all" for thread in threads):
            return f"worker {lost[0]} sleeps, and nobody knows"
        if any(thread.at in self.on_the_way or thread.wakes >= 0 for thread in threads):
            return None
        if not asleep or any(pool.woken[number] for number in asleep):
            return None
        waiting = next((run for run in pool.runs if _is_waiting(pool, run)), None)
        return None if waiting is None else f"{waiting.name} waits, worker {asleep[0]} sleeps, and nobody wakes it"

    def is_end(self, state: PoolState) -> bool:
        """All owners are told, no thread is in a run, and all living workers sleep, each listed once."""
        pool = state.pool
        assert pool is not None
        roster, workers = pool.roster, pool.threads[: self._workers]
        idle = sum(worker.at == "asleep" for worker in workers)
        return (
            all(thread.at in ("done", "refused") for thread in pool.threads[self._workers :])
            and all(worker.at == ("gone" if pool.closed else "asleep") for worker in workers)
            and len(roster.idle) == len(set(map(id, roster.idle))) == idle
            and len(roster.workers) == idle
            and not any(run.has_place() for run in pool.runs if run.order >= 0)
            and not any(run.machine.remaining for run in pool.runs if run.order >= 0 and not run.stopped)
        )

    def canonical(self, state: PoolState) -> PoolState:
        """The state itself: equal states differ only in the names of workers."""
        return state


def _wake_all(pool: Pool) -> None:
    for worker in pool.roster.wake_all(closed=pool.closed):
        if worker.is_of_pool:
            pool.woken[worker.number] = True
    if pool.closed:  # those without threads are no more
        for number, woken in enumerate(pool.woken):
            if pool.threads[number].at == "asleep" and not (woken or pool.workers[number].has_thread):
                pool.threads[number] = Thread("gone")


def _is_waiting(pool: Pool, run: Run) -> bool:
    """True where a worker that is outside all runs may enter `run`."""
    return run.order >= 0 and run.has_place() and (not run.active or pool.roster.inside < pool.roster.num_workers)


def _decider(run: Run) -> Decider:
    return cast(Decider, run.machine)


def _machine(run: Run) -> Machine:
    assert isinstance(run.machine, Machine)
    return run.machine


def _turn(run: Run) -> tuple[int, bool, float, int]:
    return -run.priority, run.active > 0, run.start_tag, run.order


class _WrongError(Exception):
    """A fault: what happened must not."""
