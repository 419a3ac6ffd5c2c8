"""Readers and writers of records, which add nets to tasks, and pipes between them (`caffe2.python.dataio`)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from dagexec.caffe2.net import Net
from dagexec.caffe2.plans import ExecutionStep, execution_step
from dagexec.caffe2.references import BlobReference
from dagexec.caffe2.schema import Field, Struct, from_blob_list
from dagexec.core.proto import TensorProto
from dagexec.errors import Caffe2Error

__all__ = [
    "CompositeReader", "CounterReader", "Pipe", "Reader", "ReaderBuilder", "ReaderWithLimit", "ReaderWithLimitBase",
    "ReaderWithTimeLimit", "Writer",
]  # fmt: skip

Read = tuple[list[Any], Any, Any]
"""Nets that read a record; the blob that says that there was none; the blobs, or the record."""


class Reader:
    """What adds operators to nets that read records, one with each run.

    A class has `read`, of one net, or `read_ex`, of several.
    """

    def __init__(self, schema: Field | None = None) -> None:
        self._schema = schema

    def schema(self) -> Field:
        """The schema of its records. Raises Caffe2Error where it is not known."""
        if self._schema is None:
            raise Caffe2Error(f"{type(self).__name__}: the schema of its records is not known")
        return self._schema

    def setup_ex(self, init_net: Net, finish_net: Net) -> None:
        """Add what is done once before, and behind, all reading."""

    def read_ex(self, local_init_net: Net, local_finish_net: Net) -> Read:
        """Nets that read; what each thread does before and behind them is added to the other two."""
        net = Net("reader_body")
        return ([net], *self.read(net))

    def read_record_ex(self, local_init_net: Net, local_finish_net: Net) -> Read:
        """`read_ex`, which gives a record."""
        nets, should_stop, fields = self.read_ex(local_init_net, local_finish_net)
        return nets, should_stop, self._as_record(fields)

    def read(self, read_net: Net) -> tuple[Any, Any]:
        """Add operators that read: the blob that says that there was nothing, and the blobs."""
        raise NotImplementedError(f"{type(self).__name__} does not read in one net: use read_ex")

    def reset(self, net: Net) -> None:
        """Add what begins anew."""
        raise NotImplementedError(f"{type(self).__name__} does not begin anew")

    def read_record(self, read_net: Net) -> tuple[Any, Any]:
        """`read`, which gives a record."""
        should_stop, fields = self.read(read_net)
        return should_stop, self._as_record(fields)

    def execution_step(
        self, reader_net_name: str | None = None, external_should_stop: Any = None
    ) -> tuple[ExecutionStep, Any]:
        """A step that reads until there is nothing, or until a blob says so, and the record."""
        net = Net(reader_net_name or "reader")
        should_stop, fields = self.read_record(net)
        if external_should_stop is not None:
            should_stop = net.Or([external_should_stop, should_stop])
        return execution_step(f"{net.Name()}_step", net, should_stop_blob=should_stop), fields

    def _as_record(self, fields: Any) -> Any:
        return fields if self._schema is None or fields is None else from_blob_list(self._schema, fields)


class Writer:
    """What adds operators to nets that write records, one with each run."""

    _schema: Field | None = None

    def schema(self) -> Field | None:
        """The schema of its records, once it has been told one."""
        return self._schema

    def setup_ex(self, init_net: Net, finish_net: Net) -> None:
        """Add what is done once before, and behind, all writing."""
        self.commit(finish_net)

    def write(self, writer_net: Net, fields: Any) -> None:
        """Add operators that write blobs."""
        raise NotImplementedError(f"{type(self).__name__} does not write in one net: use write_ex")

    def write_ex(self, fields: Any, local_init_net: Net, local_finish_net: Net, stop_blob: Any) -> list[Any]:
        """Nets that write; `stop_blob` becomes true where that cannot be."""
        net = Net("write_net")
        self.write(net, fields)
        return [net]

    def write_record(self, writer_net: Net, fields: Any) -> None:
        """`write`, of a record or of blobs."""
        self.write(writer_net, self._blobs(fields))

    def write_record_ex(
        self, fields: Any, local_init_net: Net, local_finish_net: Net, stop_blob: Any = None
    ) -> tuple[list[Any], Any]:
        """`write_ex`, of a record or of blobs: the nets, and the blob that becomes true where that cannot be."""
        stop = BlobReference(local_init_net.NextName("dequeue_status")) if stop_blob is None else stop_blob
        return self.write_ex(self._blobs(fields), local_init_net, local_finish_net, stop), stop

    def commit(self, finish_net: Net) -> None:
        """Add what is done behind all writing."""

    def _blobs(self, fields: Any) -> Any:
        if isinstance(fields, Field):
            self._schema = fields
            return fields.field_blobs()
        return fields


class ReaderBuilder:
    """What makes readers."""

    def setup(self, **kwargs: Any) -> Any:
        """Add what readers need."""
        raise NotImplementedError

    def new_reader(self, **kwargs: Any) -> Reader:
        """One more."""
        raise NotImplementedError


class Pipe:
    """What one part of a program writes to and another reads from: a queue, or a table."""

    def __init__(self, schema: Field | None = None, obj_key: str | None = None) -> None:
        """Its writers' nets note it under `obj_key`, so that it is set up with their tasks."""
        self._schema = schema
        self._key = obj_key
        self._readers = self._writers = 0

    def schema(self) -> Field | None:
        """The schema of its records."""
        return self._schema

    def setup(self, global_init_net: Net) -> Any:
        """Add what makes it."""

    @abstractmethod
    def reader(self) -> Reader:
        """Something that reads from it."""

    @abstractmethod
    def writer(self) -> Writer:
        """Something that writes to it."""

    def num_readers(self) -> int:
        """How many read from it."""
        return self._readers

    def num_writers(self) -> int:
        """How many write to it."""
        return self._writers

    def _new_writer(self, writer_schema: Field | None, writer_init_net: Net) -> None:
        if self._schema is None:
            self._schema = writer_schema
        self._writers += 1
        if self._key is not None:
            writer_init_net.add_attribute(self._key, self)

    def _new_reader(self, reader_init_net: Net) -> None:
        self._readers += 1
        if self._key is not None:
            reader_init_net.add_attribute(self._key, self)


