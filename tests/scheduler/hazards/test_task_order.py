"""Which tasks must have ended when one begins: of a net whose conflicts are counted by hand, held against its runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

import dagexec
from dagexec import NetDef, OperatorDef
from dagexec.analysis.state_space import search_runs, task_names
from dagexec.scheduler.exploration.run_states import RunStates
from dagexec.scheduler.exploration.state_search import search
from dagexec.scheduler.hazards.task_order import tasks_before
from dagexec.scheduler.nets.net import BaseNet
from dagexec.scheduler.plan.task_graph import TaskGraph
from tests.ops.control.test_bodies import FLOATS, counting


@pytest.fixture
def net() -> Iterator[BaseNet]:
    """Two branches that read one blob, their sum, and a write to that blob, which is to come after both."""
    definition = NetDef(name="branches", external_input=["data"])
    for kind, inputs, output in (
        ("Relu", ["data"], "x"), ("Sigmoid", ["x"], "left"), ("Tanh", ["x"], "right"),
        ("Add", ["left", "right"], "sum"), ("Relu", ["data"], "x"),
    ):  # fmt: skip
        definition.op.append(OperatorDef(type=kind, name=f"{kind} {output}", input=inputs, output=[output]))
    workspace = dagexec.Workspace()
    workspace.feed_blob("data", np.zeros((4, 4), np.float32))
    with workspace.create_net(definition, net_type="dag", num_workers=2) as made:
        made.prepared()
        yield made


def without(graph: TaskGraph, parent: int, child: int) -> TaskGraph:
    """`graph` where `child` no longer waits for `parent`."""
    children = [
        [task for task in row if (number, task) != (parent, child)] for number, row in enumerate(graph.children)
    ]
    counts = [count - (task == child) for task, count in enumerate(graph.parent_counts)]
    return replace(graph, children=children, parent_counts=counts)


def test_tasks_that_touch_one_blob_must_end_one_before_the_other(net: BaseNet) -> None:
    x, left, right, total, x_again = range(5)
    assert [set(row) for row in tasks_before(net)] == [set(), {x}, {x}, {left, right}, {x, left, right}]
    assert tasks_before(net)[x_again][left] == "WAR on blob 'x'"
    assert tasks_before(net)[total][left] == "RAW on blob 'left'"


def test_every_dependency_that_is_taken_away_is_missed_in_some_state(net: BaseNet) -> None:
    graph, names, before = net.tasks().work.graph, task_names(net), tasks_before(net)
    edges = [(parent, child) for parent, row in enumerate(graph.children) for child in row]
    assert len(edges) == 6
    for parent, child in edges:
        found = search(RunStates(without(graph, parent, child), 2, names, before))
        assert found.fault == f"{names[child]} begins before {names[parent]} ended: {before[child][parent]}"
        assert found.path[-1].endswith(f"takes {names[child]}")


def test_all_states_of_runs_of_a_net_are_in_order_and_its_operators_are_named(net: BaseNet) -> None:
    (space,) = search_runs(net, 2)
    assert space.found.holds
    assert (space.net, space.tasks, space.pieces, space.ordered) == ("branches", 5, 5, 7)
    assert space.stops > space.found.states
    assert task_names(net)[1] == "task 1 (Sigmoid 'Sigmoid left')"


def test_a_search_whose_time_is_up_says_so_and_proves_nothing(net: BaseNet) -> None:
    (space,) = search_runs(net, 2, seconds=0)
    assert not space.found.holds
    assert space.found.fault is None
    assert space.found.waiting == 1


def test_runs_of_nets_inside_of_operators_are_looked_at_as_well() -> None:
    workspace = dagexec.Workspace()
    for name, value in FLOATS.items():
        workspace.feed_blob(name, value)
    with workspace.build_net(counting(), "dag", 2) as net:
        net.run()
        assert [(space.net, space.found.holds) for space in search_runs(net, 2)] == [("outer", True), ("count", True)]
