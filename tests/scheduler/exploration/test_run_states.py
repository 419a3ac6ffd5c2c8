"""Every state of runs of small graphs: that the machine does right in all, and that what is wrong with one is found."""

from __future__ import annotations

import random
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from heapq import heappush

import pytest

from dagexec.scheduler.exploration.run_states import RunState, RunStates
from dagexec.scheduler.exploration.state_search import ModelFault, search
from dagexec.scheduler.plan.task_graph import TaskGraph
from dagexec.scheduler.run.machine import Machine
from dagexec.scheduling.heft import Heft
from dagexec.scheduling.lifo import Lifo
from dagexec.scheduling.planned import PlannedPolicy
from dagexec.scheduling.policy import Chains, Policy
from dagexec.scheduling.policy import RunState as PolicyState
from dagexec.scheduling.work_stealing import WorkStealing


def tasks_of(parents: list[list[int]], pieces: list[int] | None = None) -> TaskGraph:
    """Tasks, each after its parents."""
    children = [[task for task, row in enumerate(parents) if parent in row] for parent in range(len(parents))]
    return TaskGraph(pieces or [1] * len(parents), children, list(map(len, parents)), range(len(parents)))


def random_tasks(seed: int, count: int = 7) -> TaskGraph:
    source = random.Random(seed)
    parents = [sorted({source.randrange(task) for _ in range(source.randrange(3))}) if task else []
               for task in range(count)]  # fmt: skip
    return tasks_of(parents, [source.choice([1, 1, 2, 3]) for _ in range(count)])


DIAMOND = tasks_of([[], [0], [0], [1, 2]], [1, 2, 1, 3])
"""Of two branches, one in pieces, that are followed by pieces."""


def test_two_tasks_and_two_workers_have_ten_states() -> None:
    found = search(RunStates(tasks_of([[], []]), 2))
    assert found.holds
    # Nobody has come; either worker is in task 0 (their sides differ); both are in one each, in two ways; either is
    # left in task 1; either is left in task 0; the end.
    assert found.states == 1 + 2 + 2 + 2 + 2 + 1


@pytest.mark.parametrize(
    ("seed", "workers"), [(0, 4), (1, 2), (2, 2), (4, 3), (5, 3), pytest.param(3, 4, marks=pytest.mark.slow)]
)
def test_the_machine_does_right_in_every_state_of_random_graphs(seed: int, workers: int) -> None:
    found = search(RunStates(random_tasks(seed), workers))
    assert found.fault is None, (found.fault, found.path)
    assert found.exhausted


class Recording(RunStates):
    """Keeps what each state's machine says of itself."""

    def canonical(self, state: RunState) -> RunState:
        if state.machine is not None:
            under_way = frozenset(place[1:] for place in state.workers)
            self.seen.setdefault((state.ended, state.begun, under_way), set()).add(state.machine.state())
        return super().canonical(state)

    seen: dict[Hashable, set[Hashable]]


@pytest.mark.parametrize("seed", [0, 4, 5])
def test_the_account_of_what_was_handed_out_tells_the_whole_state_of_the_machine(seed: int) -> None:
    model = Recording(random_tasks(seed, 6), 3)
    model.seen = {}
    assert search(model).holds
    assert all(len(states) == 1 for states in model.seen.values())


class EveryStop(RunStates):
    """Where a run was stopped is a state, too, as is each in which pieces end afterwards."""

    def steps(self, state: RunState) -> Iterator[tuple[str, RunState]]:
        machine = state.machine
        assert machine is not None
        if not machine.stopped:
            stopped = machine.copy()
            stopped.stop()
            yield "stop", RunState(state.ended, 0, state.begun, state.workers, stopped, "stopped")
            yield from super().steps(state)
            return
        for number, (side, task, piece) in enumerate(state.workers):
            if task < 0:
                continue
            after = machine.copy()
            after.end(task, piece)
            if after.copy().take(task) is not None:
                raise ModelFault("a stopped run hands out something")
            ended = state.ended | 1 << task * 4 + piece  # any account of what has ended will do
            workers = (*state.workers[:number], (side, -1, -1), *state.workers[number + 1 :])
            yield "end", RunState(ended, 0, state.begun, workers, after, "stopped")

    def _stop(self, state: RunState, machine: Machine) -> None:
        pass

    def fault(self, state: RunState) -> str | None:
        if state.machine is None or not state.machine.stopped:
            return super().fault(state)
        return "a stopped run has something to do" if state.machine.available else None

    def is_end(self, state: RunState) -> bool:
        return all(task < 0 for _, task, _ in state.workers)


