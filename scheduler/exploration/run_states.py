"""Every state of a run: whatever piece ends first, whichever worker comes when, and wherever the run is stopped.

The events are what a pool does under its lock: a piece ends and its worker takes what the machine gives it, or a worker
from elsewhere comes and takes. The machine is the real one. Beside it an account is kept of the pieces that it handed
out, by which states are compared. Each piece that the machine gives is checked against the machine's documentation, and
against accesses that must be in order.

A run that is stopped (cancelled, too late, or failed in an operator) hands out nothing, so only the pieces under way
are left to end. That is checked within each state; as states of their own they would be 2 to the number of pieces under
way for each of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress

from dagexec.scheduler.exploration.state_search import ModelFault
from dagexec.scheduler.plan.task_graph import TaskGraph
from dagexec.scheduler.run.machine import Machine
from dagexec.scheduler.run.policy_machine import machine_of

Place = tuple[int, int, int]
"""Where a worker is: 1 if it takes pieces from the last one on, its task, and the piece; -1 and -1 outside the run."""

Begun = tuple[tuple[int, int], ...]
"""Tasks that have begun and not ended, ascending, with a bit for each piece that was handed out."""


class RunState:
    """A state of a run; equal states have the same future, whichever workers of one side are where.

    Which worker of a side executes which piece makes no difference, since it makes none to `Machine.end`.

    Attributes:
        ended: a bit for each task that has.
        ready: a bit for each that may begin; follows from the others.
        begun: tasks that have begun and not ended.
        workers: where each one is.
        machine: what decides; None once it was asked what comes next, since searches keep their states.
    """

    __slots__ = ("_hash", "_key", "begun", "ended", "machine", "ready", "workers")

    def __init__(
        self, ended: int, ready: int, begun: Begun, workers: tuple[Place, ...], machine: Machine, own: Hashable
    ) -> None:
        """`own` is what else the future depends on, from the machine's own order."""
        self.ended = ended
        self.ready = ready
        self.begun = begun
        self.workers = workers
        self.machine: Machine | None = machine
        self._key = ended, begun, tuple(sorted([place[:2] for place in workers])), own
        self._hash = hash(self._key)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RunState) and self._key == other._key


