"""CreateTextFileReader and TextFileReaderRead: rows of a text file, whose fields are separated by tabs, in batches."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dagexec.core import dtypes
from dagexec.core.dtypes import FLOAT32, STRING, TypeMeta
from dagexec.core.gradient import no_gradient
from dagexec.core.io_access import IO
from dagexec.core.operator import Operator, Step
from dagexec.core.registry import new_operator
from dagexec.core.schema import UNBOUNDED
from dagexec.errors import ArgumentError, ShapeError, StorageError
from dagexec.ops.base.blocks import Array
from dagexec.ops.families.storage.databases import StorageOperator, required_path
from dagexec.ops.families.storage.loading import store
from dagexec.platform.forking import ProcessLock


class TextFileReader:
    """A place in a text file. Threads may share one; each row goes to one of them.

    Attributes:
        types: of the fields of a row, strings or float32.
    """

    def __init__(self, path: Path, types: tuple[TypeMeta, ...], passes: int) -> None:
        """At the first row; the last one of the file is followed by the first until `passes` are over."""
        self.types = types
        self._path = path
        self._passes = passes
        self._offset = self._row = 0
        self._lock = ProcessLock()

    def read(self, rows: int) -> list[Array]:
        """The next rows, an array for each field; fewer, and then none, at the end. Raises StorageError."""
        with self._lock.own:
            lines = self._lines(rows)
        columns: list[Array] = []
        for place, meta in enumerate(self.types):
            column = np.empty(len(lines), meta.numpy)
            for index, (number, fields) in enumerate(lines):
                try:
                    column[index] = fields[place] if meta is STRING else float(fields[place])
                except ValueError:
                    raise StorageError(f"{self._path}: row {number}: not a number: {fields[place][:80]!r}") from None
            columns.append(column)
        return columns

    def _lines(self, rows: int) -> list[tuple[int, list[bytes]]]:
        """The next rows with their numbers; the lock is held. The file is not open in between."""
        lines: list[tuple[int, list[bytes]]] = []
        row, passes = self._row, self._passes
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                while len(lines) < rows and passes:
                    line = file.readline()
                    if not line:
                        passes = passes - 1 if row else 0
                        row = file.seek(0)
                        continue
                    row += 1
                    fields = line.removesuffix(b"\n").split(b"\t")
                    if len(fields) != len(self.types):
                        raise StorageError(
                            f"{self._path}: row {row}: expected {len(self.types)} fields, found {len(fields)}"
                        )
                    lines.append((row, fields))
                self._offset, self._row, self._passes = file.tell(), row, passes
        except OSError as error:
            raise StorageError(f"{self._path}: cannot be read: {error}") from None
        return lines


@new_operator(
    "CreateTextFileReader",
    infer=None,
    doc="Opens a text file of rows, whose fields are separated by tabs. Every run begins at the first row.",
    output_names=("reader",),
    args={
        "filename": "the path",
        "num_passes": "how often the rows are read (default: 1)",
        "field_types": "the type of each field: STRING or FLOAT",
    },
    required_args=("filename", "field_types"),
    effects=True,
    does_io=IO.READ_FOLDER,
)
class CreateTextFileReader(StorageOperator):
    """A reader in a blob."""

    def prepare(self) -> Step:
        """Put a new reader into the output blob."""
        path = self.place(required_path(self.arguments, "filename", self.label))
        types = tuple(dtypes.from_number(number) for number in self.arguments.ints("field_types"))
        passes = self.arguments.int("num_passes", 1)
        if not types or not set(types) <= {STRING, FLOAT32} or passes < 1:
            raise ArgumentError(
                f"{self.label}: expected field_types STRING or FLOAT, and 1 or more passes; found "
                f"{', '.join(map(str, types)) or 'no types'}, {passes} passes"
            )

        def create() -> None:
            if not path.is_file():
                raise StorageError(f"{self.label}: there is no file {str(path)!r}")
            self.output_blobs[0].value = TextFileReader(path, types, passes)

        return create


@new_operator(
    "TextFileReaderRead",
    outputs=(1, UNBOUNDED),
    infer=None,
    doc="The next rows of a text file, an output for each field; fewer, and then none, at its end.",
    input_names=("reader",),
    output_names=("fields...",),
    args={"batch_size": "rows at once (default: 1)"},
    handles=(0,),
    mutates=(0,),
    effects=True,
    reproducible=False,
)
class TextFileReaderRead(Operator):
    """Rows of a text."""

    def prepare(self) -> Step:
        """Read a batch."""
        rows = self.arguments.int("batch_size", 1)
        if rows < 1:
            raise ArgumentError(f"{self.label}: argument 'batch_size' must be 1 or more, found {rows}")

        def read() -> None:
            reader = self.handle(0, TextFileReader)
            if len(reader.types) != len(self.output_blobs):
                raise ShapeError(
                    f"{self.label}: the rows have {len(reader.types)} fields, not {len(self.output_blobs)}"
                )
            try:
                columns = reader.read(rows)
            except StorageError as error:
                raise StorageError(f"{self.label}: {error}") from None
            for index, column in enumerate(columns):
                store(self, index, column)

        return read


no_gradient("CreateTextFileReader", "TextFileReaderRead")