class ReleasesEarly(Machine):
    """Lets a child begin when one of several parents has not ended."""

    def end(self, task: int, piece: int = -1) -> None:
        super().end(task, piece)
        if self._done[task] == self._graph.pieces[task]:
            for child in self._graph.children[task]:
                if self._left[child] == 1:
                    heappush(self._fresh, child)


class EndsWithLastTaken(Machine):
    """Takes a task for ended when its last piece was taken."""

    def end(self, task: int, piece: int = -1) -> None:
        if self._taken[task] == self._graph.pieces[task] and self._done[task] >= 0:
            self._done[task] = self._graph.pieces[task] - 1
            super().end(task, piece)
            self._done[task] = -9


class HandsOutTwice(Machine):
    """Forgets which of the pieces taken were the last ones."""

    def _next_piece(self, task: int, from_last: bool) -> tuple[int, int]:
        found = super()._next_piece(task, from_last)
        self._taken_last[task] = 0
        return found


class LosesTheLastPiece(Machine):
    """Takes a task for taken that has one more piece."""

    def _next_piece(self, task: int, from_last: bool) -> tuple[int, int]:
        found = super()._next_piece(task, from_last)
        if self._taken[task] == self._graph.pieces[task] - 1:
            self._taken[task] += 1
            self._open.remove(task)
        return found


class ForgetsAChild(Machine):
    """Lets only one of the children begin that become ready."""

    def end(self, task: int, piece: int = -1) -> None:
        before = len(self._fresh)
        super().end(task, piece)
        del self._fresh[before + 1 :]


class StopKeepsWhatIsReady(Machine):
    """Forgets those that nobody has begun."""

    def stop(self) -> None:
        self.stopped = True
        self._open.clear()


class StopKeepsWhatIsBegun(Machine):
    """Lets those that are in a task go on with it."""

    def take(self, last: int = -1, *, from_last: bool = False) -> tuple[int, int] | None:
        if self.stopped and last >= 0 and self._taken[last] < self._graph.pieces[last]:
            self._open.append(last)
            return self._next_piece(last, from_last)
        return super().take(last, from_last=from_last)


class ReleasesAfterStop(Machine):
    """Lets children begin although the run was stopped."""

    def end(self, task: int, piece: int = -1) -> None:
        stopped, self.stopped = self.stopped, False
        super().end(task, piece)
        self.stopped = stopped


class CountsOfTheGraph(Machine):
    """Counts down what all runs have in common."""

    def __init__(self, graph: TaskGraph) -> None:
        super().__init__(graph)
        assert isinstance(graph.parent_counts, list)
        self._left = graph.parent_counts


class SaysNothingIsOpen(Machine):
    """Nobody is told of the pieces that are left of a task."""

    @property
    def available(self) -> int:
        return len(self._fresh)


class IsOverEarly(Machine):
    """The run is over when the last task has begun."""

    def take(self, last: int = -1, *, from_last: bool = False) -> tuple[int, int] | None:
        found = super().take(last, from_last=from_last)
        if found is not None and self.remaining == 1:
            self.remaining = 0
        return found


class JoinsTheFirstOfAHeap(Machine):
    """Keeps tasks that others are in as a heap, from which one is removed in the middle: it is none any more then."""

    def take(self, last: int = -1, *, from_last: bool = False) -> tuple[int, int] | None:
        before = set(self._open)
        found = super().take(last, from_last=from_last)
        added = set(self._open) - before
        if added:
            self._open.remove(*added)
            heappush(self._open, *added)
        return found


STOPPING = [StopKeepsWhatIsReady, StopKeepsWhatIsBegun, ReleasesAfterStop]


@pytest.mark.parametrize(
    ("mutant", "fault"),
    [
        (ReleasesEarly, "0 tasks have a piece to take, but it says 1"),
        (EndsWithLastTaken, "2 tasks are left, but it says 1"),
        (HandsOutTwice, "piece 1 of 2 of task 1 was handed out before"),
        (LosesTheLastPiece, "2 tasks have a piece to take, but it says 1"),
        (ForgetsAChild, "2 tasks have a piece to take, but it says 1"),
        (SaysNothingIsOpen, "2 tasks have a piece to take, but it says 1"),
        (CountsOfTheGraph, "it changed the graph"),
        (IsOverEarly, "1 tasks are left, but it says 0"),
        *[(mutant, "a stopped run") for mutant in STOPPING],
    ],
)
def test_a_mutant_of_the_machine_is_found(mutant: type[Machine], fault: str) -> None:
    graph = replace(DIAMOND, parent_counts=list(DIAMOND.parent_counts))
    found = search(RunStates(graph, 2, machine=mutant))
    assert found.fault is not None
    assert fault in found.fault
    assert found.path