class RunStates:
    """The states of runs of one graph of tasks.

    Attributes:
        stops: how often a run was stopped to see what follows, for each reason.
    """

    def __init__(
        self,
        graph: TaskGraph,
        workers: int,
        names: Sequence[str] = (),
        before: Sequence[Mapping[int, str]] = (),
        machine: Callable[[TaskGraph], Machine] | None = None,
    ) -> None:
        """`names` are those of the tasks; `before` says which tasks must have ended when each begins, and why.

        `machine` makes the machine of a run, by default that of the graph for so many workers.
        """
        self._graph = graph
        self._workers = workers
        self._names = names or [f"task {task}" for task in range(len(graph.pieces))]
        self._machine = machine or (lambda graph: machine_of(graph, workers))
        self._in_order = graph.policy is None
        self._full = [(1 << count) - 1 for count in graph.pieces]
        self._children = [tuple(row) for row in graph.children]
        self._parents = [0] * len(self._full)
        for task, row in enumerate(self._children):
            for child in row:
                self._parents[child] |= 1 << task
        self._parent_counts = list(graph.parent_counts)
        self._before = before or [{}] * len(self._full)
        self._conflicts = [sum(1 << task for task in row) for row in self._before]
        self.stops = 0

    def begin(self) -> Iterator[RunState]:
        """Nothing was done. Workers of a pool alternate between the sides of a task; beside a caller they have one."""
        with suppress(Exception):  # errors in it are found later
            self._run_alone(self._machine(self._graph))
        if list(self._graph.parent_counts) != self._parent_counts:
            raise ModelFault("it changed the graph, which other runs have, too", "a run before")
        ready = sum(1 << task for task, parents in enumerate(self._parents) if not parents)
        for from_last in {self._workers // 2, self._workers - 1}:
            workers = tuple((int(number >= self._workers - from_last), -1, -1) for number in range(self._workers))
            machine = self._machine(self._graph)
            yield RunState(0, ready, (), workers, machine, self._own(machine, workers))

    def _run_alone(self, machine: Machine) -> None:
        last = -1
        for _ in range(sum(self._graph.pieces)):
            if (piece := machine.take(last)) is not None:
                last = piece[0]
                machine.end(*piece)

    def steps(self, state: RunState) -> Iterator[tuple[str, RunState]]:
        """A piece ends, or a worker comes. Raises ModelFault for what the machine must not do."""
        machine, state.machine = state.machine, None
        assert machine is not None, "each state is looked at once"
        for number, place in enumerate(state.workers):
            from_last, task, piece = place
            if place in state.workers[:number] or (task < 0 and not machine.available):
                continue
            after = machine.copy()
            event = f"worker {number} comes" if task < 0 else f"worker {number} ends {self._piece(task, piece)}"
            try:
                if task >= 0:
                    after.end(task, piece)
                answer = after.take(task, from_last=from_last == 1)
            except Exception as error:
                raise ModelFault(f"{type(error).__name__}: {error}", event) from error
            if answer is not None:
                event += f" and takes {self._piece(*answer)}"
            try:
                yield event, self._after(state, after, number, answer)
            except _WrongError as error:
                raise ModelFault(str(error), event) from None
        try:
            self._stop(state, machine)
        except _WrongError as error:
            raise ModelFault(str(error), "the run is stopped, and pieces under way end") from None

    def _after(self, state: RunState, machine: Machine, number: int, answer: tuple[int, int] | None) -> RunState:
        """The state when worker `number` has ended its piece, if it has one, and was given `answer`."""
        from_last, task, _ = state.workers[number]
        ended, ready, begun = state.ended, state.ready, dict(state.begun)
        others = state.workers[:number] + state.workers[number + 1 :]
        if task >= 0 and begun[task] == self._full[task] and all(place[1] != task for place in others):
            del begun[task]
            ended |= 1 << task
            for child in self._children[task]:
                if not self._parents[child] & ~ended:
                    ready |= 1 << child
        if machine.remaining != len(self._full) - ended.bit_count():
            raise _WrongError(f"{len(self._full) - ended.bit_count()} tasks are left, but it says {machine.remaining}")
        first = self._first(ready, begun, task, from_last)
        if answer is None:
            if first is not None and self._in_order:
                raise _WrongError(f"it gives nothing, but {self._piece(*first)} is left")
            if task < 0 and machine.available:
                raise _WrongError("it gives nothing, but says that there is something")
        else:
            self._check(answer, ended, ready, begun)
            if self._in_order and answer != first:
                raise _WrongError(f"{self._piece(*first) if first else 'nothing'} comes before that")
            begun[answer[0]] = begun.get(answer[0], 0) | 1 << answer[1]
            ready &= ~(1 << answer[0])
        there = ready.bit_count() + sum(pieces != self._full[task] for task, pieces in begun.items())
        if self._in_order and machine.available != there:
            raise _WrongError(f"{there} tasks have a piece to take, but it says {machine.available}")
        place = (from_last, -1, -1) if answer is None else (from_last, *answer)
        workers = (*state.workers[:number], place, *state.workers[number + 1 :])
        return RunState(ended, ready, tuple(sorted(begun.items())), workers, machine, self._own(machine, workers))

    def _first(self, ready: int, begun: Mapping[int, int], last: int, from_last: int) -> tuple[int, int] | None:
        """The piece that a worker is to take after a piece of `last`, where no policy decides."""
        if last in begun and begun[last] != self._full[last]:
            task = last
        elif ready:
            task = (ready & -ready).bit_length() - 1
        else:
            task = min((task for task, pieces in begun.items() if pieces != self._full[task]), default=-1)
        if task < 0:
            return None
        left = self._full[task] & ~begun.get(task, 0)
        return task, (left if from_last else left & -left).bit_length() - 1

    def _check(self, answer: tuple[int, int], ended: int, ready: int, begun: Mapping[int, int]) -> None:
        """Raises a fault if a worker must not be given this piece."""
        task, piece = answer
        if not self._full[task] >> piece & 1:
            raise _WrongError(f"there is no piece {piece}")
        if ended >> task & 1 or begun.get(task, 0) >> piece & 1:
            raise _WrongError(f"{self._piece(task, piece)} was handed out before")
        if task not in begun and not ready >> task & 1:
            missing = self._parents[task] & ~ended
            raise _WrongError(f"{self._names[task]} begins before {self._named(missing)} ended")
        if task not in begun and self._conflicts[task] & ~ended:
            other = min(other for other in self._before[task] if not ended >> other & 1)
            why = self._before[task][other]
            raise _WrongError(f"{self._names[task]} begins before {self._names[other]} ended: {why}")

    def _stop(self, state: RunState, machine: Machine) -> None:
        """Check what follows if the run is stopped here; `machine` is of no use after that."""
        machine.stop()
        self.stops += 1
        for from_last, task, piece in state.workers:
            if task >= 0:
                self.stops += 1  # as if an operator of this one had failed
                machine.end(task, piece)
            answer = machine.take(task, from_last=from_last == 1)
            if answer is not None or machine.available or not machine.stopped:
                what = "has something to do" if answer is None else f"hands out {self._piece(*answer)}"
                raise _WrongError(f"a stopped run {what}")

    def fault(self, state: RunState) -> str | None:
        """Tasks that will never begin or end."""
        if state.machine is None or state.machine.available or any(task >= 0 for _, task, _ in state.workers):
            return None
        left = ((1 << len(self._full)) - 1) & ~state.ended
        return f"nothing is left to take, but {self._named(left)} has not ended" if left else None

    def is_end(self, state: RunState) -> bool:
        """Whether all tasks have ended and no worker is in the run."""
        return state.ended == (1 << len(self._full)) - 1 and all(task < 0 for _, task, _ in state.workers)

    def canonical(self, state: RunState) -> RunState:
        """The same: symmetric states are equal. For a policy, workers have other numbers than threads."""
        return state

    def _own(self, machine: Machine, workers: tuple[Place, ...]) -> Hashable:
        """What the future may depend on beside the account, which should only be the order of tasks to be joined."""
        return tuple(machine._open) if self._in_order else (machine.state(), tuple(sorted(workers)))

    def _piece(self, task: int, piece: int) -> str:
        count = self._graph.pieces[task]
        return self._names[task] if count == 1 else f"piece {piece} of {count} of {self._names[task]}"

    def _named(self, tasks: int) -> str:
        """The first of `tasks`, a bit for each."""
        return self._names[(tasks & -tasks).bit_length() - 1]


class _WrongError(Exception):
    """The machine did what it must not."""
