"""TextFileReader: rows of a text file, with tabs between the fields (`caffe2.python.text_file_reader`)."""

from __future__ import annotations

from typing import Any

from dagexec.caffe2.dataio import Reader
from dagexec.caffe2.net import Net
from dagexec.caffe2.references import as_list
from dagexec.caffe2.schema import Scalar, Struct, data_type_for_dtype
from dagexec.errors import Caffe2Error

__all__ = ["TextFileReader"]


class TextFileReader(Reader):
    """Reads batches of rows, whose columns are strings or float32."""

    def __init__(self, init_net: Net, filename: str, schema: Struct, num_passes: int = 1, batch_size: int = 1) -> None:
        """The file is opened by `init_net`. Raises Caffe2Error for a schema with other fields than columns."""
        if not all(isinstance(field, Scalar) for _, field in schema.get_children()):
            raise Caffe2Error("a text file has columns only: its schema is a Struct of Scalars")
        super().__init__(schema)
        types = [data_type_for_dtype(dtype) for dtype in schema.field_types()]
        self._reader = init_net.CreateTextFileReader([], filename=filename, num_passes=num_passes, field_types=types)
        self._batch_size = batch_size

    def read(self, read_net: Net) -> tuple[Any, Any]:
        """Add what reads a batch; that there is none is that the first column is empty."""
        count = len(self.schema().field_names())
        fields = as_list(read_net.TextFileReaderRead([self._reader], count, batch_size=self._batch_size))
        return read_net.IsEmpty([fields[0]]), fields
