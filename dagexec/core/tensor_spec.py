"""TensorSpec: what somebody declares of a tensor: its element type, and sizes that are fixed, named or open.

As text: "float32[N, 3, ?, ?]" has four axes, of which the first has a size named N; "uint8[...]" has any number of
axes, and "any[4]" elements of any type.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Union

from dagexec.core.dtypes import TypeMeta, from_name, from_numpy
from dagexec.core.model import InputInfo
from dagexec.errors import ArgumentError, DagexecError
from dagexec.platform.records import dataclass

Size = int | str | None
"""Of an axis: a number, the name of a size, or None for any."""

SpecLike = Union["TensorSpec", InputInfo, str, tuple[object, Sequence[Size] | None]]
"""What `TensorSpec.of` takes: also a text, or a dtype with a shape (None for any)."""

_TEXT = re.compile(r"\s*([A-Za-z]\w*)\s*\[(.*)\]\s*", re.DOTALL)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A declared type.

    Attributes:
        dtype: the element type; None for any.
        shape: the sizes: numbers, names that stand for one size wherever they occur, None for any size; None in place
            of all if even their number is open.
    """

    dtype: TypeMeta | None = None
    shape: tuple[Size, ...] | None = None

    def __post_init__(self) -> None:
        """Raises ArgumentError for a size that is none."""
        for size in self.shape or ():
            is_size = isinstance(size, int) and not isinstance(size, bool) and size >= 0
            if not (size is None or is_size or (isinstance(size, str) and size.isidentifier())):
                raise ArgumentError(f"{size!r} is no size: expected a number of 0 or more, a name or None")

    @classmethod
    def of(cls, given: SpecLike) -> TensorSpec:
        """The spec that `given` says. Raises ArgumentError for anything else."""
        if isinstance(given, TensorSpec):
            return given
        if isinstance(given, InputInfo):
            return cls(given.dtype, given.shape)
        if isinstance(given, str):
            return cls._parsed(given)
        if isinstance(given, tuple) and len(given) == 2:
            dtype, shape = given
            if shape is None or (isinstance(shape, Sequence) and not isinstance(shape, str)):
                return cls(type_meta(dtype), None if shape is None else tuple(shape))
        raise ArgumentError(f'{given!r:.80} is no type: expected a text such as "float32[N, 3]", or (dtype, shape)')

    @classmethod
    def _parsed(cls, text: str) -> TensorSpec:
        found = _TEXT.fullmatch(text)
        if found is None:
            raise ArgumentError(f'{text!r:.80} is no type: expected a text such as "float32[N, 3, ?]"')
        dtype = None if found[1] == "any" else from_name(found[1])
        inside = found[2].strip()
        if inside == "...":
            return cls(dtype, None)
        parts = [part.strip() for part in inside.split(",")] if inside else []
        return cls(dtype, tuple(_size(part, text) for part in parts))

    def __str__(self) -> str:
        sizes = "..." if self.shape is None else ", ".join("?" if size is None else str(size) for size in self.shape)
        return f"{self.dtype or 'any'}[{sizes}]"

    @property
    def info(self) -> InputInfo:
        """As it is said of a model's input: named sizes are open there."""
        if self.shape is None:
            return InputInfo(self.dtype, None)
        return InputInfo(self.dtype, tuple(size if isinstance(size, int) else None for size in self.shape))

    def names(self) -> list[str]:
        """The names of sizes, in order, each once."""
        return list(dict.fromkeys(size for size in self.shape or () if isinstance(size, str)))

    def binds(self, dtype: TypeMeta, shape: Sequence[int], sizes: dict[str, int]) -> bool:
        """True where a tensor of `dtype` and `shape` is what this says; `sizes` has named sizes, and gets new ones."""
        if self.dtype not in (None, dtype):
            return False
        if self.shape is None:
            return True
        if len(self.shape) != len(shape):
            return False
        return all(
            size is None or found == (sizes.setdefault(size, found) if isinstance(size, str) else size)
            for size, found in zip(self.shape, shape, strict=True)
        )

    def sizes_with(self, sizes: Mapping[str, int]) -> tuple[int, ...] | None:
        """The shape where `sizes` are named; None where a size stays open."""
        if self.shape is None:
            return None
        found = tuple(sizes.get(size) if isinstance(size, str) else size for size in self.shape)
        known = tuple(size for size in found if size is not None)
        return known if len(known) == len(found) else None


def type_meta(dtype: object) -> TypeMeta | None:
    """The element type that `dtype` says: a TypeMeta, a name, a NumPy dtype, or None for any. Raises ArgumentError."""
    if dtype is None or isinstance(dtype, TypeMeta):
        return dtype
    try:
        return from_name(dtype) if isinstance(dtype, str) else from_numpy(dtype)  # type: ignore[arg-type]
    except (DagexecError, TypeError) as error:
        raise ArgumentError(f"{dtype!r:.80} is no element type: {error}") from None


def _size(text: str, whole: str) -> Size:
    if text == "?":
        return None
    if text.isidentifier():
        return text
    if text.isdecimal():
        return int(text)
    raise ArgumentError(f"{whole!r:.80}: {text!r} is no size: expected a number of 0 or more, a name or ?")
