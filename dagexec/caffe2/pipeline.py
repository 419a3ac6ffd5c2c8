"""Pipelines: tasks that read records, change them and write them, several threads at once (`caffe2.python.pipeline`).

with TaskGroup() as group:
    queue = pipe(dataset.reader(), processor=lambda record: changed(record), num_threads=2)
    pipe(queue, output=other_dataset.writer())
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dagexec.caffe2.dataio import Read, Reader, Writer
from dagexec.caffe2.net import Net
from dagexec.caffe2.net_builder import NetBuilder, ops
from dagexec.caffe2.plans import execution_step, to_execution_step
from dagexec.caffe2.queue_util import Queue
from dagexec.caffe2.schema import Field
from dagexec.caffe2.scope import NameScope
from dagexec.caffe2.task import Task, TaskGroup
from dagexec.core.proto import TensorProto
from dagexec.errors import Caffe2Error

__all__ = ["NetProcessor", "Output", "ProcessingReader", "pipe", "pipe_and_output"]

_CAPACITY = 100


class Output:
    """What a processor returns: nets to run, the record that they make, and the blob that ends the reading."""

    def __init__(self, nets: Any = None, record: Any = None, should_stop: Any = None) -> None:
        builder = NetBuilder.current(required=False)
        built = [] if builder is None else builder.get()
        given = [] if nets is None else list(nets) if isinstance(nets, list | tuple) else [nets]
        self.nets: list[Any] = [*built, *given]
        self.record = record
        self.should_stop = should_stop


def _normalized(made: Any) -> Output:
    """What a processor has returned: a record, behind which a blob that ends the reading may be; or nets, then both."""
    if isinstance(made, Output):
        return made
    if isinstance(made, Field):
        return Output(record=made)
    if isinstance(made, tuple):
        return Output(None, *made) if isinstance(made[0], Field) else Output(*made)
    return Output(made)


class NetProcessor:
    """A processor that runs a net with a record of inputs and a record of outputs; each thread has a copy of it."""

    def __init__(self, net: Net, stop_signal: Any = None, name: str | None = None) -> None:
        """Raises Caffe2Error for a net without records."""
        if net.input_record() is None or net.output_record() is None:
            raise Caffe2Error(f"net {net.Name()!r} needs a record of inputs and one of outputs")
        self.net = net
        self.name = name or net.Name()
        self._stop = stop_signal

    def __call__(self, record: Field) -> Output:
        """A copy of the net, whose inputs are the blobs of a record."""
        inputs = self.net.input_record().field_blobs()
        renamed = dict(zip(map(str, inputs), map(str, record.field_blobs()), strict=True))
        own = {blob for operator in self.net.Proto().op for blob in operator.output} - renamed.keys()
        copy_name = Net(self.net.Name()).Name()
        renamed |= {blob: f"{copy_name}/{blob}" for blob in sorted(own)}
        copied = self.net.Clone(copy_name, blob_remap=renamed)
        stop = None if self._stop is None else renamed.get(str(self._stop), str(self._stop))
        return Output([copied], copied.output_record(), None if stop is None else copied.GetBlobRef(stop))


class ProcessingReader(Reader):
    """Reads from another reader, and changes what it has read."""

    def __init__(self, reader: Reader, processor: Any) -> None:
        super().__init__()
        self.reader = reader
        self.processor: Callable[[Any], Any] = NetProcessor(processor) if isinstance(processor, Net) else processor

    def setup_ex(self, init_net: Net, finish_net: Net) -> None:
        """Set up the other reader."""
        self.reader.setup_ex(init_net, finish_net)

    def read_ex(self, local_init_net: Net, local_finish_net: Net) -> Read:
        """The nets of the other reader, then those of the processor."""
        nets, status, record = self.reader.read_record_ex(local_init_net, local_finish_net)
        with NetBuilder() as builder:
            result = _normalized(self.processor(record))
        nets = [*nets, *result.nets]
        stops = [blob for blob in (result.should_stop, builder._stop_blob) if blob is not None]
        if stops:
            stop = Net("stop_net")
            for blob in stops:
                stop.Or([status, blob], [status])
            nets.append(stop)
        if hasattr(self.processor, "setup"):
            local_init_net.add_attribute(TaskGroup.LOCAL_SETUP, self.processor)
        self._schema = result.record
        return nets, status, None if result.record is None else result.record.field_blobs()


def pipe(
    input: Any,
    output: Any = None,
    num_threads: int = 1,
    processor: Any = None,
    name: str | None = None,
    capacity: int | None = None,
    group: TaskGroup | None = None,
    num_runtime_threads: int = 1,
) -> Any:
    """Add a task that reads records, changes them and writes them; what it writes to is returned.

    `input` and `output` are readers and writers, or what has these: queues, tables. A processor is a function of a
    record, which uses `ops` and returns a record, an `Output` or None; or it is a net with records. Where it returns a
    record, and there is no output, that is a new queue of `capacity` records. It is called once for each of
    `num_threads`; of each of these `num_runtime_threads` instances run at once, in workspaces of their own.
    """
    return _pipe(input, output, num_threads, processor, name, capacity, group, num_runtime_threads, None)[0]


def pipe_and_output(
    input: Any,
    output: Any = None,
    num_threads: int = 1,
    processor: Any = None,
    name: str | None = None,
    capacity: int | None = None,
    group: TaskGroup | None = None,
    num_runtime_threads: int = 1,
    final_outputs: Any = None,
) -> tuple[Any, Any]:
    """`pipe`, and the outputs of its task, which `final_outputs` name."""
    result, task = _pipe(
        input, output, num_threads, processor, name, capacity, group, num_runtime_threads, final_outputs
    )
    outputs = task.outputs() if final_outputs is not None else None
    return result, outputs[0] if outputs and not isinstance(final_outputs, list | tuple) else outputs


def _pipe(
    input: Any,
    output: Any,
    threads: int,
    processor: Any,
    name: str | None,
    capacity: int | None,
    group: TaskGroup | None,
    instances: int,
    final_outputs: Any,
) -> tuple[Any, Task]:
    reader = input if isinstance(input, Reader) else input.reader() if hasattr(input, "reader") else None
    if reader is None:
        raise Caffe2Error(f"a pipe reads from a reader, or from what has one; found {type(input).__name__}")
    if processor is not None:
        reader = ProcessingReader(reader, processor)
    elif output is None:
        return input, Task(group=group)
    result: Any = None
    writer: Writer | None = None
    called = name or str(getattr(processor, "__name__", "pipe"))
    with Task(name=f"pipe:{called}", group=group, outputs=final_outputs, num_instances=instances) as task:
        begin, end = Net("init"), Net("exit")
        reader.setup_ex(begin, end)
        steps = []
        for thread in range(threads):
            with NetBuilder(name=f"{called}/t:{thread}") as builder:
                local_begin, local_end = Net("init"), Net("exit")
                nets, status, record = reader.read_record_ex(local_begin, local_end)
                if record is not None:
                    if writer is None:
                        with NameScope(called):
                            result, writer = _output(output, capacity)
                        writer.setup_ex(begin, end)
                    nets = [*nets, *writer.write_record_ex(record, local_begin, local_end, status)[0]]
                local_begin.ConstantFill([], [status], shape=[], value=False, dtype=TensorProto.BOOL)
                ops.net(local_begin)
                body = [to_execution_step(net) for net in nets]
                builder.add(execution_step("body", body, should_stop_blob=status))
                ops.net(local_end)
            steps.append(to_execution_step(builder))
        with ops.task_init():
            ops.net(begin)
        NetBuilder.current().add(execution_step("body", steps, concurrent_substeps=True))  # type: ignore[union-attr]
        with ops.task_exit():
            ops.net(end)
    return result, task


def _output(output: Any, capacity: int | None) -> tuple[Any, Writer]:
    """What is written to, and its writer."""
    if output is None:
        queue = Queue(capacity or _CAPACITY)
        return queue, queue.writer()
    if isinstance(output, Writer):
        return None, output
    if not hasattr(output, "writer"):
        raise Caffe2Error(f"a pipe writes to a writer, or to what has one; found {type(output).__name__}")
    return output, output.writer()
