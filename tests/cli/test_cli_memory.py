"""`dagexec inspect --memory`: the plan of each net type beside its bound and what it saves."""

from __future__ import annotations

import itertools
import json

import pytest

from dagexec import NetDef
from dagexec.cli.memory import memory_rows
from dagexec.core.model import InputInfo, Model
from dagexec.errors import FeedError
from tests.command_line import Cli
from tests.ops.running import operator_def


@pytest.mark.slow
def test_inspect_shows_the_memory_of_each_net_type(cli: Cli) -> None:
    status, out, _ = cli("inspect", "zoo:lenet", "--memory", "--json")
    assert status == 0
    found = json.loads(out)["memory"]
    assert set(found) == {"simple", "dag", "async_dag"}
    for row in found.values():
        assert 0 < row["lower_bound"] <= row["peak_bytes"] < row["unshared_bytes"]
        assert row["working_bytes"] <= row["peak_bytes"]
    status, out, _ = cli("inspect", "zoo:lenet", "--memory")
    assert status == 0
    assert f"{found['simple']['peak_bytes']:,}" in out
    assert "without sharing" in out


def test_inspect_without_the_option_plans_nothing(cli: Cli) -> None:
    status, out, _ = cli("inspect", "zoo:lenet", "--json")
    assert status == 0
    assert "memory" not in json.loads(out)


def test_the_shape_of_an_input_must_be_known() -> None:
    net = NetDef(name="n", op=[operator_def("Relu", ["x"], ["y"])])
    model = Model("m", net, inputs={"x": InputInfo()}, outputs=("y",))
    with pytest.raises(FeedError, match="x"):
        memory_rows(model, {})


def test_branches_that_may_run_side_by_side_take_memory_side_by_side() -> None:
    chains = [["x", "p1", "p2", "p3"], ["t", "q1", "q2", "q3"]]
    operators = [operator_def("Tanh", ["x"], ["t"])]
    operators += [operator_def("Hardmax", [a], [b]) for chain in chains for a, b in itertools.pairwise(chain)]
    net = NetDef(name="n", op=operators, external_input=["x"])
    model = Model("m", net, inputs={"x": InputInfo(shape=(1, 1024))}, outputs=("p3", "q3"))
    bounds = {row.net_type: row.lower_bound for row in memory_rows(model, {})}
    assert bounds == {"simple": 3 * 4096, "dag": 4 * 4096, "async_dag": 4 * 4096}
