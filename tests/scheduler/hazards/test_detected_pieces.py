"""The detector sees what is wrong with the pieces of operators in any run, whatever the schedule was."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from dagexec import Workspace
from dagexec.core.native import can_run
from dagexec.errors import HazardError
from dagexec.scheduler.exploration import explore
from dagexec.scheduler.hazards import Detector, detecting
from dagexec.scheduler.nets.dag import DAGNet
from dagexec.scheduler.observe.observed_run import Pieces
from dagexec.scheduler.plan.task_graph import TaskGraph
from dagexec.scheduler.run.work import Work
from tests.scheduler.pieced import FAULTS, PIECES, SIZE, Fault, pieced_net, pieced_operator

pytestmark = pytest.mark.skipif(not can_run(), reason="no machine code runs here")

X = np.arange(SIZE, dtype=np.float32)
LABEL = "TurnedParts 'y' (operator 0) of net 'pieced'"


def races_of(plant: Callable[[Work], Work] | None = None, *, workers: int = 1, runs: int = 1) -> list[str]:
    workspace, detector = Workspace(), Detector()
    workspace.feed_blob("x", X)
    with DAGNet(pieced_net(), workspace, num_workers=workers) as net:
        if plant is not None:
            host_work = net._host_work
            net._host_work = lambda preparation, observed: plant(host_work(preparation, observed))  # type: ignore[method-assign]
        for _ in range(runs):
            net.run(trace=detector)
    return list(map(str, detector.races))


@pytest.mark.parametrize("fault", ["", *FAULTS])
def test_pieces_of_an_operator_that_are_not_apart_are_found_with_one_worker(fault: Fault) -> None:
    with pieced_operator(fault):
        races = races_of(runs=2)
    assert bool(races) == bool(fault)
    assert len(set(races)) == len(races), "each is told of once"


def test_a_detector_changes_no_bytes_and_raises_what_it_found() -> None:
    workspace = Workspace()
    workspace.feed_blob("x", X)
    with (
        pieced_operator("one scratch"),
        DAGNet(pieced_net(2), workspace, num_workers=2) as net,
        pytest.raises(HazardError, match="both write the same bytes"),
        detecting() as detector,
    ):
        net.run(trace=detector)
    with pieced_operator(), DAGNet(pieced_net(2), workspace, num_workers=2) as net, detecting() as detector:
        net.run(trace=detector)
        np.testing.assert_array_equal(workspace.fetch_blob("y"), X)


def two_phases(work: Work) -> tuple[int, int]:
    first, second = (task for task, count in enumerate(work.graph.pieces) if count == PIECES)
    return first, second


def without_the_wait(work: Work) -> Work:
    """The second phase waits for the start of the operator alone."""
    graph, (first, second) = work.graph, two_phases(work)
    children = [list(row) for row in graph.children]
    children[first] = children[second]
    children[first - 1] = [first, second]
    counts = [count + (task in children[second]) for task, count in enumerate(graph.parent_counts)]
    return replace(work, graph=TaskGraph(graph.pieces, children, counts, graph.chains))


def with_steps(work: Work, steps: Sequence[Pieces]) -> Work:
    graph = work.graph
    tasks = TaskGraph(list(map(len, steps)), graph.children, graph.parent_counts, graph.chains)
    return replace(work, steps=steps, graph=tasks)


def without_a_piece(work: Work) -> Work:
    _, second = two_phases(work)
    steps = [pieces[:-1] if task == second else pieces for task, pieces in enumerate(work.steps)]
    graph = work.graph
    return replace(
        work, steps=steps, graph=TaskGraph(list(map(len, steps)), graph.children, graph.parent_counts, graph.chains)
    )


def with_a_piece_twice(work: Work) -> Work:
    first, _ = two_phases(work)
    steps = [[*pieces, pieces[0]] if task == first else pieces for task, pieces in enumerate(work.steps)]
    graph = work.graph
    return replace(
        work, steps=steps, graph=TaskGraph(list(map(len, steps)), graph.children, graph.parent_counts, graph.chains)
    )


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    ("plant", "found"),
    [
        (without_the_wait, f"CONTROL: {LABEL}, phase 1: does not wait for phase 0"),
        (without_a_piece, f"CONTROL: {LABEL}, phase 1, piece {PIECES - 1}: was not executed"),
        (with_a_piece_twice, f"CONTROL: {LABEL}, phase 0, piece 0: was executed 2 times"),
    ],
)
def test_what_is_wrong_with_the_tasks_of_a_run_is_found(
    plant: Callable[[Work], Work], found: str, workers: int
) -> None:
    with pieced_operator():
        assert races_of(plant, workers=workers) == [found]


def test_the_detector_watches_pieces_in_controlled_schedules() -> None:
    with pieced_operator():
        schedules = [explore(lambda: races_of(workers=2), seed) for seed in range(10)]
        assert [one.failure for one in schedules] == [None] * 10
        assert [one.result for one in schedules] == [[]] * 10
    with pieced_operator("merged phases"):
        assert explore(lambda: races_of(workers=2), 0).result
