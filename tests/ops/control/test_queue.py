from __future__ import annotations

import threading

import numpy as np
import pytest

from dagexec import NetDef, Workspace
from dagexec.core.arguments import ArgumentValue
from dagexec.core.blobs_queue import BlobsQueue
from dagexec.core.device import Device
from dagexec.errors import DagexecError, OperatorError, RunTimeoutError
from dagexec.platform.threads import threads
from dagexec.scheduler.exploration import explore_seeds
from dagexec.scheduler.nets.net import BaseNet
from tests.nets import temporary_operator
from tests.ops.running import operator_def

NETS = [("simple", None), ("dag", 1), ("dag", 2), ("async_dag", 2)]


def made_queue(workspace: Workspace, **arguments: ArgumentValue) -> BlobsQueue:
    workspace.run_operator_once(operator_def("CreateBlobsQueue", [], ["q"], **arguments))
    return workspace.get_blob("q").get(BlobsQueue)


def a_net(workspace: Workspace, kind: tuple[str, int | None], *operators: object, name: str = "net") -> BaseNet:
    net = workspace.create_net(NetDef(name=name, op=operators), *kind)  # type: ignore[arg-type]
    assert isinstance(net, BaseNet)
    return net


def test_records_pass_from_one_net_to_another() -> None:
    workspace = Workspace()
    queue = made_queue(workspace, capacity=3, num_blobs=2, field_names=["x", "label"])
    workspace.feed_blob("x", np.zeros((2, 3), np.float32))
    workspace.feed_blob("l", np.array([b"s", b"t"], object))
    writer = a_net(workspace, ("dag", 2), operator_def("EnqueueBlobs", ["q", "x", "l"], ["x", "l"]), name="writer")
    reader = a_net(
        workspace,
        ("dag", 2),
        operator_def("DequeueBlobs", ["q"], ["y", "m"]),
        operator_def("Relu", ["y"], ["z"]),
        name="reader",
    )
    for value in (1.0, 2.0):
        workspace.feed_blob("x", np.full((2, 3), value, np.float32))
        writer.run()
    workspace.feed_blob("x", np.full((1, 3), 3, np.float32))  # another shape
    writer.run()
    for value in (1.0, 2.0, 3.0):
        reader.run()
        assert (workspace.fetch_blob("z") == value).all()
    assert workspace.fetch_blob("z").shape == (1, 3)
    assert workspace.fetch_blob("m").tolist() == [b"s", b"t"]
    assert queue.statistics().records == 0


def test_declared_shapes_are_known_before_the_run_and_others_are_refused() -> None:
    workspace = Workspace()
    queue = made_queue(workspace, capacity=2)
    queue.enqueue([np.ones((2, 3), np.float32)])
    dequeue = operator_def("DequeueBlobs", ["q"], ["y"], shapes=["2,3"], dtypes=["float32"])
    net = a_net(workspace, ("dag", 2), dequeue, operator_def("Sigmoid", ["y"], ["z"]))
    assert net.prepared().seconds[1] != 10e-6  # the cost of known shapes
    net.run()
    np.testing.assert_allclose(workspace.fetch_blob("z"), 1 / (1 + np.exp(-np.ones((2, 3)))), rtol=1e-6)
    queue.enqueue([np.ones((2, 4), np.float32)])
    with pytest.raises(
        OperatorError, match=r"expected float32\[2, 3\] for 'y' according to its arguments, found float32\[2, 4\]"
    ):
        net.run()
    assert queue.statistics().records == 1  # it is not lost


def test_a_queue_with_types_refuses_others() -> None:
    workspace = Workspace()
    made_queue(workspace, shapes=["2", ""], dtypes=["float32", "int64"], num_blobs=2)
    workspace.feed_blob("x", np.zeros(2, np.float32))
    workspace.feed_blob("n", np.zeros((), np.int32))
    with pytest.raises(DagexecError, match=r"blob 1 must be int64\[\], found int32\[\]"):
        workspace.run_operator_once(operator_def("EnqueueBlobs", ["q", "x", "n"], []))


@pytest.mark.parametrize("kind", NETS)
def test_a_closed_queue_fails_the_plain_operators_and_is_the_status_of_the_safe_ones(
    kind: tuple[str, int | None],
) -> None:
    workspace = Workspace()
    queue = made_queue(workspace, capacity=2)
    workspace.feed_blob("x", np.ones(2, np.float32))
    put = a_net(workspace, kind, operator_def("SafeEnqueueBlobs", ["q", "x"], ["x", "full"]), name="put")
    get = a_net(workspace, kind, operator_def("SafeDequeueBlobs", ["q"], ["y", "empty"]), name="get")
    put.run()
    assert not workspace.fetch_blob("full")
    close = a_net(workspace, kind, operator_def("CloseBlobsQueue", ["q"], []), name="close")
    close.run()
    put.run()
    assert workspace.fetch_blob("full")
    get.run()
    assert not workspace.fetch_blob("empty")
    assert workspace.fetch_blob("y").tolist() == [1, 1]
    get.run()
    assert workspace.fetch_blob("empty")
    assert workspace.fetch_blob("y").tolist() == [1, 1]
    for definition in (operator_def("EnqueueBlobs", ["q", "x"], ["x"]), operator_def("DequeueBlobs", ["q"], ["y"])):
        with pytest.raises(OperatorError, match="queue 'q': it is closed"):
            workspace.run_operator_once(definition)
    assert queue.is_closed


