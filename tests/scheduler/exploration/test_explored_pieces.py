"""Schedules of pieces: what is planted in an operator, or in the tasks of a run, gives other bytes under some of them.

A piece that an operator lacks, or has twice, no schedule can show: all runs of it have the same bytes. The proof and
the detector find those (`tests/scheduler/hazards`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from dagexec import Workspace
from dagexec.core.native import can_run
from dagexec.scheduler.exploration import Exploration, explore_seeds, systematic
from dagexec.scheduler.nets.dag import DAGNet
from dagexec.scheduler.plan.task_graph import TaskGraph
from dagexec.scheduler.run.work import Work
from tests.scheduler.pieced import PIECES, SIZE, Fault, pieced_net, pieced_operator, turned

pytestmark = pytest.mark.skipif(not can_run(), reason="no machine code runs here")

X = np.arange(1, SIZE + 1, dtype=np.float32)
SEEDS = range(60)


def scenario(plant: Callable[[Work], Work] | None = None) -> Callable[[], None]:
    def run() -> None:
        workspace = Workspace()
        workspace.feed_blob("x", X)
        with DAGNet(pieced_net(), workspace, num_workers=2) as net:
            if plant is not None:
                preparation = net.prepared()
                net._work[preparation] = plant(net.work(preparation))
            net.run()
            np.testing.assert_array_equal(workspace.fetch_blob("y"), turned(X))

    return run


def explored(fault: Fault, plant: Callable[[Work], Work] | None = None) -> Exploration[None]:
    with pieced_operator(fault):
        return explore_seeds(scenario(plant), SEEDS)


@pytest.mark.slow
def test_no_schedule_of_pieces_gives_other_bytes() -> None:
    found = explored("")
    assert found.failed is None
    assert found.tried == len(SEEDS)
    with pieced_operator():
        assert systematic(scenario(), preemptions=1, limit=200).failed is None


@pytest.mark.parametrize("fault", ["merged phases", "one scratch"])
def test_pieces_that_are_not_apart_give_other_bytes_under_some_schedule(fault: Fault) -> None:
    found = explored(fault)
    assert found.failed is not None
    assert isinstance(found.failed.failure, AssertionError)


def without_the_wait(work: Work) -> Work:
    """The second phase begins when it likes."""
    first, second = (task for task, count in enumerate(work.graph.pieces) if count == PIECES)
    children = [[child for child in row if task != first] for task, row in enumerate(work.graph.children)]
    counts = [0 if task == second else count for task, count in enumerate(work.graph.parent_counts)]
    return replace(work, graph=TaskGraph(work.graph.pieces, children, counts, work.graph.chains))


def without_a_piece(work: Work) -> Work:
    """The last phase has a piece less."""
    graph, (first, last) = work.graph, work.steps
    tasks = TaskGraph([PIECES, PIECES - 1], graph.children, graph.parent_counts, graph.chains)
    return replace(work, graph=tasks, steps=[first, last[1:]])


def with_a_piece_of_another(work: Work) -> Work:
    """A piece is handed out twice, and its neighbor is not."""
    first, last = work.steps
    return replace(work, steps=[first, [last[0], last[0], *last[2:]]])


@pytest.mark.parametrize("plant", [without_the_wait, without_a_piece, with_a_piece_of_another])
def test_tasks_that_are_not_what_operators_were_prepared_into_give_other_bytes(plant: Callable[[Work], Work]) -> None:
    found = explored("", plant)
    assert found.failed is not None
    assert isinstance(found.failed.failure, AssertionError)
