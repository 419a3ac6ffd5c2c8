"""Variant: what a blob may hold in place of a tensor: a sequence of arrays, or an optional array or sequence.

The arrays are nobody's to write any more, so variants share them: to copy a sequence is to copy references. A blob
keeps its Variant from run to run, so that steps which hold the blob stay valid; only the content changes.
"""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from dagexec.core.blob import Blob
from dagexec.core.tensor import Tensor
from dagexec.errors import BlobTypeError, MissingBlobError

Array = npt.NDArray[Any]
Content = Array | tuple[Array, ...] | None


class Variant:
    """A tuple of arrays (a sequence), or an array, or None (an optional without a value)."""

    __slots__ = ("content",)

    def __init__(self, content: Content = None) -> None:
        self.content = content

    def __repr__(self) -> str:
        return f"Variant({described(self.content)})"


def described(content: Content) -> str:
    """What a variant holds, for messages."""
    if content is None:
        return "nothing"
    if isinstance(content, tuple):
        return f"a sequence of {len(content)}"
    return f"{content.dtype}{list(content.shape)}"


def set_content(blob: Blob, content: Content) -> None:
    """Have `blob` hold a variant with this content, in place of whatever it held."""
    if isinstance(blob.value, Variant):
        blob.value.content = content
    else:
        blob.value = Variant(content)


def content_of(blob: Blob) -> Content:
    """What `blob` holds: of a tensor, a copy of its values. Raises MissingBlobError, or BlobTypeError for a handle."""
    value = blob.value
    if isinstance(value, Variant):
        return value.content
    if isinstance(value, Tensor):
        return value.fetch()
    if value is None:
        raise MissingBlobError(f"blob {blob.name!r} is empty")
    raise BlobTypeError(f"blob {blob.name!r} holds a {type(value).__name__}; expected a tensor, sequence or optional")


def tensor_in(blob: Blob) -> Tensor:
    """The tensor of `blob`, a new one in place of a variant."""
    if isinstance(blob.value, Variant):
        blob.value = None
    return blob.tensor()


def assign(target: Blob, source: Blob) -> None:
    """Have `target` hold what `source` holds: a tensor's values are copied, a variant's content is shared."""
    value = source.value
    if isinstance(value, Variant):
        set_content(target, value.content)
        return
    tensor = source.get(Tensor)
    tensor_in(target).feed(tensor.array)