def test_several_records_are_joined_and_the_last_ones_are_fewer() -> None:
    workspace = Workspace()
    queue = made_queue(workspace, capacity=5, num_blobs=2)
    for size in (1, 2, 3):
        queue.enqueue([np.full((size, 2), size, np.float32), np.arange(size)])
    get = operator_def("SafeDequeueBlobs", ["q"], ["y", "n", "status"], num_records=2)
    workspace.run_operator_once(get)
    assert workspace.fetch_blob("y")[:, 0].tolist() == [1, 2, 2]
    assert workspace.fetch_blob("n").tolist() == [0, 0, 1]
    queue.close()
    workspace.run_operator_once(get)
    assert workspace.fetch_blob("y")[:, 0].tolist() == [3, 3, 3]
    assert not workspace.fetch_blob("status")
    workspace.run_operator_once(get)
    assert workspace.fetch_blob("status")


def test_records_taken_before_a_timeout_are_of_the_next_run() -> None:
    workspace = Workspace()
    queue = made_queue(workspace, capacity=5)
    get = operator_def("SafeDequeueBlobs", ["q"], ["y", "status"], num_records=3, timeout_secs=0.01)
    net = a_net(workspace, ("simple", None), get)
    for value in (1.0, 2.0):
        queue.enqueue([np.full((1, 2), value)])
    for _ in range(2):
        with pytest.raises(OperatorError, match="still empty after"):
            net.run()
    for value in (3.0, 4.0):
        queue.enqueue([np.full((1, 2), value)])
    net.run()
    assert workspace.fetch_blob("y")[:, 0].tolist() == [1, 2, 3]
    queue.close()
    net.run()
    assert workspace.fetch_blob("y")[:, 0].tolist() == [4]


@pytest.mark.parametrize("records", [1, 2])
def test_the_failure_of_a_reader_is_no_status_but_an_error(records: int) -> None:
    workspace = Workspace()
    queue = made_queue(workspace, capacity=5)
    queue.enqueue([np.ones((1, 2))])
    queue.close(OSError("the disk is gone"))
    get = operator_def("SafeDequeueBlobs", ["q"], ["y", "status"], num_records=records)
    workspace.run_operator_once(get)
    assert (workspace.fetch_blob("y") == 1).all()
    with pytest.raises(OperatorError, match="closed by OSError: the disk is gone"):
        workspace.run_operator_once(get)


def test_records_that_do_not_join_are_an_error() -> None:
    workspace = Workspace()
    queue = made_queue(workspace, capacity=5)
    queue.enqueue([np.zeros((1, 2))])
    queue.enqueue([np.zeros((1, 3))])
    with pytest.raises(OperatorError, match=r"cannot be concatenated along their first axis: \(1, 2\), \(1, 3\)"):
        workspace.run_operator_once(operator_def("SafeDequeueBlobs", ["q"], ["y", "s"], num_records=2))


@pytest.mark.parametrize("kind", NETS)
def test_a_timeout_of_the_operator_or_of_the_run_ends_the_wait(kind: tuple[str, int | None]) -> None:
    workspace = Workspace()
    made_queue(workspace)
    patient = a_net(workspace, kind, operator_def("DequeueBlobs", ["q"], ["y"]), name="patient")
    with pytest.raises(RunTimeoutError, match=r"0\.02 seconds"):
        patient.run(timeout=0.02)
    hasty = a_net(workspace, kind, operator_def("DequeueBlobs", ["q"], ["y"], timeout_secs=0.01), name="hasty")
    with pytest.raises(OperatorError, match="still empty after"):
        hasty.run()
    workspace.get_blob("q").get(BlobsQueue).enqueue([np.ones(1)])
    patient.run()
    assert workspace.fetch_blob("y").tolist() == [1]


@pytest.mark.parametrize("kind", [("dag", 2), ("async_dag", 2)])
def test_a_failure_elsewhere_in_the_net_ends_the_wait(kind: tuple[str, int]) -> None:
    def fail(_operator: object) -> None:
        raise ValueError("no")

    with temporary_operator("Failing", fail):
        workspace = Workspace()
        made_queue(workspace)
        net = a_net(workspace, kind, operator_def("DequeueBlobs", ["q"], ["y"]), operator_def("Failing", [], ["z"]))
        with pytest.raises(OperatorError, match="ValueError: no"):
            net.run()
        net.close()


def test_a_net_that_waits_for_itself_ends_by_its_timeout_on_any_number_of_workers() -> None:
    for workers in (1, 3):
        workspace = Workspace()
        made_queue(workspace)
        workspace.feed_blob("x", np.ones(1))
        net = a_net(
            workspace,
            ("dag", workers),
            operator_def("DequeueBlobs", ["q"], ["y"]),
            operator_def("EnqueueBlobs", ["q", "x"], []),
        )
        with pytest.raises(RunTimeoutError):
            net.run(timeout=0.02)
        net.close()


