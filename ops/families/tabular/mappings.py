"""Operators on mappings of names to numbers, which blobs hold as variants: ZipMap, DictVectorizer and CastMap.

A mapping is a `dict` with `str` or `int` as keys, as ONNX's bindings have them; a sequence of mappings is a tuple.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import repeat
from typing import Any, cast

import numpy as np

from dagexec.core.blob import content_of, set_made, tensor_in
from dagexec.core.gradient import no_gradient
from dagexec.core.node import Node
from dagexec.core.operator import Operator, Step
from dagexec.core.registry import new_operator
from dagexec.core.variant import Content, Variant
from dagexec.core.workspace import Workspace
from dagexec.errors import BlobTypeError, ModelFormatError, ShapeError
from dagexec.ops.families.tabular.attributes import Array, onnx_name


def _label_args(strings: str, numbers: str) -> dict[str, str]:
    return {strings: "the keys, if they are texts", numbers: "the keys, if they are numbers"}


def _keys(one: Operator, strings: str, numbers: str) -> list[Any]:
    """The one list of keys that an operator has. Raises ModelFormatError for none, and for two."""
    names, values = one.arguments.strings(strings), one.arguments.ints(numbers)
    if bool(names) == bool(values):
        raise ModelFormatError(f"{one.label}: it must have either {strings!r} or {numbers!r}")
    return names or values


class MappingOperator(Operator):
    """Base of operators on mappings; variants are on the host."""

    reads_strided = True

    def check_input_devices(self) -> None:
        """See Operator."""
        for index, blob in enumerate(self.input_blobs):
            if not isinstance(blob.value, Variant):
                self._check_device("input", blob, self.input(index))

    def mapping(self) -> dict[Any, Any]:
        """What input 0 holds. Raises BlobTypeError unless it is a mapping."""
        blob = self.input_blobs[0]
        content: object = blob.value.content if isinstance(blob.value, Variant) else content_of(blob)
        if not isinstance(content, dict):
            raise BlobTypeError(f"{self.label}: {blob.name!r} must be a mapping, found a {type(content).__name__}")
        return content

    def give(self, found: Array) -> None:
        """Have output 0 hold an array."""
        tensor_in(self.output_blobs[0]).feed(found)


_ZIP = _label_args("classlabels_strings", "classlabels_int64s")


@new_operator(
    "ZipMap",
    infer=None,
    on_host=True,
    doc="For each row of X [rows, keys] a mapping of the keys to its numbers. (ai.onnx.ml.)",
    input_names=("X",),
    output_names=("mappings",),
    args=_ZIP,
    onnx=onnx_name("ZipMap", 1, *_ZIP),
)
class ZipMap(MappingOperator):
    """A sequence of mappings."""

    def __init__(self, definition: Node, workspace: Workspace, *, index: int = -1, net: str = "") -> None:
        """Raises ModelFormatError for no keys, or two kinds of them."""
        super().__init__(definition, workspace, index=index, net=net)
        self._keys = _keys(self, *_ZIP)

    def prepare(self) -> Step:
        """One `dict` a row. Raises ShapeError unless there is a key for each column."""
        keys = self._keys
        x, blob = self.x(0), self.output_blobs[0]
        if x.dtype != np.float32 or x.ndim not in (1, 2) or x.shape[-1] != len(keys):
            raise ShapeError(f"{self.label}: X must be float32 [rows, {len(keys)}], found {x.dtype}{list(x.shape)}")
        rows = x.reshape(-1, len(keys))

        def step() -> None:
            set_made(blob, partial(_zipped, keys, rows.tolist()))

        return step


def _zipped(keys: Sequence[Any], rows: Sequence[Sequence[float]]) -> Content:
    """A mapping for each row."""
    found: Sequence[object]
    if len(keys) == 2:  # half the time of the general way
        first, second = keys
        found = [{first: one, second: other} for one, other in rows]
    else:
        found = list(map(dict, map(zip, repeat(keys), rows)))
    return cast(Content, tuple(found))


_VECTORIZED = _label_args("string_vocabulary", "int64_vocabulary")


@new_operator(
    "DictVectorizer",
    infer=None,
    on_host=True,
    doc="The values of a mapping as a row [1, keys], in the order of the keys; 0, or an empty text, for keys that "
    "it does not have. (ai.onnx.ml.)",
    input_names=("mapping",),
    output_names=("Y",),
    args=_VECTORIZED,
    onnx=onnx_name("DictVectorizer", 1, *_VECTORIZED),
)
class DictVectorizer(MappingOperator):
    """A row of values."""

    def __init__(self, definition: Node, workspace: Workspace, *, index: int = -1, net: str = "") -> None:
        """Raises ModelFormatError for no keys, or two kinds of them."""
        super().__init__(definition, workspace, index=index, net=net)
        self._keys = _keys(self, *_VECTORIZED)

    def prepare(self) -> Step:
        """A look at each key."""
        keys = self._keys

        def step() -> None:
            mapping = self.mapping()
            values = list(mapping.values())
            if any(isinstance(value, str | bytes) for value in values):
                self.give(_texts([mapping.get(key, b"") for key in keys]))
            else:
                kind = np.int64 if values and all(isinstance(value, int) for value in values) else np.float32
                self.give(np.array([[mapping.get(key, 0) for key in keys]], kind))

        return step


def _texts(values: Sequence[object]) -> Array:
    found = np.empty((1, len(values)), np.object_)
    found[0, :] = [value.encode() if isinstance(value, str) else value for value in values]
    return found


_CAST = {
    "cast_to": "TO_FLOAT (default), TO_INT64 or TO_STRING",
    "map_form": "DENSE (default), or SPARSE: a value stands in the column that is its key",
    "max_map": "columns of SPARSE",
}
_CASTS: dict[str, tuple[type, Callable[[object], object]]] = {
    "TO_FLOAT": (np.float32, lambda value: float(cast(Any, value))),
    "TO_INT64": (np.int64, lambda value: int(float(cast(Any, value)))),
    "TO_STRING": (np.object_, lambda value: str(value).encode()),
}
_MOST_COLUMNS = 1 << 24


@new_operator(
    "CastMap",
    infer=None,
    on_host=True,
    doc="The values of a mapping of numbers as a row, in the order of its keys. (ai.onnx.ml.)",
    input_names=("mapping",),
    output_names=("Y",),
    args=_CAST,
    onnx=onnx_name("CastMap", 1, *_CAST),
)
class CastMap(MappingOperator):
    """A row of values."""

    def prepare(self) -> Step:
        """A cast of each value. Raises ModelFormatError for arguments that mean nothing."""
        target, form = self.arguments.string("cast_to", "TO_FLOAT"), self.arguments.string("map_form", "DENSE")
        columns = self.arguments.int("max_map", 1)
        if target not in _CASTS or form not in ("DENSE", "SPARSE") or not 0 < columns <= _MOST_COLUMNS:
            raise ModelFormatError(f"{self.label}: cast_to {target!r}, map_form {form!r}, max_map {columns}")
        kind, change = _CASTS[target]

        def step() -> None:
            pairs = sorted(self.mapping().items())
            if form == "DENSE":
                row: Array = np.empty((1, len(pairs)), kind)
                row[0, :] = [change(_as_text(value)) for _, value in pairs]
            else:
                row = np.full((1, columns), b"" if kind is np.object_ else 0, kind)
                for key, value in pairs:
                    if not 0 <= key < columns:
                        raise ShapeError(f"{self.label}: key {key} of the mapping is no column of {columns}")
                    row[0, key] = change(_as_text(value))
            self.give(row)

        return step


def _as_text(value: object) -> object:
    return value.decode() if isinstance(value, bytes) else value


no_gradient("ZipMap", "DictVectorizer", "CastMap")
