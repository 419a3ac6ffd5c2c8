"""Joined requests where something goes wrong around them: Ctrl-C, workers that end, forks; and other kinds of nets."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import onnx
import onnx.parser
import pytest

import dagexec
from dagexec.binding.io_binding import Outputs
from dagexec.executor.requests.request import Batch
from dagexec.platform.threads import installed
from tests.executor.test_batching import StoppedClock
from tests.forked import in_child
from tests.held import PATIENCE, doubled_model, rows
from tests.interrupts import InterruptedAtPoints


@contextmanager
def pairs(**options: object) -> Iterator[dagexec.Executor]:
    """An executor that joins two rows, however long that takes."""
    options = {"optimize": False, "num_workers": 1, **options}
    with (
        installed(StoppedClock()),
        dagexec.compile(doubled_model(), max_batch=2, max_wait=1000, **options) as executor,  # type: ignore[arg-type]
    ):
        yield executor


def wait_until_queued(executor: dagexec.Executor, asked: Future[Outputs]) -> None:
    while not (executor.statistics().queued or asked.done()):
        pass


@pytest.mark.slow
def test_ctrl_c_between_admission_and_the_run_of_a_batch_leaves_the_other_member_alone() -> None:
    with pairs() as executor, ThreadPoolExecutor(1) as callers:

        def run() -> None:
            other = callers.submit(executor.run, {"x": rows(1, 1)})
            wait_until_queued(executor, other)
            try:
                interrupted.look(lambda: executor.run({"x": rows(2, 1)}))
            finally:
                while not other.done():
                    if executor.statistics().queued:  # it waits for another
                        executor.run({"x": rows(3, 1)})
                np.testing.assert_array_equal(other.result(PATIENCE)["y"], rows(2, 1))
                while executor.statistics().running:
                    pass
                assert len(executor._dispatcher.state.idle) == 1, f"point {interrupted.point}"
                assert executor.statistics().queued == 0

        interrupted = InterruptedAtPoints("dagexec/")
        interrupted(run)


def two(executor: dagexec.Executor) -> list[Outputs]:
    """The results of two requests that come side by side."""
    with ThreadPoolExecutor(2) as callers:
        return list(callers.map(executor.run, [{"x": rows(value, 1)} for value in (1, 2)], timeout=PATIENCE))


def test_when_a_worker_ends_in_a_joined_run_its_members_run_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(_batch: Batch) -> Outputs:
        raise SystemExit("ended")

    with pairs() as executor:
        monkeypatch.setattr(Batch, "fetch", ended)
        for value, found in zip((2, 4), two(executor), strict=True):
            np.testing.assert_array_equal(found["y"], rows(value, 1))
        statistics = executor.statistics()
        assert (statistics.retried, statistics.completed, statistics.failed) == (2, 2, 0)
        assert statistics.batch_sizes == {1: 2, 2: 1}


def test_a_worker_that_dies_before_it_told_the_members_is_replaced_and_they_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pairs() as executor:
        notify = executor._dispatcher.notify
        dying = [True]

        def die_once(request: object) -> None:
            if dying.pop() if dying else False:
                raise SystemExit
            notify(request)  # type: ignore[arg-type]

        monkeypatch.setattr(executor._dispatcher, "notify", die_once)
        assert [found["y"][0, 0] for found in two(executor)] == [2, 4]
        assert executor.statistics().pool.replaced == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_forked_child_does_not_wait_for_the_company_that_the_parent_waits_for() -> None:
    def in_the_child() -> dict[int, int]:
        executor.reopen()
        two(executor)
        found = executor.statistics()
        executor.close()
        return dict(found.batch_sizes)

    with pairs() as executor, ThreadPoolExecutor(2) as callers:
        waiting = callers.submit(executor.run, {"x": rows(1, 1)})
        wait_until_queued(executor, waiting)
        assert in_child(in_the_child) == {2: 1}
        callers.submit(executor.run, {"x": rows(1, 1)}).result(PATIENCE)
        np.testing.assert_array_equal(waiting.result(PATIENCE)["y"], rows(2, 1))


@pytest.mark.parametrize("net_type", ["simple", "async_dag"])
def test_rows_are_put_together_and_cut_on_a_device_as_well(net_type: str) -> None:
    with pairs(device="sim:0", net_type=net_type) as executor:
        for _ in range(2):
            for value, found in zip((2, 4), two(executor), strict=True):
                np.testing.assert_array_equal(found["y"], rows(value, 1))
        assert executor.statistics().batch_sizes == {2: 2}


@pytest.mark.slow
def test_runs_that_override_a_parameter_are_not_joined_and_others_are() -> None:
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17]>
        scaled (float[N, 3] x) => (float[N, 3] y) <float[3] scale = {2.0, 2.0, 2.0}> { y = Mul(x, scale) }
    """)
    loaded = dagexec.load_model(model, overridable=["scale"])
    options = {"max_batch": 2, "max_wait": 1000.0, "num_workers": 1}
    with installed(StoppedClock()), dagexec.compile(loaded, **options) as executor:  # type: ignore[arg-type]
        other = executor.run({"x": rows(1, 1), "scale": np.full(3, 5, np.float32)})  # which waits for nobody
        np.testing.assert_array_equal(other["y"], rows(5, 1))
        assert [found["y"][0, 0] for found in two(executor)] == [2, 4]
        assert executor.statistics().batch_sizes == {2: 1}