class CounterReader(Reader):
    """Reads 0, 1, 2, and so on, without end."""

    def __init__(self) -> None:
        super().__init__(Struct(("iter", np.int64)))
        self._counter: Any = None
        self._should_stop: Any = None

    def setup_ex(self, init_net: Net, finish_net: Net) -> None:
        """Make the counter, once."""
        if self._counter is None:
            self._counter = init_net.CreateCounter([], init_count=0)
            self._should_stop = _false(init_net)

    def read_ex(self, local_init_net: Net, local_finish_net: Net) -> Read:
        """A net that counts."""
        net = Net("limited_reader_counter")
        return [net], self._should_stop, [net.CountUp([self._counter], 1)]


class ReaderWithLimitBase(Reader):
    """Reads from another reader, at most until a condition is met."""

    def __init__(self, reader: Reader) -> None:
        super().__init__(reader._schema)
        self.reader = reader
        self.net = Net("reader_with_limit")
        self._data_finished = self.net.AddExternalInput(self.net.NextName("data_finished"))

    def data_finished(self) -> Any:
        """The blob that says, once reading has ended, that the other reader had nothing more."""
        return self._data_finished

    def setup_ex(self, init_net: Net, finish_net: Net) -> None:
        """Set up the other reader and the condition."""
        _false(init_net, self._data_finished)
        self.reader.setup_ex(init_net, finish_net)
        self.setup_limiter(init_net, finish_net)

    def setup_limiter(self, init_net: Net, finish_net: Net) -> None:
        """Add what the condition needs."""
        raise NotImplementedError

    def check_limiter_condition(self, stop_condition_net: Net) -> Any:
        """Add what checks the condition: a blob that is true where it is met."""
        raise NotImplementedError

    def read_ex(self, local_init_net: Net, local_finish_net: Net) -> Read:
        """The condition first, then the nets of the other reader, then whether that was at its end."""
        condition = Net("limited_reader_condition")
        should_stop = self.check_limiter_condition(condition)
        nets, at_end, fields = self.reader.read_ex(local_init_net, local_finish_net)
        self._schema = self.reader._schema
        check = Net("limited_reader_post")
        check.Copy(at_end, should_stop)
        check.Or([self._data_finished, at_end], [self._data_finished])
        return [condition, *nets, check], should_stop, fields


