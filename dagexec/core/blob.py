"""Blob: a named slot of a workspace that holds one object of any type, most often a Tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from dagexec.core.device import CPU, Device
from dagexec.core.tensor import Tensor, advance_binding_epoch
from dagexec.core.variant import Content, Variant
from dagexec.errors import BlobTypeError, MissingBlobError

T = TypeVar("T")


class Blob:
    """A slot with a name. Operators keep the Blob; its object may be set later, and replaced between runs."""

    __slots__ = ("_value", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self._value: object = None

    @property
    def value(self) -> object:
        """The object of the blob, or None. Setting it invalidates the prepared steps that use the blob."""
        return self._value

    @value.setter
    def value(self, value: object) -> None:
        self._value = value
        advance_binding_epoch()

    def get(self, kind: type[T]) -> T:
        """The object, which must be a `kind`. Raises MissingBlobError when empty, BlobTypeError for another type."""
        value = self._value
        if isinstance(value, kind):
            return value
        if value is None:
            raise MissingBlobError(f"blob {self.name!r} is empty; expected a {kind.__name__}")
        raise BlobTypeError(f"blob {self.name!r} holds a {type(value).__name__}; expected a {kind.__name__}")

    def tensor(self, device: Device = CPU) -> Tensor:
        """The tensor held here; an empty blob is given a new, empty tensor on `device` first."""
        value = self._value
        if isinstance(value, Tensor):
            return value
        if value is None:
            self.value = Tensor(device)
        return self.get(Tensor)

    def __repr__(self) -> str:
        return f"Blob({self.name!r}, {self.value!r})"


def set_content(blob: Blob, content: Content) -> None:
    """Have `blob` hold a variant with this content, in place of whatever it held."""
    if isinstance(blob.value, Variant):
        blob.value.content = content
    else:
        blob.value = Variant(content)


def set_made(blob: Blob, make: Callable[[], Content]) -> None:
    """Have `blob` hold a variant whose content is made on demand."""
    if not isinstance(blob.value, Variant):
        blob.value = Variant()
    blob.get(Variant).set_made(make)


def content_of(blob: Blob) -> Content:
    """The content of `blob`; a copy of a tensor's values. Raises MissingBlobError, or BlobTypeError for a handle."""
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
    """Assign the object of `source` to `target`: a tensor's values are copied, a variant's content is shared."""
    value = source.value
    if isinstance(value, Variant):
        set_content(target, value.content)
        return
    tensor = source.get(Tensor)
    tensor_in(target).feed(tensor.array)
