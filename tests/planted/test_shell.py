"""What the shell does against its machine is found by conformance, and some of it by schedules alone, too."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest

from dagexec.analysis.story import explain
from dagexec.core.operator import nothing_to_do
from dagexec.errors import ConformanceError
from dagexec.scheduler.exploration import explore_seeds
from dagexec.scheduler.run.pool import WorkerPool
from dagexec.scheduler.run.run import task
from dagexec.stress import runner
from dagexec.testing import conforming
from tests.planted.bug import planted
from tests.planted.catalog import BUGS
from tests.planted.engine_bugs import ENGINE_BUGS, asleep, code_of_now
from tests.planted.shell import SHELL_BUGS, ShellBug
from tests.scheduler.run.test_machine import needs_machine_code
from tests.scheduler.scenarios import held

SEEDS = range(300)


def judged(scene: Callable[[], object]) -> Callable[[], None]:
    """The scene, where only the machine judges it."""

    def run() -> None:
        with suppress(AssertionError):
            scene()

    return held(run)


def told(error: BaseException) -> str:
    """An error and its notes."""
    return "\n".join((str(error), *getattr(error, "__notes__", ())))


@pytest.mark.parametrize("bug", SHELL_BUGS, ids=lambda bug: bug.name)
def test_what_threads_do_in_python_is_found_by_the_machine(bug: ShellBug) -> None:
    with planted(bug):
        found = explore_seeds(judged(bug.scene), SEEDS)
        assert found.failed is not None
        assert found.failed.failure is not None
        assert bug.right in told(found.failed.failure)
        assert "machine:" in told(found.failed.failure)
    explore_seeds(judged(bug.scene), range(found.tried)).raise_failure()


@pytest.mark.slow
@pytest.mark.parametrize("bug", SHELL_BUGS, ids=lambda bug: bug.name)
def test_schedules_alone_show_what_makes_a_run_end_otherwise(bug: ShellBug) -> None:
    with planted(bug):
        assert (explore_seeds(bug.scene, SEEDS).failed is not None) == bug.alone


@needs_machine_code
@pytest.mark.parametrize(
    "bug",
    [
        pytest.param(bug, id=bug.name, marks=[pytest.mark.slow] if "twice" in bug.name or "dropped" in bug.name else [])
        for bug in ENGINE_BUGS
    ],
)
def test_what_threads_do_in_machine_code_is_found_by_the_machine(bug: ShellBug) -> None:
    with planted(bug), code_of_now():
        with pytest.raises((AssertionError, ConformanceError)) as raised, conforming():
            bug.scene()
        assert bug.right in told(raised.value)
        assert isinstance(raised.value, AssertionError) == bug.alone
    with code_of_now(), conforming():
        bug.scene()


@pytest.mark.slow
def test_the_story_of_a_deadlock_has_what_was_done_against_the_machine() -> None:
    bug = next(bug for bug in SHELL_BUGS if bug.name == "who gives way has taken a piece")
    with planted(bug):
        failed = explore_seeds(held(bug.scene), SEEDS).failed
        assert failed is not None
        failure = explain(held(bug.scene), failed, seconds=2).failure
    assert failure.startswith("DeadlockError: ")
    assert bug.right in failure


def test_a_stress_case_that_hangs_is_told_with_what_was_done_against_the_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bug = next(bug for bug in BUGS if bug.name == "a submitted run wakes nobody")

    def hang() -> None:
        with conforming() as found, WorkerPool(1) as pool:
            asleep(pool, 1)
            pool.submit(task("lost", nothing_to_do))
            monkeypatch.setattr(runner, "_held", [found])
            assert "somebody goes in: 1 tasks have something to take" in runner.deviations_where_nothing_happens()

    with planted(bug), pytest.raises(ConformanceError):
        hang()