@pytest.mark.slow
def test_exploration_of_two_nets_over_a_queue_finds_no_order_in_which_they_hang() -> None:
    def scenario() -> None:
        workspace = Workspace()
        made_queue(workspace)
        workspace.feed_blob("x", np.zeros(1))
        ends: list[float] = []
        writer = a_net(workspace, ("dag", 1), operator_def("EnqueueBlobs", ["q", "x"], ["x"]), name="writer")
        reader = a_net(workspace, ("dag", 1), operator_def("DequeueBlobs", ["q"], ["y"]), name="reader")

        def write() -> None:
            for value in range(3):
                workspace.feed_blob("x", [float(value)])
                writer.run()

        producer = threads().start(write, "producer")
        for _ in range(3):
            reader.run()
            ends.append(float(workspace.fetch_blob("y")[0]))
        producer.join()
        writer.close()
        reader.close()
        assert ends == [0, 1, 2]

    found = explore_seeds(scenario, range(40))
    assert found.failed is None, found.failed


def test_operators_of_one_net_use_a_queue_in_the_order_of_the_net() -> None:
    for kind in NETS:
        workspace = Workspace()
        made_queue(workspace, capacity=2)
        workspace.feed_blob("a", np.array([1.0]))
        workspace.feed_blob("b", np.array([2.0]))
        net = a_net(
            workspace,
            kind,
            operator_def("EnqueueBlobs", ["q", "a"], []),
            operator_def("EnqueueBlobs", ["q", "b"], []),
            operator_def("DequeueBlobs", ["q"], ["c"]),
            operator_def("DequeueBlobs", ["q"], ["d"]),
        )
        for _ in range(5):
            net.run()
            assert (workspace.fetch_blob("c")[0], workspace.fetch_blob("d")[0]) == (1, 2)
        net.close()


def test_tensors_of_a_device_pass_through_a_queue_of_the_host() -> None:
    workspace = Workspace()
    made_queue(workspace)
    workspace.feed_blob("x", np.array([-1.0, 2.0], np.float32))
    on_device = operator_def("Relu", ["x"], ["y"])
    on_device.device_option.CopyFrom(Device("sim", 1).to_option())
    back = operator_def("Relu", ["v"], ["w"])
    back.device_option.CopyFrom(Device("sim", 0).to_option())
    net = a_net(
        workspace,
        ("async_dag", 2),
        on_device,
        operator_def("EnqueueBlobs", ["q", "y"], []),
        operator_def("DequeueBlobs", ["q"], ["v"], shapes=["2"]),
        back,
    )
    for _ in range(3):
        net.run()
        assert workspace.fetch_blob("w").tolist() == [0, 2]
    net.close()


@pytest.mark.parametrize(
    ("definition", "problem"),
    [
        (operator_def("EnqueueBlobs", ["q", "x"], ["a", "b"]), "expected no outputs, or 1"),
        (operator_def("SafeEnqueueBlobs", ["q", "x"], ["a", "b", "c"]), "expected 2 outputs"),
        (operator_def("DequeueBlobs", ["q"], ["a", "b"]), "expected 1 blobs"),
        (operator_def("DequeueBlobs", ["q"], ["a"], shapes=["2", "3"]), "expected 1 shapes"),
        (operator_def("DequeueBlobs", ["q"], ["a"], shapes=["2,x"]), "found '2,x'"),
        (operator_def("DequeueBlobs", ["q"], ["a"], dtypes=["float32"]), "'shapes', which is missing"),
        (operator_def("DequeueBlobs", ["q"], ["a"], timeout_secs=-1.0), "0 or more"),
        (operator_def("SafeDequeueBlobs", ["q"], ["a", "s"], num_records=0), "1 or more, found 0"),
        (operator_def("SafeDequeueBlobs", ["q"], ["a", "s"], num_records=2, shapes=["2"]), "omit 'shapes'"),
        (operator_def("DequeueBlobs", ["x"], ["a"]), "holds a Tensor; expected a BlobsQueue"),
        (operator_def("CreateBlobsQueue", [], ["r"], capacity=0), "from 1 to"),
        (operator_def("CreateBlobsQueue", [], ["q"], enforce_unique_name=1), "holds BlobsQueue.* already"),
    ],
)
def test_what_does_not_fit_is_refused(definition: object, problem: str) -> None:
    workspace = Workspace()
    made_queue(workspace).enqueue([np.ones(1)])
    workspace.feed_blob("x", np.ones(1))
    with pytest.raises(DagexecError, match=problem):
        workspace.run_operator_once(definition)  # type: ignore[arg-type]


def test_a_net_that_waits_can_be_ended_by_closing_the_queue_from_another_thread() -> None:
    workspace = Workspace()
    queue = made_queue(workspace)
    net = a_net(workspace, ("dag", 1), operator_def("SafeDequeueBlobs", ["q"], ["y", "status"]))
    closer = threading.Thread(target=queue.close)
    closer.start()
    net.run()
    closer.join()
    assert workspace.fetch_blob("status")
    net.close()
