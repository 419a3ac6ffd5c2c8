"""The checker allows what the machine allows, and says of anything else what would have been right."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from dagexec.scheduler.conformance import Event, Kind, RunStory, check
from dagexec.scheduler.conformance.story import NOTHING
from dagexec.scheduler.run.machine import Machine
from tests.scheduler.run.test_machine import random_tasks, tasks_of

ENTER, LEAVE, TAKE, STEP, END = Kind.ENTER, Kind.LEAVE, Kind.TAKE, Kind.STEP, Kind.END
STOPPING, STOPPED, TELL, TOLD = Kind.STOPPING, Kind.STOPPED, Kind.TELL, Kind.TOLD


def story_of(*events: Event, pieces: list[int] | None = None, width: int = 2) -> RunStory:
    """Two tasks, one after the other, of one step a piece."""
    graph = tasks_of([[], [0]], pieces or [1, 1])
    return RunStory("small", graph, width, events, lambda _task, _piece: 1, lambda task: f"operator {task}")


def does(worker: str, task: int, piece: int = 0, *, last: int = -1) -> list[Event]:
    """A worker takes a piece, makes its step, and ends it."""
    return [
        Event(TAKE, worker, task, piece, last),
        Event(STEP, worker, task, piece, step=0),
        Event(STEP, worker, task, piece, step=1),
        Event(END, worker, task, piece),
    ]


def left(worker: str) -> list[Event]:
    return [Event(LEAVE, worker), Event(TELL, worker), Event(TOLD, worker)]


A, B = Event(ENTER, "A"), Event(ENTER, "B")
RIGHT = [A, *does("A", 0), *does("A", 1, last=0), Event(TAKE, "A", NOTHING, last=1), *left("A")]


def test_what_the_machine_allows_is_no_deviation() -> None:
    assert check(story_of(*RIGHT)) is None


@pytest.mark.parametrize("seed", range(5))
def test_whatever_threads_do_one_after_another_as_the_machine_says_is_allowed(seed: int) -> None:
    source = random.Random(seed)
    graph = random_tasks(source)
    machine, workers = Machine(graph), ["A", "B", "C"]
    events = [Event(ENTER, worker) for worker in workers]
    has: dict[str, tuple[int, int]] = {}
    last = dict.fromkeys(workers, -1)
    while machine.remaining:
        worker = source.choice(workers)
        if worker in has:
            task, piece = has.pop(worker)
            events += [Event(STEP, worker, task, piece, step=number) for number in (0, 1)]
            events.append(Event(END, worker, task, piece))
            machine.end(task, piece)
            last[worker] = task
        else:
            side = source.random() < 0.5
            found = machine.take(last[worker], from_last=side)
            events.append(Event(TAKE, worker, *(found or (NOTHING, -1)), last[worker], side))
            if found is not None:
                has[worker] = found
    events += [*(Event(LEAVE, worker) for worker in workers), Event(TELL, "A"), Event(TOLD, "A")]
    story = replace(story_of(*events), graph=graph, width=3)
    assert check(story) is None


@pytest.mark.parametrize(
    ("events", "done", "right"),
    [
        ([A, *does("A", 1)], "takes task 1 (operator 1)", "task 1 waits for 0 (operator 0)"),
        ([A, B, *does("A", 0), *does("B", 0)], "B takes task 0", "A has taken that piece before"),
        ([A, *does("A", 0), Event(TAKE, "A", NOTHING)], "finds nothing to take", "there is task 1 (operator 1)"),
        ([A, *does("A", 0), Event(END, "A", 0, 0)], "ends task 0", "A has ended it before"),
        ([A, B, *does("A", 0)[:3], Event(END, "B", 0, 0)], "B ends task 0", "it is A that has it"),
        ([A, Event(END, "A", 1, 0)], "ends task 1", "nobody has taken it"),
        ([A, Event(TAKE, "A", 0, 0), Event(STEP, "A", 1, 0)], "step 0 of task 1", "was given is another: task 0"),
        ([A, *does("A", 0)[:2], Event(STEP, "A", 0, 0, step=0)], "step 0 of task 0", "step 1 of that piece is next"),
        ([A, *does("A", 0)[:3], *does("A", 1)], "takes task 1", "it is to end task 0 (operator 0) first"),
        ([B, Event(TAKE, "A", 0, 0)], "A takes task 0", "it is not inside"),
        ([A, B, Event(ENTER, "C")], "C enters", "no more than 2 may be inside"),
        ([*RIGHT, B], "B enters", "the run is over"),
        ([*RIGHT, Event(TELL, "A")], "A tells", "A has told the owner"),
        ([*RIGHT[:-1], Event(TELL, "B")], "B tells", "A has told the owner"),
        ([A, *does("A", 0), *left("A")], "A tells", "1 tasks have not ended, and nobody has stopped the run"),
        (RIGHT[:-2], "the owner was never told", "the owner of the run is told at its end"),
        ([*RIGHT[:-3], *RIGHT[-2:]], "A never left", "whoever enters leaves"),
        ([A, Event(TAKE, "A", 0, 0), *left("A")], "A leaves", "it has task 0 (operator 0), which nobody else can end"),
        ([A, Event(TAKE, "A", 0, 0), Event(END, "A", 0, 0), *does("A", 1), *left("A")], "A ends task 0", "came to 0"),
        ([A, Event(STOPPED, "C"), *does("A", 0)], "A takes task 0", "the run is stopped"),
        ([A, replace(does("A", 0)[0], locked=False)], "A takes task 0", "the lock of the run, which nobody holds"),
    ],
)
def test_what_it_does_not_allow_is_told_with_both_stories(events: list[Event], done: str, right: str) -> None:
    found = check(story_of(*events))
    assert found is not None
    assert done in found.done
    assert right in found.right
    assert "net 'small'" in str(found)


def test_a_run_that_is_stopped_may_end_with_pieces_that_were_begun_or_never_were() -> None:
    begun = [A, Event(TAKE, "A", 0, 0), Event(STEP, "A", 0, 0), Event(STOPPED, "B")]
    assert check(story_of(*begun, Event(END, "A", 0, 0), Event(TAKE, "A", NOTHING), *left("A"))) is None
    assert check(story_of(*begun, Event(STEP, "A", 0, 0, step=1), Event(END, "A", 0, 0), *left("A"))) is None


def test_one_step_at_most_is_begun_after_the_stop() -> None:
    begun = [A, Event(TAKE, "A", 0, 0), Event(STOPPED, "B"), *does("A", 0)[1:]]
    found = check(story_of(*begun))
    assert found is not None
    assert "one step was begun since" in found.right


def test_between_the_beginning_and_the_end_of_a_stop_a_worker_may_take_something() -> None:
    stopping = [A, Event(STOPPING, "B"), *does("A", 0), Event(STOPPED, "B")]
    assert check(story_of(*stopping, *left("A"))) is None
    found = check(story_of(*stopping, *does("A", 1)))
    assert found is not None
    assert "the run is stopped" in found.right


def test_an_owner_is_told_again_by_who_died_as_it_told_it() -> None:
    assert check(story_of(*RIGHT[:-1], *RIGHT[-2:])) is None


@pytest.mark.parametrize(
    ("events", "right"),
    [
        ([], "somebody goes in: 1 tasks have something to take"),
        (RIGHT[:-2], "the owner is told"),
        ([A, Event(STOPPED, "B"), Event(LEAVE, "A")], "the owner is told"),
        ([A, Event(TAKE, "A", 0, 0), Event(LEAVE, "A")], "which nobody else can end"),
        ([A, Event(TAKE, "A", 0, 0)], ""),
        (RIGHT[:-1], ""),
    ],
)
def test_where_nothing_happens_any_more_somebody_inside_waits_for_something_else(
    events: list[Event], right: str
) -> None:
    story = replace(story_of(*events), whole=False)
    assert check(story) is None
    found = check(replace(story, at_rest=True))
    assert (found is None) == (not right)
    assert found is None or right in found.right


def test_a_run_under_way_is_checked_as_far_as_it_is() -> None:
    assert check(replace(story_of(*RIGHT[:3]), whole=False)) is None
