from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from dagexec import NetDef, Workspace
from dagexec.core.blobs_queue import BlobsQueue
from dagexec.core.proto import TensorProto, TensorProtos
from dagexec.errors import OperatorError, QueueClosedError
from dagexec.scheduler.exploration import explore_seeds, systematic
from dagexec.storage import Mode, open_database
from dagexec.training.queue_feeding import QueueFeeder
from tests.ops.running import operator_def


def test_a_reader_net_fills_the_queue_that_the_train_net_empties(tmp_path: Path) -> None:
    """db -> TensorProtosDBInput -> EnqueueBlobs => queue => DequeueBlobs -> Negative"""
    with open_database("minidb", tmp_path / "db", Mode.NEW) as database, database.transaction() as transaction:
        for k in range(6):
            tensor = TensorProto(dims=[2], float_data=[k, 10 * k])
            transaction.put(b"%d" % k, TensorProtos(protos=[tensor]).SerializeToString())
    workspace = Workspace(root_folder=tmp_path)
    workspace.run_operator_once(operator_def("CreateDB", [], ["reader"], db="db"))
    workspace.run_operator_once(operator_def("CreateBlobsQueue", [], ["queue"], capacity=2))
    read = [
        operator_def("TensorProtosDBInput", ["reader"], ["record"], batch_size=2),
        operator_def("EnqueueBlobs", ["queue", "record"], ["record"]),
    ]
    train = [
        operator_def("DequeueBlobs", ["queue"], ["x"], shapes=["2,2"]),
        operator_def("Negative", ["x"], ["y"]),
    ]
    reader_net = workspace.create_net(NetDef(name="read", op=read), "simple")
    train_net = workspace.create_net(NetDef(name="train", op=train), "dag", 2)
    with QueueFeeder(workspace.get_blob("queue").get(BlobsQueue), [reader_net.run]):
        for first in (0, 2, 4, 0, 2):
            train_net.run()
            assert workspace.fetch_blob("y").tolist() == [[-first, -10 * first], [-first - 1, -10 * first - 10]]
    train_net.close()


def test_the_error_of_a_reader_is_the_cause_of_the_trainers() -> None:
    workspace = Workspace()
    workspace.run_operator_once(operator_def("CreateBlobsQueue", [], ["queue"]))
    queue = workspace.get_blob("queue").get(BlobsQueue)
    net = workspace.create_net(NetDef(name="n", op=[operator_def("DequeueBlobs", ["queue"], ["x"])]), "dag", 1)

    def read() -> None:
        raise OSError("the disk is gone")

    with QueueFeeder(queue, [read]), pytest.raises(OperatorError, match="OSError: the disk is gone") as caught:
        net.run()
    cause = caught.value.__cause__
    assert isinstance(cause, QueueClosedError)
    assert isinstance(cause.__cause__, OSError)
    net.close()


def take_all(queue: BlobsQueue, found: list[int]) -> None:
    while True:
        found.append(int(queue.dequeue()[0][0]))


@pytest.mark.slow
def test_the_end_of_all_iterators_closes_the_queue_and_nothing_is_lost() -> None:
    def scenario() -> None:
        queue = BlobsQueue(1)
        found: list[int] = []
        with (
            QueueFeeder.of_batches(queue, ([np.array([k])] for k in range(3))),
            pytest.raises(QueueClosedError, match="closed, and there are no more"),
        ):
            take_all(queue, found)
        assert found == [0, 1, 2]

    for found in (systematic(scenario, limit=300), explore_seeds(scenario, range(100))):
        assert found.failed is None, found.failed


@pytest.mark.slow
def test_closing_the_feeder_ends_readers_that_wait() -> None:
    def scenario() -> None:
        queue = BlobsQueue(1)
        feeder = QueueFeeder(queue, [lambda: queue.enqueue([np.zeros(1)])] * 2)
        feeder.close()
        assert queue.is_closed

    for found in (systematic(scenario, limit=300), explore_seeds(scenario, range(100))):
        assert found.failed is None, found.failed


def test_a_reader_that_hangs_does_not_hang_close(caplog: pytest.LogCaptureFixture) -> None:
    gate = threading.Event()

    def batches() -> Iterator[list[np.ndarray]]:
        gate.wait(20)
        yield [np.zeros(1)]

    feeder = QueueFeeder.of_batches(BlobsQueue(1), batches())
    started = time.monotonic()
    feeder.close(timeout=0.1)
    assert time.monotonic() - started < 10
    assert "dagexec-feed-0 is still reading" in caplog.text
    gate.set()
    feeder.close(timeout=20)
    assert "dagexec-feed-0" not in [thread.name for thread in threading.enumerate()]