def test_a_worker_that_joins_the_wrong_task_is_found_where_three_are_there() -> None:
    # Task 1 is begun after 3, so both and 0 are open: [0, 3, 1]. When 0 has no piece left, 3 comes before 1.
    graph = tasks_of([[], [2], [], []], [2, 3, 1, 3])
    assert search(RunStates(graph, 2, machine=JoinsTheFirstOfAHeap)).holds
    found = search(RunStates(graph, 3, machine=JoinsTheFirstOfAHeap))
    assert found.fault is not None
    assert "of task 1 comes before that" in found.fault
    assert search(RunStates(graph, 3)).holds


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("machine", [Machine, *STOPPING])
def test_a_look_at_what_follows_a_stop_says_what_states_of_stopped_runs_say(machine: type[Machine], seed: int) -> None:
    graph = random_tasks(seed, 5)
    short, full = search(RunStates(graph, 3, machine=machine)), search(EveryStop(graph, 3, machine=machine))
    assert short.holds == full.holds == (machine is Machine)
    assert short.states < full.states or not full.holds


def test_a_conflict_that_no_dependency_orders_is_told_in_the_names_of_tasks() -> None:
    before = [{}, {}, {}, {1: "both write blob 'x'", 2: "it reads 'y'"}]
    graph = tasks_of([[], [0], [0], [2]])
    found = search(RunStates(graph, 2, ["conv1", "conv2", "conv3", "sum"], before))
    assert found.fault == "sum begins before conv2 ended: both write blob 'x'"
    assert found.path[-1].endswith("ends conv3 and takes sum")
    assert search(RunStates(DIAMOND, 2, before=before)).holds


def planned(graph: TaskGraph, policy: Policy) -> TaskGraph:
    names = [f"chain {chain}" for chain in graph.chains]
    chains = Chains("it", names, graph.children, [1.0] * len(names), 2)
    return replace(graph, policy=PlannedPolicy(policy, chains))


class WaitsForWorkerZero(Policy):
    """Lets worker 1 do nothing, and 0 only what that could have done."""

    def choose(self, ready: Sequence[int], worker: int, state: PolicyState) -> int | None:
        return None if worker or len(state.running) else ready[0]


class NeverBeginsTheLast(Policy):
    """Waits for ever."""

    def choose(self, ready: Sequence[int], worker: int, state: PolicyState) -> int | None:
        return next((chain for chain in ready if chain != 3), None)


class ForgetsWhatIsRunning(Policy):
    """Begins a chain anew."""

    def choose(self, ready: Sequence[int], worker: int, state: PolicyState) -> int | None:
        return min([*ready, *state.running])


@pytest.mark.parametrize("policy", [Heft(), WorkStealing(), WaitsForWorkerZero()], ids=lambda policy: policy.name)
@pytest.mark.parametrize("seed", range(3))
def test_a_policy_that_decides_in_runs_does_right_in_every_state(policy: Policy, seed: int) -> None:
    graph = random_tasks(seed, 6)
    found = search(RunStates(planned(replace(graph, pieces=[1] * 6), policy), 2))
    assert found.fault is None, (found.fault, found.path)
    assert found.exhausted


def test_which_worker_did_what_is_forgotten_where_all_paths_meet() -> None:
    def diamonds(count: int) -> TaskGraph:
        parents: list[list[int]] = [[]]
        for _ in range(count):
            last = len(parents) - 1
            parents += [[last], [last], [last + 1, last + 2]]
        return planned(tasks_of(parents), Lifo())

    two, three, four = (search(RunStates(diamonds(count), 2)).states for count in (2, 3, 4))
    assert four - three == three - two


@pytest.mark.parametrize(
    ("policy", "fault"),
    [(NeverBeginsTheLast(), "lets all workers wait for nothing"), (ForgetsWhatIsRunning(), "hands it out twice")],
)
def test_a_policy_that_does_wrong_in_some_state_is_found_with_the_events_that_lead_there(
    policy: Policy, fault: str
) -> None:
    found = search(RunStates(planned(DIAMOND, policy), 2))
    assert found.fault is not None
    assert fault in found.fault
    assert found.path
