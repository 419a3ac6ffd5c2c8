"""Dataset: a table of records in blobs, with readers and writers of it (`caffe2.python.dataset`)."""

from __future__ import annotations

from typing import Any, Self

import numpy as np

from dagexec.caffe2.creation import given_tensor
from dagexec.caffe2.dataio import Reader, Writer
from dagexec.caffe2.net import Net
from dagexec.caffe2.references import BlobReference, as_list
from dagexec.caffe2.schema import Field, InitEmptyRecord, from_blob_list, from_column_list
from dagexec.caffe2.scope import NameScope
from dagexec.errors import Caffe2Error

__all__ = ["Const", "Dataset", "DatasetRandomReader", "DatasetReader", "DatasetWriter"]


class Dataset:
    """A table.

    Attributes:
        schema: of its records.
        name: what its cursors are called after.
        field_blobs: a blob for each column; None until there are some.
    """

    def __init__(self, fields: Any, name: str | None = None) -> None:
        """Of a schema or of the names of columns; a record's blobs are those of the table."""
        self.schema: Any = fields if isinstance(fields, Field) else from_column_list(list(fields))
        self.name = name or "dataset"
        self.fields = self.schema.field_names()
        self.field_types = self.schema.field_types()
        self.field_blobs: list[Any] | None = self.schema.field_blobs() if self.schema.has_blobs() else None

    def trim(self, net: Net, multiple_of: int) -> None:
        """Add what leaves as many rows as are a multiple of a number."""
        blobs = self.get_blobs()
        net.TrimDataset(blobs, blobs, fields=self.fields, multiple_of=multiple_of)

    def init_empty(self, init_net: Net) -> None:
        """Add what makes the blobs, without a row."""
        self.field_blobs = InitEmptyRecord(init_net, self.schema.clone_schema(), enforce_types=True).field_blobs()

    def init_from_dataframe(self, net: Net, dataframe: Any) -> None:
        """Add what makes the blobs, of the columns of a table of pandas with the names of the fields."""
        columns = [np.asarray(dataframe[name]) for name in self.fields]
        blobs = [net.NextScopedBlob(name) for name in self.fields]
        net.extend_ops([given_tensor(blob, column) for blob, column in zip(blobs, columns, strict=True)])
        self.field_blobs = blobs

    def get_blobs(self) -> list[Any]:
        """The blobs of the columns. Raises Caffe2Error where there are none yet."""
        if self.field_blobs is None:
            raise Caffe2Error(f"data set {self.name!r} has no blobs: make them with init_empty")
        return self.field_blobs

    def content(self) -> Any:
        """The blobs as a record."""
        return from_blob_list(self.schema, self.get_blobs())

    def field_names(self) -> list[str]:
        """The names of the columns."""
        return list(self.fields)

    def reader(
        self,
        init_net: Net | None = None,
        cursor_name: str | None = None,
        batch_size: int = 1,
        enforce_batch_size: bool = False,
    ) -> DatasetReader:
        """What reads batches one after another; its cursor is made by `init_net`, or when the reader is set up."""
        reader = DatasetReader(self, cursor_name, batch_size=batch_size, enforce_batch_size=int(enforce_batch_size))
        return reader.made_by(init_net)

    def random_reader(
        self,
        init_net: Net | None = None,
        indices: Any = None,
        cursor_name: str | None = None,
        batch_size: int = 1,
        loop_over: bool = False,
        enforce_batch_size: bool = False,
    ) -> DatasetRandomReader:
        """What reads rows in the order of `indices`, or that of its `sort_and_shuffle`, after its `computeoffset`."""
        sizes = {"batch_size": batch_size, "enforce_batch_size": int(enforce_batch_size), "loop_over": int(loop_over)}
        reader = DatasetRandomReader(self, cursor_name, **sizes)
        reader.indices = indices
        return reader.made_by(init_net)

    def writer(self, init_net: Net | None = None) -> DatasetWriter:
        """What appends records; its mutex is made by `init_net`, or when the writer is set up."""
        writer = DatasetWriter(self.content())
        if init_net is not None:
            writer.setup_ex(init_net, None)
        return writer


