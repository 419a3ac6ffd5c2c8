"""Blobs as records of a database: BlobProtos as Caffe2 writes them, long tensors in chunks.

A tensor of more than `chunk_size` elements becomes several records with keys `<name>#%<k>`; each has the shape of the
whole tensor and the segment of its elements. They may be read in any order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import field
from typing import Any

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from dagexec.core.dtypes import STRING, TypeMeta
from dagexec.core.proto import BlobProto
from dagexec.errors import StorageError
from dagexec.platform.host_memory import check_fits
from dagexec.platform.records import dataclass
from dagexec.storage.tensor_proto import Segment, decode_tensor, encode_tensor
from dagexec.storage.wire import LENGTH, WireError, fields, length_field

Array = npt.NDArray[Any]

CHUNK_SEPARATOR = "#%"
DEFAULT_CHUNK_SIZE = 1_000_000
"""Elements in a record, as Caffe2's flag `caffe2_tensor_chunk_size` has it by default."""

STRING_TYPE = "std::string"
_TENSOR_TYPE = "Tensor"
_TENSOR_FIELD = 3


@dataclass(frozen=True, slots=True)
class BlobRecord:
    """The content of one record of a blob: some of a tensor's elements, or the bytes of a string."""

    name: str
    content: Segment | bytes
    chunks: int


def encode_blob(name: str, array: Array, chunk_size: int = -1) -> Iterator[tuple[str, bytes]]:
    """(key, BlobProto) of each record of a tensor blob.

    `chunk_size` is the most elements in a record; -1 for the default, 0 for no limit. Raises ShapeError for a dtype
    that tensors do not hold.
    """
    packed = np.ascontiguousarray(array).reshape(array.shape)
    limit = DEFAULT_CHUNK_SIZE if chunk_size < 0 else chunk_size or max(1, packed.size)
    chunks = max(1, -(-packed.size // limit))
    for chunk in range(chunks):
        head = BlobProto(name=name, type=_TENSOR_TYPE)
        begin, end = chunk * limit, min(packed.size, (chunk + 1) * limit)
        if chunks > 1:
            head.content_num_chunks, head.content_chunk_id = chunks, chunk
            tensor = encode_tensor(name, packed, begin, end)
        else:
            tensor = encode_tensor(name, packed)
        key = name if chunks == 1 else f"{name}{CHUNK_SEPARATOR}{chunk}"
        yield key, head.SerializeToString() + length_field(_TENSOR_FIELD, tensor)


def encode_string(name: str, content: bytes) -> bytes:
    """The BlobProto of a string."""
    return BlobProto(name=name, type=STRING_TYPE, content=content).SerializeToString()


def decode_blob(value: bytes, most_bytes: int) -> BlobRecord:
    """The content of a BlobProto. Raises StorageError.

    `most_bytes` is the size of the database it is in, see `decode_tensor`.
    """
    tensors: list[memoryview] = []
    rest: list[memoryview] = []
    head = BlobProto()
    try:
        for number, kind, content, whole in fields(memoryview(value)):
            if number == _TENSOR_FIELD and kind == LENGTH:
                tensors.append(content)
            else:
                rest.append(whole)
        head.ParseFromString(b"".join(rest))
    except (WireError, DecodeError) as error:
        raise StorageError(f"not a BlobProto: {error}") from None
    name = head.name if isinstance(head.name, str) else repr(head.name)
    if head.type == STRING_TYPE:
        return BlobRecord(name, head.content, 0)
    if not tensors:
        raise StorageError(
            f"blob {name!r}: holds a {head.type or 'value of unknown type'}; expected a Tensor or a string"
        )
    message = tensors[0] if len(tensors) == 1 else memoryview(b"".join(tensors))  # one message in pieces: they merge
    return BlobRecord(name, decode_tensor(message, most_bytes), head.content_num_chunks)


@dataclass
class Assembly:
    """A tensor whose segments arrive in any order.

    Attributes:
        array: the elements so far, in the shape of the tensor.
    """

    name: str
    shape: tuple[int, ...]
    meta: TypeMeta
    chunks: int
    array: Array
    _segments: list[tuple[int, int]] = field(default_factory=list)
    _arrived: int = 0

    @staticmethod
    def of(record: BlobRecord, segment: Segment) -> Assembly:
        """Room for the tensor of the first record. Raises ResourceError when it does not fit."""
        check_fits(math.prod(segment.shape) * segment.meta.itemsize, f"blob {record.name!r}, {segment.meta}")
        if segment.meta is STRING:
            array: Array = np.full(segment.shape, b"", np.object_)
        else:
            array = np.empty(segment.shape, segment.meta.numpy)
        return Assembly(record.name, segment.shape, segment.meta, record.chunks, array)

    @property
    def is_complete(self) -> bool:
        """True when as many elements have arrived as there are."""
        return bool(self._segments) and self._arrived == self.array.size

    def add(self, segment: Segment, chunks: int) -> None:
        """Put a segment in its place. Raises StorageError for one of another tensor, or that overlaps another."""
        if (segment.shape, segment.meta, chunks) != (self.shape, self.meta, self.chunks):
            raise StorageError(
                f"blob {self.name!r}: its records are inconsistent: {self.meta}{list(self.shape)} in {self.chunks} "
                f"chunks, and {segment.meta}{list(segment.shape)} in {chunks}"
            )
        if self.is_complete:
            raise StorageError(f"blob {self.name!r}: elements {segment.begin} to {segment.end} occur twice")
        self.array.reshape(-1)[segment.begin : segment.end] = segment.values
        self._segments.append((segment.begin, segment.end))
        self._arrived += segment.end - segment.begin

    def finish(self) -> Array:
        """The tensor. Raises StorageError, saying what is missing, unless each element arrived once."""
        reached = 0
        for begin, end in sorted(self._segments):
            if begin < reached:
                raise StorageError(f"blob {self.name!r}: elements {begin} to {min(end, reached)} occur twice")
            if begin > reached:
                break
            reached = end
        if reached != self.array.size or not self._segments:
            missing = f"of {self.chunks} chunks {len(self._segments)} are there; " if self.chunks else ""
            raise StorageError(
                f"blob {self.name!r}: {missing}elements from {reached:,} on of {self.array.size:,} are missing"
            )
        return self.array
