"""Names of blobs as objects, which know the net that made them: `x.Relu()` adds an operator there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from dagexec.caffe2 import scope
from dagexec.core.gradient import Gradient, SparseGradient
from dagexec.core.registry import is_registered


class MakesOperators(Protocol):
    """What a reference asks of its net."""

    def _add_operator(self, op_type: str, inputs: Any, outputs: Any, **kwargs: Any) -> Any: ...


class BlobReference:
    """The name of a blob, and the net in which it was made. It is equal to the name as text."""

    def __init__(self, name: str | BlobReference, net: Any = None) -> None:
        self._name = str(name)
        self._net = net

    @property
    def net(self) -> Any:
        """The net that made it, or None."""
        return self._net

    def Net(self) -> Any:
        """The net that made it, or None."""
        return self._net

    def GetNameScope(self) -> str:
        """The part of the name up to the last `/`."""
        return self._name[: self._name.rfind(scope._NAMESCOPE_SEPARATOR) + 1]

    def GetUnscopedName(self) -> str:
        """The part of the name behind the last `/`."""
        return self._name[self._name.rfind(scope._NAMESCOPE_SEPARATOR) + 1 :]

    def __str__(self) -> str:
        return self._name

    def __repr__(self) -> str:
        return f'BlobReference("{self._name}")'

    def __hash__(self) -> int:
        return hash(self._name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str | BlobReference) and self._name == str(other)

    def __lt__(self, other: str | BlobReference) -> bool:
        return self._name < str(other)

    def __add__(self, suffix: str) -> BlobReference:
        return BlobReference(self._name + suffix, self._net)

    def __radd__(self, prefix: str) -> BlobReference:
        return BlobReference(prefix + self._name, self._net)

    def __getattr__(self, op_type: str) -> Callable[..., Any]:
        if op_type.startswith("_"):
            raise AttributeError(op_type)
        net: MakesOperators | None = self._net
        if net is None:
            raise AttributeError(f"blob {self._name!r} belongs to no net, so it has no operator {op_type!r}")
        if not is_registered(op_type):
            raise AttributeError(f"{op_type!r} is neither a method of a blob nor an operator type")

        def add(inputs: Any = (), outputs: Any = None, **kwargs: Any) -> Any:
            return net._add_operator(op_type, [self, *as_list(inputs)], outputs, **kwargs)

        return add

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self)})


def ScopedName(name: str) -> str:
    """The full name of `name` in the name scope that is open."""
    return scope.CurrentNameScope() + name


def ScopedBlobReference(name: str, net: Any = None) -> BlobReference:
    """The blob that is called `name` in the name scope that is open."""
    return BlobReference(ScopedName(name), net)


class GradientSlice(NamedTuple):
    """A gradient that is zero but in some rows: a blob of row numbers, and one of the rows."""

    indices: Any
    values: Any


def plain_gradient(gradient: Any) -> Gradient:
    """A gradient, given as text, reference or GradientSlice, as names."""
    if isinstance(gradient, GradientSlice):
        return SparseGradient(str(gradient.indices), str(gradient.values))
    return str(gradient)


def as_list(blobs: Any) -> list[Any]:
    """One blob, several or none as a list."""
    if blobs is None:
        return []
    return [blobs] if isinstance(blobs, str | BlobReference) else list(blobs)


def as_references(blobs: Any, net: Any = None) -> list[BlobReference]:
    """Blobs as references; text is a name in the name scope that is open, and a reference stays as it is."""
    return [_reference(blob, net) for blob in as_list(blobs)]


def _reference(blob: Any, net: Any) -> BlobReference:
    if isinstance(blob, BlobReference):
        return blob
    if isinstance(blob, bytes):
        blob = blob.decode()
    if not isinstance(blob, str):
        raise TypeError(f"expected the name of a blob or a BlobReference, found {blob!r:.80}")
    return ScopedBlobReference(blob, net)