class ReaderWithLimit(ReaderWithLimitBase):
    """Reads at most `num_iter` times after each set-up, or as often as there is something where that is None."""

    def __init__(self, reader: Reader, num_iter: int | None = 1) -> None:
        super().__init__(reader)
        self.num_iter = num_iter
        self.counter = None if num_iter is None else self.net.AddExternalInput(self.net.NextName("counter"))

    def setup_limiter(self, init_net: Net, finish_net: Net) -> None:
        """A counter."""
        if self.counter is not None:
            init_net.CreateCounter([], [self.counter], init_count=int(self.num_iter or 0))

    def check_limiter_condition(self, stop_condition_net: Net) -> Any:
        """Counted down."""
        if self.counter is not None:
            return stop_condition_net.CountDown([self.counter], 1)
        return _false(stop_condition_net)


class ReaderWithTimeLimit(ReaderWithLimitBase):
    """Reads for so many seconds after each set-up, or as long as there is something where they are 0."""

    def __init__(self, reader: Reader, duration: float = 0) -> None:
        super().__init__(reader)
        self.duration = duration
        self.timer = self.net.AddExternalInput(self.net.NextName("timer"))
        self._limit = self.net.AddExternalInput(self.net.NextName("limit"))

    def setup_limiter(self, init_net: Net, finish_net: Net) -> None:
        """A timer."""
        if self.duration > 0:
            init_net.TimerBegin([], [self.timer], counter_name="epoch_timer")
            init_net.ConstantFill([], [self._limit], shape=[], value=int(self.duration * 1e9), dtype=TensorProto.INT64)

    def check_limiter_condition(self, stop_condition_net: Net) -> Any:
        """That it has run for so long."""
        if self.duration > 0:
            return stop_condition_net.GE([stop_condition_net.TimerGet([self.timer]), self._limit], 1)
        return _false(stop_condition_net)


class CompositeReader(Reader):
    """Reads a record of each of several readers, until one of them has nothing more."""

    def __init__(self, names: Sequence[str], readers: Sequence[Reader]) -> None:
        """The records are fields of these names."""
        super().__init__(Struct(*((name, reader.schema()) for name, reader in zip(names, readers, strict=True))))
        self._readers = list(readers)

    def setup_ex(self, init_net: Net, finish_net: Net) -> None:
        """Set up all readers."""
        for reader in self._readers:
            reader.setup_ex(init_net, finish_net)

    def reset(self, net: Net) -> None:
        """Begin all readers anew."""
        for reader in self._readers:
            reader.reset(net)

    def read_ex(self, local_init_net: Net, local_finish_net: Net) -> Read:
        """The nets of the readers, and behind those of each whether it was at its end."""
        nets: list[Any] = []
        fields: list[Any] = []
        should_stop = _false(local_init_net)
        for reader in self._readers:
            of_reader, at_end, record = reader.read_record_ex(local_init_net, local_finish_net)
            stop = Net("composite_stop")
            stop.Copy(at_end, should_stop)
            nets += [*of_reader, stop]
            fields += record.field_blobs()
        return nets, should_stop, fields


def _false(net: Net, blob: Any = None) -> Any:
    return net.ConstantFill([], 1 if blob is None else [blob], shape=[], value=False, dtype=TensorProto.BOOL)
