"""Schedules of a pipeline under control: a right one gives the same in all, and a race outside of the net is found."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

import dagexec
from dagexec.analysis.schedules import DifferentResultError, ModelScenario
from dagexec.options import CompileOptions
from dagexec.scheduler.exploration import explore
from tests.pipelines.layers import dense

X = np.random.default_rng(0).standard_normal((2, 4)).astype(np.float32)
TYPE = "float32[N, 4]"
SEEDS = range(20)


def failures(p: dagexec.Pipeline) -> list[BaseException | None]:
    """What comes of a run in each of some schedules."""
    options = CompileOptions(net_type="dag", num_workers=2, replicas=1, optimize=False)
    scenario = ModelScenario(p.as_model(), {"x": X}, options)
    expected = scenario.reference()
    return [explore(partial(scenario.run, expected), seed).failure for seed in SEEDS]


@pytest.mark.slow
def test_a_pipeline_gives_the_same_in_all_schedules() -> None:
    p = dagexec.Pipeline("right")
    first = p.stage("first", dense("a", 4, 4), p.input("x", "float32", ("N", 4)))
    branches = [p.stage("left", dense("b", 4, 4, 1), first), p.python("right", lambda x: x * 2, first, TYPE)]
    p.output("y", p.python("join", lambda a, b: a + b, branches, TYPE))
    assert failures(p) == [None] * len(SEEDS)


def test_a_race_outside_of_the_net_is_found() -> None:
    """Two steps that no edge orders, of which one writes for the other what is in no blob."""
    outside: dict[str, Any] = {}

    def start(x: Any) -> Any:
        outside["scale"] = np.float32(1)
        return x

    def tell(x: Any) -> Any:
        outside["scale"] = np.float32(2)
        return x

    p = dagexec.Pipeline("racy")
    x = p.python("start", start, p.input("x", "float32", ("N", 4)), TYPE)
    p.output("told", p.python("tell", tell, x, TYPE))
    p.output("y", p.python("use", lambda x: x * outside["scale"], x, TYPE))
    found = {type(failure) for failure in failures(p)}
    assert found == {type(None), DifferentResultError}
