"""Pipelines as Caffe2's scripts write them, in a workspace beside the current one."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from dagexec.caffe2 import core, workspace
from dagexec.caffe2.dataio import CompositeReader, ReaderWithTimeLimit
from dagexec.caffe2.dataset import Dataset
from dagexec.caffe2.net_builder import ops
from dagexec.caffe2.pipeline import pipe
from dagexec.caffe2.queue_util import Queue
from dagexec.caffe2.schema import FeedRecord, FetchRecord, InitEmptyRecord, NewRecord, Scalar, Struct
from dagexec.caffe2.session import LocalSession
from dagexec.caffe2.task import TaskGroup

ROWS = Struct(("uid", np.arange(17)), ("value", 0.1 * np.arange(17)))


@pytest.mark.parametrize("with_nets", [False, True])
def test_records_pass_two_processors_and_a_queue_that_joins_them(with_nets: bool) -> None:
    init = core.Net("init")
    with core.NameScope("init"):
        source = NewRecord(init, ROWS)
        target = InitEmptyRecord(init, ROWS.clone_schema())
        counter, one = init.Const(0), init.Const(1)

    def doubled(record: Any) -> Any:
        net = core.Net("doubles") if with_nets else ops
        with core.NameScope("doubled"):
            made = NewRecord(net, record)
        net.Add([record.uid(), record.uid()], [made.uid()])
        made.value.set(blob=record.value())
        return ([net], made) if with_nets else made

    def without_value(record: Any) -> Any:
        with core.NameScope("without"):
            made = NewRecord(ops, record)
        made.uid.set(blob=record.uid())
        ops.Sub([record.value(), record.value()], [made.value()])
        ops.Add([counter, one], [counter])
        return made

    with TaskGroup() as group:
        first = pipe(Dataset(source).reader(), output=Queue(capacity=11, num_dequeue_records=3), processor=doubled)
        second = pipe(first, processor=without_value)
        pipe(second, Dataset(target).writer())
    around = workspace.C.Workspace()
    FeedRecord(source, ROWS, around)
    session = LocalSession(around)
    session.run(init)
    session.run(group)
    assert around.blobs[str(counter)].fetch() == math.ceil(17 / 3)
    found = FetchRecord(target, ws=around)
    assert found.uid().tolist() == (2 * ROWS.uid()).tolist()
    assert found.value().tolist() == [0] * 17
    assert not workspace.HasBlob(str(counter))


def test_readers_are_joined_and_limited() -> None:
    init = core.Net("init")
    sources = [NewRecord(init, ROWS), NewRecord(init, numbers := Struct(("number", np.arange(5.0))))]
    both = CompositeReader(["rows", "numbers"], [Dataset(source).reader(init) for source in sources])
    target = Dataset(both.schema().clone_schema())
    target.init_empty(init)
    writer = target.writer(init)
    workspace.RunNetOnce(init)
    for source, rows in zip(sources, (ROWS, numbers), strict=True):
        FeedRecord(source, rows)
    for reader, expected in (
        (ReaderWithTimeLimit(both, 1e-9), []),
        (ReaderWithTimeLimit(both, 60), range(5)),
    ):
        with TaskGroup() as group:
            pipe(reader, writer)
        LocalSession().run(group)
        found = FetchRecord(target.content())
        assert found.numbers.number().tolist() == found.rows.uid().tolist() == list(expected)
    assert workspace.FetchBlob(reader.data_finished())


@pytest.mark.parametrize("instances", [1, 4])
def test_what_is_done_once_for_a_task_and_once_for_each_of_its_instances(instances: int) -> None:
    init = core.Net("init")
    source = NewRecord(init, ROWS)
    target = Dataset(Struct(("uid", Scalar(np.int64)), ("value", Scalar(np.float64))))
    target.init_empty(init)
    totals: list[Any] = []

    def counted(record: Any) -> Any:
        with ops.task_init():
            counters = [ops.CreateCounter([], [f"counter_{index}"]) for index in range(3)]
        with ops.task_instance_init():
            own = ops.CreateCounter([], ["own_counter"])
        ops.CountUp(counters[0])
        ops.CountUp(own)
        with ops.task_instance_exit():
            with ops.loop(ops.RetrieveCount(own)):
                ops.CountUp(counters[1])
            ops.CountUp(counters[2])
        with ops.task_exit():
            totals[:] = [ops.RetrieveCount(counter) for counter in counters]
        return record

    with TaskGroup() as group:
        pipe(Dataset(source).reader(), target.writer(), processor=counted, num_runtime_threads=instances)
    around = workspace.C.Workspace()
    FeedRecord(source, ROWS, around)
    session = LocalSession(around)
    session.run(init)
    session.run(group)
    assert [int(around.blobs[str(total)].fetch()) for total in totals] == [17, 17, instances]
    assert sorted(FetchRecord(target.content(), ws=around).uid().tolist()) == list(range(17))
