"""Random compositions of joined requests: none has other bytes than alone, and one that had would be found."""

from __future__ import annotations

import numpy as np
import pytest

from dagexec.binding.io_binding import Outputs
from dagexec.executor.requests.request import Batch, Request
from dagexec.stress.compositions import Plan, run_compositions
from tests.held import doubled_model

PLAN = Plan(300, threads=3, tasks=12)


def test_no_result_of_any_composition_differs_from_the_lone_runs() -> None:
    found = run_compositions(doubled_model(), PLAN)
    assert not found.problems
    assert sum(found.outcomes.values()) == PLAN.requests
    assert found.outcomes["failed"]
    assert found.retried
    assert max(found.batch_sizes) > 3


def test_rows_that_go_to_the_wrong_caller_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    rows_of = Batch._rows_of

    def reversed_rows(self: Batch, results: Outputs, member: Request, start: int) -> Outputs:
        return rows_of(self, {name: np.flip(array, 0) for name, array in results.items()}, member, start)

    monkeypatch.setattr(Batch, "_rows_of", reversed_rows)
    found = run_compositions(doubled_model(), PLAN)
    assert found.outcomes["differing"]
    assert found.problems[0] == "a result has other bytes than alone"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zoo:lenet", "zoo:lenet_digits"])
def test_many_compositions_of_a_network(name: str) -> None:
    from dagexec import load_model

    found = run_compositions(load_model(name), Plan(5_000, max_batch=16))
    assert not found.problems
