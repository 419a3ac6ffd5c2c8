"""Blob: a named slot of a workspace that holds one object of any type, most often a Tensor."""

from __future__ import annotations

from typing import TypeVar

from dagexec.core.device import CPU, Device
from dagexec.core.tensor import Tensor, advance_binding_epoch
from dagexec.errors import BlobTypeError, MissingBlobError

T = TypeVar("T")


class Blob:
    """A slot with a name. Operators keep the Blob; what it holds may be set later, and replaced between runs."""

    __slots__ = ("_value", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self._value: object = None

    @property
    def value(self) -> object:
        """What the blob holds, or None. Whoever sets it makes the prepared steps that use the blob out of date."""
        return self._value

    @value.setter
    def value(self, value: object) -> None:
        self._value = value
        advance_binding_epoch()

    def get(self, kind: type[T]) -> T:
        """The object, which must be a `kind`. Raises MissingBlobError when empty, BlobTypeError for another type."""
        if isinstance(self.value, kind):
            return self.value
        if self.value is None:
            raise MissingBlobError(f"blob {self.name!r} is empty; expected a {kind.__name__}")
        raise BlobTypeError(f"blob {self.name!r} holds a {type(self.value).__name__}; expected a {kind.__name__}")

    def tensor(self, device: Device = CPU) -> Tensor:
        """The tensor held here; an empty blob is given a new, empty tensor on `device` first."""
        if self.value is None:
            self.value = Tensor(device)
        return self.get(Tensor)

    def __repr__(self) -> str:
        return f"Blob({self.name!r}, {self.value!r})"
