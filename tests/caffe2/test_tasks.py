"""Data sets, pipelines, sessions and checkpoints of `dagexec.caffe2`, as scripts use them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dagexec.caffe2 import core, workspace
from dagexec.caffe2.checkpoint import (
    CheckpointManager,
    Job,
    JobRunner,
    MultiNodeCheckpointManager,
    epoch_limiter,
)
from dagexec.caffe2.dataio import CounterReader, ReaderWithLimit
from dagexec.caffe2.dataset import Dataset
from dagexec.caffe2.net_builder import ops
from dagexec.caffe2.pipeline import Output, pipe, pipe_and_output
from dagexec.caffe2.queue_util import Queue
from dagexec.caffe2.schema import ConstRecord, FeedRecord, FetchRecord, List, NewRecord, Scalar, Struct
from dagexec.caffe2.session import LocalSession
from dagexec.caffe2.task import Cluster, Node, Task, TaskGroup, WorkspaceType
from dagexec.caffe2.text_file_reader import TextFileReader
from dagexec.errors import Caffe2Error


@pytest.fixture(autouse=True)
def _fresh() -> None:
    workspace.ResetWorkspace()


def numbers(values: Any) -> Struct:
    return Struct(("val", np.array(values)))


def new_session() -> LocalSession:
    return LocalSession(workspace.C.Workspace())


# The job of Caffe2's own test of checkpoints: an epoch adds the next three numbers below ten to a total of 100.

TOTALS = [103, 115, 136, 145]


def add_up(node: int) -> Any:
    with Node(f"trainer_{node}"):
        with Job.current().init_group, Task():
            data = ConstRecord(ops, numbers(list(range(10))))
            reader = Dataset(data, name=f"dataset:{node}").reader(ops)
            total = ops.Const([100])

        def inc_total(record: Any) -> None:
            ops.Add([total, record.val()], [total])

        epoch_reader = ReaderWithLimit(reader, num_iter=3)
        pipe(epoch_reader, processor=inc_total)
        Job.current().add_stop_condition(epoch_reader.data_finished())
        return total


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_job_is_resumed_from_each_of_its_checkpoints(nodes: int, tmp_path: Path) -> None:
    def manager() -> Any:
        if nodes == 1:
            return CheckpointManager(str(tmp_path), "temp_node", "minidb")
        return MultiNodeCheckpointManager(str(tmp_path), "minidb")

    with Cluster() as cluster, Job() as job:
        totals = [add_up(node) for node in range(nodes)]
    assert cluster.nodes() == [f"trainer_{node}" for node in range(nodes)]
    fetcher = Task(step=core.Net("empty"), outputs=totals)

    def fetched(session: LocalSession) -> list[int]:
        session.run(fetcher)
        return [int(output.fetch()[0]) for output in fetcher.outputs()]

    job.compile(LocalSession)
    session, checkpoints = new_session(), manager()
    assert JobRunner(job, checkpoints).train(session) == len(TOTALS)
    assert fetched(session) == [TOTALS[-1]] * nodes
    for epoch in (1, len(TOTALS)) if nodes == 1 else (2,):
        resumed = new_session()
        assert JobRunner(job, manager(), resume_from_epoch=epoch).train(resumed) == max(len(TOTALS), epoch + 1)
        assert fetched(resumed) == [TOTALS[-1]] * nodes
    for epoch in range(1, len(TOTALS) + 1):
        session.run(checkpoints.load(epoch))
        assert fetched(session) == [TOTALS[epoch - 1]] * nodes
    assert JobRunner(job, checkpoints).load_blobs_from_checkpoints([totals[0]], 1, session)
    assert fetched(session)[0] == TOTALS[0]
    assert not JobRunner(job, checkpoints).load_blobs_from_checkpoints([totals[0]], 99, session)
    with pytest.raises(Caffe2Error):
        JobRunner(job, manager(), resume_from_epoch=99).train(new_session())


def test_epochs_are_counted_and_a_checkpoint_that_fails_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    with Job() as job:
        with job.init_group, Task():
            total = ops.Const(0.0)
        with Task():
            ops.Add([total, ops.Const(2.0)], [total])
        with job.exit_group, Task():
            ops.Mul([total, total], [total])
        epoch_limiter(job, 3)
    session = new_session()
    job.compile(LocalSession)
    with caplog.at_level(logging.WARNING, "dagexec"):
        assert JobRunner(job, CheckpointManager(str(tmp_path / "file"), "node", "minidb"))(session) == 3
    assert len([line for line in caplog.messages if "was not written" in line]) == 4
    fetch = Task(outputs=[total])
    session.run(fetch)
    assert fetch.outputs()[0].get() == 36
    JobRunner(job, CheckpointManager(str(tmp_path), "node", "minidb")).train(session)
    resumed = JobRunner(job, CheckpointManager(str(tmp_path), "node", "minidb"), resume_from_epoch=1)
    assert resumed.train(new_session()) == 3, "the counter is in the checkpoint"


# Data sets

ROWS = Struct(
    ("id", np.array([3, 1, 2], np.int32)), ("words", List(np.array([7, 8, 9], np.int64), np.array([2, 0, 1], np.int32)))
)


def test_a_table_is_written_and_read() -> None:
    init = core.Net("init")
    record = NewRecord(init, ROWS)
    table = Dataset(ROWS.clone_schema(), name="table")
    table.init_empty(init)
    writer = table.writer(init)
    FeedRecord(record, ROWS)
    write = core.Net("write")
    writer.write_record(write, record)
    workspace.RunNetOnce(init)
    FeedRecord(record, ROWS)
    workspace.CreateNet(write)
    workspace.RunNet(write, 2)
    contents = FetchRecord(table.content())
    assert contents.id().tolist() == [3, 1, 2] * 2
    assert contents.words.items().tolist() == [7, 8, 9] * 2
    trim = core.Net("trim")
    table.trim(trim, multiple_of=4)
    random = table.random_reader(trim, batch_size=2)
    random.computeoffset(trim)
    random.sort_and_shuffle(trim, sort_by_field="id")
    workspace.RunNetOnce(trim)
    assert FetchRecord(table.content()).words.lengths().tolist() == [2, 0, 1, 2]
    read = core.Net("read")
    at_end, fields = random.read_record(read)
    workspace.CreateNet(read)
    found = []
    for _ in range(2):
        workspace.RunNet(read)
        assert not workspace.FetchBlob(at_end)
        found += FetchRecord(fields).id().tolist()
    assert sorted(found) == [1, 2, 3, 3]
    workspace.RunNet(read)
    assert workspace.FetchBlob(at_end)
    step, fields = table.reader(trim, batch_size=3).execution_step()
    workspace.RunNetOnce(trim)
    workspace.RunPlan(step)
    assert FetchRecord(fields).id().tolist() == []
    with pytest.raises(Caffe2Error, match="has no cursor yet"):
        table.reader().read(core.Net("unready"))
    with pytest.raises(Caffe2Error, match="has no blobs"):
        Dataset(["a"]).content()


def test_a_text_file_is_read_by_columns(tmp_path: Path) -> None:
    (tmp_path / "rows").write_text("a\t1.5\nb\t2\n")
    init, read = core.Net("init"), core.Net("read")
    schema = Struct(("name", Scalar(str)), ("size", Scalar(np.float32)))
    reader = TextFileReader(init, str(tmp_path / "rows"), schema, num_passes=2, batch_size=3)
    should_stop, record = reader.read_record(read)
    workspace.RunNetOnce(init)
    workspace.CreateNet(read)
    batches = []
    for _ in range(3):
        workspace.RunNet(read)
        batches.append([blob.tolist() for blob in FetchRecord(record).field_blobs()])
    assert batches == [[[b"a", b"b", b"a"], [1.5, 2, 1.5]], [[b"b"], [2]], [[], []]]
    assert workspace.FetchBlob(should_stop)
    with pytest.raises(Caffe2Error, match="columns only"):
        TextFileReader(init, "rows", Struct(("lists", List(Scalar(np.float32)))))


# Pipelines


@pytest.mark.parametrize("threads", [1, 3])
def test_records_go_through_threads_and_queues(threads: int) -> None:
    init = core.Net("init")
    source = Dataset(ConstRecord(init, numbers(np.arange(20, dtype=np.float32))), name="source")
    target = Dataset(Struct(("doubled", Scalar(np.float32))), name="target")
    target.init_empty(init)
    workspace.RunNetOnce(init)

    def doubled(record: Any) -> Struct:
        with ops.task_init():
            half = ops.Const(1.0, blob_out="half")
        return Struct(("doubled", ops.Add([record.val(), ops.Mul([record.val(), half])])))

    with TaskGroup() as group:
        queue = pipe(source.reader(batch_size=3), processor=doubled, num_threads=threads, capacity=2)
        assert isinstance(queue, Queue)
        pipe(queue, output=target.writer(), num_threads=threads, processor=lambda record: record)
    assert len(group.tasks()) == 2
    with LocalSession() as session:
        session.run(group)
    (found,) = FetchRecord(target.content()).field_blobs()
    assert sorted(found.tolist()) == [2.0 * number for number in range(20)]
    with pytest.raises(Caffe2Error, match="is closed"):
        session.run(group)


def test_a_net_with_records_processes_and_outputs_are_fetched() -> None:
    net = core.Net("square")
    record = net.set_input_record(Struct(("iter", Scalar(np.int64))))
    net.set_output_record(Struct(("squared", net.Mul([record.iter(), record.iter()]))))
    assert [str(blob) for blob in net.external_inputs] == record.field_blobs()
    with pytest.raises(ValueError, match="has a record of inputs already"):
        net.set_input_record(record)
    copy = net.Clone("copied", blob_remap={record.iter(): "other"})
    assert copy.input_record().field_blobs() == ["other"]
    assert net.Clone("bare", keep_schema=False).output_record() is None
    total = core.BlobReference("total")
    workspace.FeedBlob("total", np.zeros(1, np.int64))

    def sum_up(record: Any) -> Output:
        ops.Add([total, record.squared()], [total])
        return Output(should_stop=ops.GE([record.squared(), ops.Const(16)]))

    with TaskGroup() as group:
        squares = pipe(CounterReader(), processor=net, capacity=3)
        result, output = pipe_and_output(squares, processor=sum_up, final_outputs=total)
    assert result is None
    LocalSession().run(group)
    assert output.fetch().tolist() == [0 + 1 + 4 + 9 + 16]


def test_tasks_have_workspaces_and_instances() -> None:
    session = new_session()
    with TaskGroup(WorkspaceType.PRIVATE) as group, Task(num_instances=3) as task:
        ops.Const(2.0, blob_out="hidden")
    session.run(group)
    assert task.workspace_type() == WorkspaceType.PRIVATE
    fetch = Task(outputs=[core.BlobReference("hidden")])
    session.run(fetch)
    assert b"nullptr" in fetch.outputs()[0].get()
    with Task() as task:
        ops.Const(2.0, blob_out="seen")
    record = task.add_output(Struct(("seen", "seen")))
    with pytest.raises(Caffe2Error, match="has not run"):
        record.get()
    session.run(task)
    assert record.get().seen() == 2
    with pytest.raises(Caffe2Error, match="compiled already"):
        task.set_step(core.Net("late"))
    with pytest.raises(Caffe2Error, match="a session runs tasks"):
        session.run(3)
    with pytest.raises(Caffe2Error, match="no Job is open"):
        Job.current()
    with TaskGroup(WorkspaceType.PRIVATE), pytest.raises(Caffe2Error, match="its group does not"):
        Task(workspace_type=WorkspaceType.GLOBAL)
