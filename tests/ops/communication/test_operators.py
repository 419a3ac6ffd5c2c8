"""Operators of ranks: their results in nets, their order, and their errors."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from dagexec import NetDef, Workspace
from dagexec.core.graph import build_graph
from dagexec.errors import ArgumentError, CommunicationError, DagexecError, OperatorError
from dagexec.ops.families.communication import CommonWorld, all_reduce
from dagexec.platform.threads import threads
from tests.ops.running import operator_def, run_operator

Array = npt.NDArray[Any]


def on_workspaces(
    size: int, net: NetDef | Sequence[NetDef], feeds: Sequence[dict[str, Array]], name: str
) -> list[Workspace]:
    """Run `net`, whose world is `comm_world`, or one each, on a workspace a rank, each in its own thread."""
    workspaces = [Workspace(allow_io=True) for _ in range(size)]
    errors: list[Exception] = []

    def run(rank: int) -> None:
        workspace = workspaces[rank]
        for blob, array in feeds[rank].items():
            workspace.feed_blob(blob, array)
        create = operator_def(
            "CreateCommonWorld", [], ["comm_world"], size=size, rank=rank, arg={"name": name}, timeout_ms=20e3
        )
        try:
            workspace.run_operator_once(create)
            made = workspace.build_net(net if isinstance(net, NetDef) else net[rank], "dag", 2)
            made.run()
            made.close()
        except Exception as error:
            errors.append(error)
            workspace.get_blob("comm_world").get(CommonWorld).abort("the test")  # type: ignore[type-abstract]

    started = [threads().start(lambda rank=rank: run(rank), f"rank {rank}") for rank in range(size)]
    for thread in started:
        thread.join()
    if errors:
        raise errors[0]
    return workspaces


def test_nets_on_several_ranks_reduce_broadcast_and_gather() -> None:
    net = NetDef(name="collectives")
    net.op.append(operator_def("Allreduce", ["comm_world", "a", "b"], ["a", "b"], average=1))
    net.op.append(operator_def("Allreduce", ["comm_world", "a"], ["a_sum"], algorithm="ring"))
    net.op.append(operator_def("Broadcast", ["comm_world", "c"], ["c"], root=2))
    net.op.append(operator_def("Reduce", ["comm_world", "d"], ["d"], root=1, divisor=2))
    net.op.append(operator_def("Allgather", ["comm_world", "c_own"], ["gathered"]))
    net.op.append(operator_def("Barrier", ["comm_world"], []))
    feeds = [
        {
            "a": np.array([1.0, 2.0]) * (rank + 1),
            "b": np.array([[rank]], np.float32),
            "c": np.array([rank]),
            "c_own": np.array([rank]),
            "d": np.array([2.0**rank]),
        }
        for rank in range(3)
    ]
    workspaces = on_workspaces(3, net, feeds, "several ranks")
    assert workspaces[1].fetch_blob("d").tolist() == [3.5]
    for workspace in workspaces:
        assert workspace.fetch_blob("a").tolist() == [2.0, 4.0]
        assert workspace.fetch_blob("b").tolist() == [[1.0]]
        assert workspace.fetch_blob("a_sum").tolist() == [6.0, 12.0]
        assert workspace.fetch_blob("c").tolist() == [2]
        assert workspace.fetch_blob("gathered").tolist() == [[0], [1], [2]]


def test_operators_of_one_world_keep_the_order_of_the_list() -> None:
    net = NetDef(name="order")
    for index in range(4):
        net.op.append(operator_def("Allreduce", ["comm_world", f"x{index}"], [f"x{index}"]))
    graph = build_graph(net)
    assert [graph.reduced_parents[index] for index in range(4)] == [(), (0,), (1,), (2,)]


def test_the_error_of_a_rank_reaches_the_nets_of_the_others() -> None:
    net = NetDef(name="failing")
    net.op.append(operator_def("Allreduce", ["comm_world", "x"], ["x"]))
    feeds = [{"x": np.ones(2 + rank // 2)} for rank in range(3)]
    with pytest.raises(OperatorError, match="rank 2 sends float64") as caught:
        on_workspaces(3, net, feeds, "failing ranks")
    assert isinstance(caught.value.__cause__, DagexecError)


def test_destroying_the_world_ends_the_wait_of_the_others() -> None:
    workspaces = [Workspace(allow_io=True), Workspace(allow_io=True)]
    for rank, workspace in enumerate(workspaces):
        workspace.run_operator_once(
            operator_def("CreateCommonWorld", [], ["comm_world"], size=2, rank=rank, arg={"name": "destroyed"})
        )
    workspaces[1].run_operator_once(operator_def("DestroyCommonWorld", ["comm_world"], []))
    with pytest.raises(OperatorError, match="rank 1 has left the group") as caught:
        workspaces[0].run_operator_once(operator_def("Barrier", ["comm_world"], []))
    assert isinstance(caught.value.__cause__, CommunicationError)


@pytest.mark.parametrize("failed", [False, True])
def test_a_world_that_is_created_again_is_a_new_one(failed: bool) -> None:
    create = [
        operator_def("CreateCommonWorld", [], ["comm_world"], size=2, rank=rank, arg={"name": f"again {failed}"})
        for rank in range(2)
    ]
    workspaces = [Workspace(allow_io=True), Workspace(allow_io=True)]
    for number in range(2):
        for workspace, definition in zip(workspaces, create, strict=True):
            workspace.run_operator_once(definition)
        worlds = [workspace.get_blob("comm_world").get(CommonWorld) for workspace in workspaces]  # type: ignore[type-abstract]
        sums = [np.array([rank + 1.0]) for rank in range(2)]
        jobs = [partial(all_reduce, world, array) for world, array in zip(worlds, sums, strict=True)]
        for thread in [threads().start(job, f"rank {rank}") for rank, job in enumerate(jobs)]:
            thread.join()
        assert [array.tolist() for array in sums] == [[3.0], [3.0]]
        if failed:
            worlds[number].abort("the test")
    if not failed:
        with pytest.raises(OperatorError, match="rank 0 of this group of 2 has already joined"):
            Workspace(allow_io=True).run_operator_once(create[0])


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"average": 1}, "the mean of integers"),
        ({"divisor": 0}, "'divisor' must be at least 1, found 0"),
        ({"algorithm": "star"}, "one of tree, ring, found 'star'"),
    ],
)
def test_bad_arguments_are_found_before_anything_is_sent(arguments: dict[str, Any], problem: str) -> None:
    workspace = Workspace(allow_io=True)
    workspace.run_operator_once(
        operator_def("CreateCommonWorld", [], ["comm_world"], size=1, rank=0, arg={"name": "bad"})
    )
    workspace.feed_blob("x", np.ones(2, np.int64))
    with pytest.raises(DagexecError, match=problem):
        workspace.run_operator_once(operator_def("Allreduce", ["comm_world", "x"], ["x"], **arguments))
    assert workspace.get_blob("comm_world").get(CommonWorld).statistics().collectives == 0  # type: ignore[type-abstract]


def test_an_output_is_needed_for_each_tensor() -> None:
    workspace = Workspace(allow_io=True)
    workspace.run_operator_once(
        operator_def("CreateCommonWorld", [], ["comm_world"], size=1, rank=0, arg={"name": "outputs"})
    )
    workspace.feed_blob("x", np.ones(2))
    workspace.feed_blob("y", np.ones(2))
    with pytest.raises(DagexecError, match="an output for each of 2 tensors, found 1"):
        workspace.run_operator_once(operator_def("Allreduce", ["comm_world", "x", "y"], ["x"]))


def test_a_world_that_is_no_world_is_refused() -> None:
    workspace = Workspace(allow_io=True)
    workspace.feed_blob("comm_world", np.ones(2))
    with pytest.raises(DagexecError, match="expected a CommonWorld"):
        workspace.run_operator_once(operator_def("Barrier", ["comm_world"], []))


def test_tensors_of_any_type_are_sent_from_rank_to_rank() -> None:
    x, fixed = np.arange(6, dtype=np.int64).reshape(2, 3), np.array([1.5, 2.5])
    sending = NetDef(name="sending")
    sending.op.append(operator_def("CloneCommonWorld", "comm_world", "other"))
    sending.op.append(operator_def("SendTensor", ["other", "x", "dst", "mark"], []))
    sending.op.append(operator_def("SendTensor", ["comm_world", "fixed"], [], dst=1, tag=9, raw_buffer=1))
    receiving = NetDef(name="receiving")
    receiving.op.append(operator_def("CloneCommonWorld", "comm_world", "other"))
    receiving.op.append(operator_def("ReceiveTensor", ["other", "y"], ["y", "src", "mark"], src=0, tag=4))
    receiving.op.append(
        operator_def("ReceiveTensor", ["comm_world", "z"], ["z", "src2", "mark2"], src=0, tag=9, raw_buffer=1)
    )
    feeds = [
        {"x": x, "fixed": fixed, "dst": np.array([1], np.int32), "mark": np.array([4], np.int32)},
        {"y": np.zeros(0, np.float32), "z": np.zeros(2)},
    ]
    _, found = on_workspaces(2, [sending, receiving], feeds, "messages")
    np.testing.assert_array_equal(found.fetch_blob("y"), x)
    np.testing.assert_array_equal(found.fetch_blob("z"), fixed)
    assert [found.fetch_blob(name).tolist() for name in ("src", "mark", "mark2")] == [[0], [4], [9]]


def test_a_sum_is_scattered() -> None:
    net = NetDef(name="scatter")
    net.op.append(operator_def("ReduceScatter", ["comm_world", "x"], ["rows"]))
    net.op.append(operator_def("ReduceScatter", ["comm_world", "x", "counts"], ["part"]))
    values = [np.random.default_rng(rank).normal(size=(6, 2)) for rank in range(3)]
    feeds = [{"x": x, "counts": np.array([5, 0, 7], np.int32)} for x in values]
    found = on_workspaces(3, net, feeds, "scatter")
    total = (values[0] + values[1]) + values[2]
    for rank, workspace in enumerate(found):
        np.testing.assert_array_equal(workspace.fetch_blob("rows"), total[2 * rank : 2 * rank + 2])
        part = total.reshape(-1)[[0, 5, 5][rank] : [5, 5, 12][rank]]
        np.testing.assert_array_equal(workspace.fetch_blob("part"), part)
    with pytest.raises(OperatorError, match="3 ranks must divide the rows"):
        on_workspaces(3, net, [feed | {"x": np.zeros((4, 2))} for feed in feeds], "uneven")


def test_one_of_several_inputs_is_copied_to_all() -> None:
    arrays = [np.array([1.0, 2.0]), np.array([3.0, 4.0]), np.array([5.0, 6.0])]
    for found in run_operator("NCCLBroadcast", arrays, 3, root=1):
        np.testing.assert_array_equal(found, arrays[1])
    with pytest.raises(ArgumentError, match="'root' must be an input, 0 to 2, found 3"):
        run_operator("NCCLBroadcast", arrays, 3, root=3)
