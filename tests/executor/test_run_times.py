"""What requests wait and their runs take is added up, whichever way a run takes."""

from __future__ import annotations

from typing import Any

import anyio
import numpy as np
import pytest

import dagexec
from dagexec.errors import OperatorError
from dagexec.scheduler.observe.run_times import RunTimes
from tests.executor.decoders import decoder
from tests.held import doubled_model, held_operators, rows


@pytest.mark.parametrize(
    ("options", "timeout"),
    [({}, None), ({}, 10.0), ({"net_type": "simple"}, None), ({"max_batch": 4, "max_wait": 0.0}, None)],
    ids=["inline", "on workers", "simple", "joined"],
)
@pytest.mark.parametrize("of_task", [False, True])
def test_each_request_is_counted_once(options: dict[str, Any], timeout: float | None, of_task: bool) -> None:
    times = RunTimes()
    with dagexec.compile(doubled_model(), run_times=times, **options) as executor:
        executor.warm_up()
        assert times.totals.rows == 0
        for _ in range(5):
            if of_task:
                anyio.run(lambda: executor.run_async({"x": rows(1.0)}, timeout=timeout))
            else:
                executor.run({"x": rows(1.0)}, timeout=timeout)
        with pytest.raises(dagexec.errors.DagexecError):
            executor.run({"x": np.zeros((2, 4), np.float32)})
        totals = times.totals
    size = 2 if "max_batch" in options else 1
    assert totals.rows == 5 * size
    assert totals.requests.count == 5
    assert {rows: run.count for rows, run in totals.runs.items()} == {size: 5}
    assert totals.runs[size] == totals.requests
    assert min(totals.requests.fed, totals.requests.ran, totals.requests.fetched) > 0
    assert totals.waited >= 0


def test_a_run_that_fails_is_not() -> None:
    times = RunTimes()
    with held_operators() as held, dagexec.compile(doubled_model("Held"), run_times=times) as executor:
        held.failing.add(3.0)
        held.go_on.release(2)
        with pytest.raises(OperatorError):
            executor.run({"x": rows(3.0)})
        executor.run({"x": rows(1.0)})
    assert times.totals.requests.count == 1


def test_steps_of_sessions_are() -> None:
    times = RunTimes()
    with dagexec.compile(decoder(), run_times=times, num_workers=1) as executor, executor.session() as session:
        for _ in range(3):
            session.run({"ids": np.array([[1]])})
    assert times.totals.requests.count == 3
