"""The story of a failing schedule names operators, blobs, threads and what is missing."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from dagexec import testing
from dagexec.analysis.story import Story, explain
from dagexec.scheduler.exploration import ReplayStrategy, explore, explore_seeds
from dagexec.scheduler.nets.async_dag import AsyncDAGNet
from dagexec.scheduler.plan.plan import Plan
from dagexec.scheduler.plan.synchronization import Synchronization
from dagexec.scheduler.run.executing import NotedExecuting
from dagexec.scheduler.run.machine import Machine
from dagexec.scheduler.run.pool import WorkerPool
from dagexec.scheduler.run.run import Run
from tests.planted.bug import planted
from tests.planted.catalog import BUGS
from tests.scheduler.exploration.test_exploration import locks_in_two_orders, lost_update
from tests.scheduler.exploration.test_exploration_device import CROSS, device_scenario
from tests.scheduler.exploration.test_exploration_pool import EarlyPool, SleepyPool, TwoStepPool
from tests.scheduler.scenarios import DIAMOND, pool_scenario


def story_of(scenario: Callable[[], object], seconds: float = 4.0) -> Story:
    """That of the first seed that fails."""
    failed = explore_seeds(scenario, range(2000)).failed
    assert failed is not None
    return explain(scenario, failed, seconds=seconds)


class WithoutOneWait(AsyncDAGNet):
    """Planted: the last chain does not wait for the event of the chain before the one before it."""

    def synchronization(self, plan: Plan) -> Synchronization:
        """Without that."""
        right = super().synchronization(plan)
        waits = [tuple(parent for parent in row if (child, parent) != (4, 2)) for child, row in enumerate(right.waits)]
        return replace(right, waits=tuple(waits))


@pytest.mark.slow
def test_a_missing_wait_is_told_with_its_operators_blob_streams_and_chains() -> None:
    story = story_of(device_scenario(CROSS, net_class=WithoutOneWait), seconds=6)
    (finding,) = story.findings
    assert finding.kind == "order"
    assert finding.text.startswith("Sum 'b3' (operator 4) on sim:0 stream ")
    assert "read blob 'b1'" in finding.text
    assert "before Tanh 'b1' (operator 2) on sim:0 stream " in finding.text
    assert finding.text.endswith("chain 4 must wait for the event of chain 2")
    read, written = finding.steps
    assert read < written
    assert story.steps[read].operators == "Sum 'b3' (operator 4)"
    assert story.steps[written].operators == "Tanh 'b1' (operator 2)"
    assert story.moment is not None
    assert story.moment.possible_until <= read  # once the value was read it is too late


@pytest.mark.slow
def test_a_child_that_is_released_too_early_is_told_with_its_parent_and_both_workers() -> None:
    story = story_of(pool_scenario(DIAMOND, 2, EarlyPool))
    (finding,) = story.findings
    begun, done = finding.steps
    workers = [story.steps[step].event.thread for step in finding.steps]
    assert set(workers) == {"dagexec-0", "dagexec-1"}
    assert f"{workers[0]} began operator 3 (step {begun}) before operator " in finding.text
    assert f"which it waits for, was done by {workers[1]} (step {done})" in finding.text


@pytest.mark.slow
def test_a_task_that_is_lost_is_named_with_those_who_should_have_handed_it_out() -> None:
    story = story_of(pool_scenario(DIAMOND, 2, TwoStepPool))
    (finding,) = story.findings
    assert finding.kind == "lost"
    assert finding.text.startswith("operator 3 was never executed; of those it waits for, operator 1 was done by ")
    assert "operator 2 was done by" in finding.text


class Twice(NotedExecuting):
    """Planted: task 2 is executed twice."""

    def _in_python(self, run: Run, machine: Machine, from_last: bool) -> None:
        self._acquire()
        while (found := machine.take()) is not None:
            task, piece = found
            self._lock.release()
            for _ in range(1 + (task == 2)):
                self._call(run, task, run.work.steps[task][piece])
            self._acquire()
            machine.end(task, piece)


class TwicePool(WorkerPool):
    """One whose workers do."""

    def _begin(self) -> None:
        super()._begin()
        self._executing = Twice(self.lock, self._roster, concurrent=False)


def test_a_task_that_is_done_twice_is_named_with_who_did_it() -> None:
    story = story_of(pool_scenario(DIAMOND, 1, TwicePool))
    (finding,) = story.findings
    assert finding.kind == "twice"
    assert finding.text.startswith("operator 2 was executed by dagexec-0 (step ")
    assert len(finding.steps) == 2
    assert story.moment is not None
    assert "It fails however it goes on" in list(story.lines())[-1]


def test_locks_in_a_circle_are_told_with_who_holds_which_since_when() -> None:
    story = story_of(locks_in_two_orders)
    (finding,) = story.findings
    assert finding.kind == "deadlock"
    assert finding.text.startswith("a circle: f waits for lock 2 (test_exploration.py:")
    assert "g waits for lock 1" in finding.text
    for step, thread, lock in zip(finding.steps, "gf", (2, 1), strict=True):
        assert f"which {thread} holds since step {step}" in finding.text
        event = story.steps[step].event
        assert (event.thread, event.kind) == (thread, "acquire")
        assert event.resource.startswith(f"lock {lock} ")


def test_a_wake_up_that_never_comes_is_told_with_who_gives_it_elsewhere() -> None:
    story = story_of(pool_scenario([[]], 2, SleepyPool))
    main, worker = (finding.text for finding in story.findings if finding.kind == "deadlock")
    assert main.startswith("main waits for lock 1 (scenarios.py:")
    assert "where the schedule does not fail, dagexec-" in main
    assert "lets it go on at scenarios.py:" in main
    assert "but here it waits itself after step " in main
    name = main.split("does not fail, ")[1].split()[0]
    assert worker.startswith(f"{name} waits for lock ")  # the other worker may sleep as well as not
    assert worker.endswith("and nobody lets it go on")
    last = int(worker.split("after step ")[1].split(",")[0])
    assert last == max(number for number, step in enumerate(story.steps) if step.event.thread == name)


def test_work_that_nobody_begins_is_told_in_a_deadlock() -> None:
    (bug,) = (one for one in BUGS if one.name == "a count in two steps")
    with planted(bug):
        story = story_of(bug.scene)
    lost, *waits = story.findings
    assert lost.text.startswith("operator 3 was never begun; of those it waits for, operator 1 was done by ")
    assert {one.kind for one in waits} == {"deadlock"}


@pytest.mark.slow
def test_what_a_stream_executes_after_the_end_of_its_run_is_told() -> None:
    (bug,) = (one for one in BUGS if one.name == "a run that ends before its streams")
    with planted(bug):
        story = story_of(bug.scene)
    assert all("after the run was told to be over" in finding.text for finding in story.findings)
    executed, told = story.findings[0].steps
    assert told < executed
    assert story.steps[executed].operators in story.findings[0].text


@pytest.mark.slow
def test_arrows_lead_from_a_release_start_or_end_to_what_it_lets_go_on() -> None:
    story = story_of(pool_scenario(DIAMOND, 2, EarlyPool))
    found: Any = json.loads(json.dumps(story.as_json()))
    assert found["text"] == list(story.lines())
    assert len(found["steps"]) == len(story.schedule.trace)
    seen = set()
    for giver, taker in found["arrows"]:
        one, other = story.steps[giver].event, story.steps[taker].event
        assert giver < taker
        assert one.thread != other.thread
        if other.kind == "acquire":
            assert (one.kind, one.resource) == ("release", other.resource)
        elif other.kind == "begin":
            assert (one.kind, one.resource) == ("start", other.thread)
        else:
            assert (other.kind, other.resource) == ("join", one.thread)
        seen.add(other.kind)
    assert seen >= {"acquire", "begin"}
    preempted = [step for step in found["steps"] if step[4]]
    assert len(preempted) == found["preemptions"] == story.preemptions


def test_a_race_in_code_without_nets_is_told_by_its_preemption() -> None:
    lines = list(story_of(lost_update).lines())
    assert lines[0].startswith("AssertionError: an update is lost: 1")
    assert lines[-3].startswith("1 preemption in ")
    assert "although adder" in lines[-2]
    assert "could go on (acquire lock 1 (test_exploration.py:" in lines[-2]
    assert "it could only fail, by trial: all of 12 ways" in lines[-1]


def test_what_testing_raises_tells_the_story() -> None:
    def two_updates() -> None:
        lock, number = threading.Lock(), [0]

        def add() -> None:
            with lock:
                seen = number[0]
            with lock:
                number[0] = seen + 1

        adders = [threading.Thread(target=add, name=f"adder {index}") for index in range(2)]
        for adder in adders:
            adder.start()
        for adder in adders:
            adder.join()
        assert number[0] == 2

    with pytest.raises(AssertionError) as caught:
        testing.explore(two_updates)
    story = caught.value.__notes__[0]
    assert story.startswith("1 preemption in ")
    assert "although adder" in story
    assert "it could only fail, by trial" in story


def test_what_does_not_repeat_itself_is_told_with_the_cause() -> None:
    runs = itertools.count()

    def scenario() -> None:
        assert next(runs), "only the first time"

    story = explain(scenario, explore(scenario))
    assert list(story.lines())[1].startswith("It does not repeat itself: two runs under the same decisions part")


def test_there_is_no_story_without_a_failure() -> None:
    with pytest.raises(ValueError, match="did not fail"):
        explain(lost_update, explore(lost_update, ReplayStrategy(())))
