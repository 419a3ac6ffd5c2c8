"""An executor whose user did not say how many replicas makes them for requests side by side; bytes are the same."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest

import dagexec
from dagexec.core.model import InputInfo, Model
from dagexec.errors import ClosedError
from dagexec.executor.dispatch import growth
from dagexec.platform.threads import threads
from dagexec.scheduler.exploration import explore_seeds
from tests.executor.test_embedding_exploration import X, pausing
from tests.held import PATIENCE, Held, doubled_model, rows
from tests.nets import net_of, temporary_operator


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, "available_cores", lambda: 2)


def test_a_request_that_would_wait_has_a_replica_made_which_serves_it(held: Held) -> None:
    with dagexec.compile(doubled_model("Held")) as executor, ThreadPoolExecutor(3) as callers:
        calls = [callers.submit(executor.run, {"x": rows(number)}, timeout=PATIENCE) for number in range(3)]
        held.wait_inside(2)  # side by side
        for _ in calls:
            held.go_on.release()
        for call in calls:
            np.testing.assert_array_equal(call.result()["y"], [2, 2, 2])
        statistics = executor.statistics()
        assert statistics.completed == sum(statistics.runs_per_replica) == 3
        assert 2 <= statistics.replicas <= 5


def test_tasks_have_no_more_replicas_than_cores_and_threads_may_have_many_for_short_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with dagexec.compile(doubled_model("Relu")) as executor:
        found = executor._callers._growth
        assert found is not None
        executor.run({"x": rows(1)})
        assert found._most(of_thread=False) == 2
        assert found._most(of_thread=True) == growth.MOST_FOR_SHORT
        monkeypatch.setattr(growth, "SHORT_SECONDS", 0.0)
        assert found._most(of_thread=True) == 2
        made = executor._replicas.make(portions=4)
        kept, shared = executor.net().preparation_statistics(), made.net.preparation_statistics()
        assert shared.budget_bytes == kept.budget_bytes // 4
        made.net.close()


@pytest.mark.parametrize("given", [{"replicas": 1}, {"num_workers": 1}, {"net_type": "simple"}, {"optimize": False}])
def test_who_says_how_the_model_runs_gets_that_alone(held: Held, given: dict[str, Any]) -> None:
    with dagexec.compile(doubled_model("Held"), **given) as executor, ThreadPoolExecutor(2) as callers:
        calls = [callers.submit(executor.run, {"x": rows(number)}, timeout=PATIENCE) for number in range(2)]
        for _ in calls:
            held.wait_inside()
            held.go_on.release()
        for call in calls:
            call.result()
        assert executor._callers._growth is None
        assert executor.statistics().replicas == 1


def test_a_net_that_changes_its_parameters_or_draws_random_numbers_keeps_one_replica() -> None:
    counting = doubled_model("Relu")
    counting.net.op.add(type="Add", input=["scale", "scale"], output=["scale"])
    drawing = doubled_model("Relu")
    drawing.net.op.add(type="GaussianFill", output=["noise"]).arg.add(name="shape", ints=[3])
    drawing.net.op.add(type="Add", input=["y", "noise"], output=["z"])
    noisy = Model("noisy", drawing.net, parameters=drawing.parameters, inputs=drawing.inputs, outputs=("z",))
    for model in (counting, noisy):
        with dagexec.compile(model) as executor:
            assert executor._callers._growth is None


made: list[int] = []


def crowd_that_is_closed(*, calls_first: bool) -> None:
    """Callers for whom replicas are made, and somebody, perhaps one of them, who closes the executor meanwhile."""
    model = Model("pausing", net_of([[], [0]], op_type="Pausing"), inputs={"x": InputInfo()}, outputs=("b1",))
    executor = dagexec.compile(model)
    ends: list[str] = []

    def call() -> None:
        try:
            executor.run({"x": X})
            ends.append("completed")
        except ClosedError:
            ends.append("closed")

    def close() -> None:
        if calls_first:
            call()
        executor.close()

    callers = [threads().start(call, f"caller {number}") for number in range(3)]
    closing = threads().start(close, "closing")
    for thread in (*callers, closing):
        thread.join()
    statistics = executor.statistics()
    assert len(ends) == 3 + calls_first
    assert ends.count("completed") == statistics.completed == sum(statistics.runs_per_replica)
    assert not any(thread.is_alive() for thread in executor._pool._crew.threads)
    assert statistics.running == statistics.queued == 0
    made.append(statistics.replicas)


def test_replicas_are_made_in_any_order_with_callers_and_the_end() -> None:
    made.clear()
    with temporary_operator("Pausing", pausing):
        for calls_first in (False, True):
            explore_seeds(partial(crowd_that_is_closed, calls_first=calls_first), range(15)).raise_failure()
    assert min(made) == 1 < max(made)
