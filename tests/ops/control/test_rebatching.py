from __future__ import annotations

import numpy as np
import pytest

from dagexec import NetDef, Workspace, op
from dagexec.errors import DagexecError, RunTimeoutError
from dagexec.platform.threads import threads
from dagexec.scheduler.exploration import explore_seeds
from dagexec.scheduler.nets.net import BaseNet


def made(capacity: int = 10, **blobs: np.ndarray) -> Workspace:
    workspace = Workspace()
    for name, array in blobs.items():
        workspace.feed_blob(name, array)
    workspace.run_operator_once(op("CreateRebatchingQueue", [], ["q"], capacity=capacity, num_blobs=len(blobs)))
    return workspace


def test_batches_come_in_another_size_than_they_went_in() -> None:
    x, y = np.arange(10, dtype=np.float32).reshape(5, 2), np.arange(5)
    workspace = made(x=x, y=y)
    enqueue = op("EnqueueRebatchingQueue", ["q", "x", "y"], [], enqueue_batch=1)
    take_two = op("DequeueRebatchingQueue", ["q"], ["a", "b"], num_elements=2)
    workspace.run_operator_once(enqueue)
    workspace.run_operator_once(op("CloseRebatchingQueue", ["q"], []))
    for rows in (slice(0, 2), slice(2, 4), slice(4, 5)):
        workspace.run_operator_once(take_two)
        assert workspace.fetch_blob("a").tolist() == x[rows].tolist()
        assert workspace.fetch_blob("b").tolist() == y[rows].tolist()
    for refused in (take_two, enqueue):
        with pytest.raises(DagexecError, match="it is closed"):
            workspace.run_operator_once(refused)


def test_a_wait_ends_with_its_run_and_nothing_is_lost() -> None:
    workspace = made(x=np.array([1.0], np.float32))
    workspace.run_operator_once(op("EnqueueRebatchingQueue", ["q", "x"], []))
    net = workspace.create_net(NetDef(name="n", op=[op("DequeueRebatchingQueue", ["q"], ["y"], num_elements=2)]), "dag")
    with pytest.raises(RunTimeoutError):
        net.run(timeout=0.05)
    workspace.run_operator_once(op("EnqueueRebatchingQueue", ["q", "x"], []))
    net.run(timeout=10)
    assert workspace.fetch_blob("y").tolist() == [[1.0], [1.0]]


def test_shapes_that_cannot_be_stacked_are_refused() -> None:
    workspace = made(x=np.zeros(3, np.float32), y=np.zeros(2, np.float32))
    with pytest.raises(DagexecError, match="as many rows of each tensor"):
        workspace.run_operator_once(op("EnqueueRebatchingQueue", ["q", "x", "y"], [], enqueue_batch=1))
    workspace = made(x=np.zeros(3, np.float32))
    workspace.run_operator_once(op("EnqueueRebatchingQueue", ["q", "x"], []))
    workspace.feed_blob("x", np.zeros(2, np.float32))
    workspace.run_operator_once(op("EnqueueRebatchingQueue", ["q", "x"], []))
    with pytest.raises(DagexecError, match="cannot be stacked"):
        workspace.run_operator_once(op("DequeueRebatchingQueue", ["q"], ["y"], num_elements=2))


def test_every_record_comes_out_once_under_any_schedule() -> None:
    def body() -> None:
        workspace = made(capacity=1, x=np.arange(3, dtype=np.float32))
        nets = [
            workspace.create_net(NetDef(name=name, op=[operator]), "dag", 1)
            for name, operator in (
                ("write", op("EnqueueRebatchingQueue", ["q", "x"], [], enqueue_batch=1)),
                ("read", op("DequeueRebatchingQueue", ["q"], ["y"], num_elements=3)),
            )
        ]
        started = [threads().start(net.run, net.name) for net in nets if isinstance(net, BaseNet)]
        for thread in started:
            thread.join()
        assert workspace.fetch_blob("y").tolist() == [0, 1, 2]
        for net in nets:
            net.close()

    found = explore_seeds(body, range(10))
    assert found.failed is None, found.failed
