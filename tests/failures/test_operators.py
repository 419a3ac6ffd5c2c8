"""Operators that raise, refuse shapes, get no memory or are late: the documented exception, nothing else disturbed.

`docs/failures.md` is the table of these. Every test has a run in flight beside the failing one, which must end with the
right bytes, runs the executor again afterwards, and counts threads, streams, device bytes and replicas before and
after. Interleavings are forced with gates inside operators; nothing sleeps.
"""

from __future__ import annotations

import threading

import numpy as np
import pytest

import dagexec
from dagexec.core.model import InputInfo, Model
from dagexec.errors import OperatorError, ResourceError, RunTimeoutError, ShapeError
from dagexec.scheduler.run.run import Run
from tests.failures.acting import (
    BOTH,
    LEFT,
    PATIENCE,
    PLAIN,
    Acts,
    Gate,
    Place,
    beside,
    feed,
    raising,
    release_when_cancelled,
    serves,
    two_branches,
)
from tests.memory_limits import leave


@pytest.mark.slow
@pytest.mark.parametrize("kind", [ValueError, SystemExit, MemoryError])
def test_an_operator_that_raises_fails_its_run_within_the_chain(
    place: Place, acts: Acts, kind: type[BaseException]
) -> None:
    with place.compile() as executor:
        with beside(executor, acts):
            error = kind("on purpose")
            acts.does[1] = raising(error)
            with pytest.raises(
                OperatorError, match=rf"Acting 'left' \(operator \d\).*{kind.__name__}: on purpose"
            ) as caught:
                executor.run(feed(LEFT), timeout=PATIENCE)
            assert caught.value.__cause__ is error
            assert acts.behind[LEFT] == 0
        serves(executor, acts)
        assert executor.statistics().failed == 1


def test_the_first_error_is_kept_and_the_others_are_attached(acts: Acts) -> None:
    place = Place("cpu", "dag")
    first, second = threading.Semaphore(0), threading.Semaphore(0)

    def fail_first() -> None:
        assert first.acquire(timeout=PATIENCE)  # the other operator is inside
        second.release()
        raise ValueError("the first")

    def fail_second() -> None:
        first.release()
        assert second.acquire(timeout=PATIENCE)
        stopped.wait_inside()
        raise KeyError("the second")

    stopped = Gate()
    stop = Run.stop

    def stop_and_tell(run: Run, error: BaseException) -> None:
        stop(run, error)
        stopped.inside.release()

    with place.compile(replicas=1) as executor, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "stop", stop_and_tell)
        acts.does.update({1: fail_first, 2: fail_second})
        with pytest.raises(OperatorError, match="the first") as caught:
            executor.run(feed(BOTH), timeout=PATIENCE)
        assert len(caught.value.__notes__) == 1
        assert "secondary error: Acting 'right'" in caught.value.__notes__[0]
        assert "the second" in caught.value.__notes__[0]
        acts.does.clear()
        serves(executor, acts)


def test_memory_that_does_not_suffice_for_a_shape_is_an_error_before_anything_runs(
    host: Place, acts: Acts, monkeypatch: pytest.MonkeyPatch
) -> None:
    with host.compile() as executor:
        with beside(executor, acts):
            leave(monkeypatch, 100_000)
            with pytest.raises(ResourceError, match=r"needs [\d,]+ bytes; this machine has 100,000"):
                executor.run(feed(rows=5_000), timeout=PATIENCE)
            monkeypatch.undo()
        serves(executor, acts)


def test_an_operator_that_no_memory_is_left_for_fails_its_run_only(place: Place, acts: Acts) -> None:
    with place.compile() as executor:
        with beside(executor, acts):
            acts.does[1] = raising(MemoryError("no memory"))
            with pytest.raises(OperatorError, match="MemoryError: no memory"):
                executor.run(feed(LEFT), timeout=PATIENCE)
        serves(executor, acts)


def test_a_shape_that_an_operator_refuses_fails_its_run_only(place: Place, acts: Acts) -> None:
    model = two_branches()
    loose = Model("branches", model.net, parameters=model.parameters, inputs={"x": InputInfo()}, outputs=("y",))
    with (
        dagexec.compile(
            loose, optimize=False, device=place.device, net_type=place.net_type, num_workers=2, replicas=2
        ) as executor,
    ):
        with beside(executor, acts), pytest.raises(ShapeError, match=r"Add 'left1' .*do not broadcast"):
            executor.run({"x": np.full((2, 4), PLAIN, np.float32)}, timeout=PATIENCE)
        serves(executor, acts)


def test_a_run_past_its_timeout_ends_when_its_operator_does(place: Place, acts: Acts) -> None:
    hung = Gate()
    with place.compile(num_workers=3) as executor:
        with beside(executor, acts):
            acts.does[1] = hung
            released = release_when_cancelled(executor, hung)
            with pytest.raises(RunTimeoutError, match=r"not done within 0\.01 seconds"):
                executor.run(feed(LEFT), timeout=0.01)
            assert len(released) == 1
            assert acts.behind[LEFT] <= place.finishes_what_is_launched
        serves(executor, acts)