class DatasetReader(Reader):
    """Reads a table with a cursor.

    Attributes:
        cursor: the blob of the cursor, once it is made.
    """

    def __init__(self, dataset: Dataset, name: str | None, **sizes: int) -> None:
        super().__init__(dataset.content())
        self.name = name or f"{dataset.name}_cursor"
        self.cursor: Any = None
        self._sizes = sizes

    def made_by(self, init_net: Net | None) -> Self:
        """Itself, with a cursor where there is a net that makes it."""
        if init_net is not None:
            self.setup_ex(init_net, None)
        return self

    def setup_ex(self, init_net: Any, finish_net: Any) -> None:
        """Make the cursor, once."""
        if self.cursor is None:
            names = self.schema().field_names()
            self.cursor = init_net.CreateTreeCursor([], init_net.NextScopedBlob(self.name), fields=names)

    def read(self, read_net: Net) -> tuple[Any, Any]:
        """Add what reads a batch; that there is none is that the first column is empty."""
        return self._read(read_net, "ReadNextBatch", [self._made_cursor()])

    def reset(self, net: Net) -> None:
        """Add what goes back to the first row."""
        net.ResetCursor([self._made_cursor()], [])

    def _read(self, net: Net, op_type: str, blobs: list[Any]) -> tuple[Any, Any]:
        names = self.schema().field_names()
        with NameScope(net.NextName(self.name)):
            made = getattr(net, op_type)([*blobs, *self.schema().field_blobs()], names, **self._sizes)
            fields = as_list(made)
            return net.IsEmpty([fields[0]]), fields

    def _made_cursor(self) -> Any:
        if self.cursor is None:
            raise Caffe2Error(f"reader {self.name!r} has no cursor yet: give it a net that makes it, or set it up")
        return self.cursor


class DatasetRandomReader(DatasetReader):
    """Reads a table in any order.

    Attributes:
        indices, offsets: blobs of the order, and of where rows begin.
    """

    indices: Any = None
    offsets: Any = None

    def computeoffset(self, net: Net) -> None:
        """Add what finds where rows begin."""
        self.offsets = net.ComputeOffset([self._made_cursor(), *self.schema().field_blobs()], "offsets")

    def sort_and_shuffle(
        self, net: Net, sort_by_field: str | None = None, shuffle_size: int = 1, batch_size: int = 1
    ) -> None:
        """Add what makes an order."""
        field = -1 if sort_by_field is None else self.schema().field_names().index(sort_by_field)
        self.indices = net.SortAndShuffle(
            [self._made_cursor(), *self.schema().field_blobs()],
            "indices",
            sort_by_field_idx=field,
            shuffle_size=shuffle_size,
            batch_size=batch_size,
        )

    def read(self, read_net: Net) -> tuple[Any, Any]:
        """Add what reads the rows that the next indices name. Raises Caffe2Error before there are any."""
        if self.indices is None or self.offsets is None:
            raise Caffe2Error(f"reader {self.name!r} needs indices, and offsets, which computeoffset makes")
        return self._read(read_net, "ReadRandomBatch", [self._made_cursor(), self.indices, self.offsets])


class DatasetWriter(Writer):
    """Appends records to a table."""

    def __init__(self, content: Any) -> None:
        self._content = content
        self.mutex: Any = None

    def setup_ex(self, init_net: Any, finish_net: Any) -> None:
        """Make the mutex, once."""
        if self.mutex is None:
            self.mutex = init_net.CreateMutex([])

    def write(self, writer_net: Net, fields: Any) -> None:
        """Add what checks the record and appends it. Raises Caffe2Error before it was set up."""
        if self.mutex is None:
            raise Caffe2Error("the writer of a data set has no mutex yet: give it a net that makes it, or set it up")
        blobs, names = self._content.field_blobs(), self._content.field_names()
        added = fields.field_blobs() if isinstance(fields, Field) else list(fields)
        if len(added) != len(blobs):
            raise Caffe2Error(f"expected blobs for {names}, found {len(added)}")
        writer_net.CheckDatasetConsistency(added, [], fields=names)
        writer_net.AtomicAppend([self.mutex, *blobs, *added], blobs)


def Const(net: Net, value: Any, dtype: Any = None, name: Any = None) -> BlobReference:
    """A constant of a net."""
    blob: BlobReference = net.Const(value, name, dtype)
    return blob
