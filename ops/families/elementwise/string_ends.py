"""The beginnings and ends of strings, whether strings are equal to a text, and rows of elements joined to strings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dagexec.core.dtypes import BOOL, FLOAT32, FLOAT64, INT8, INT16, INT32, INT64, STRING, UINT8, UINT16
from dagexec.core.gradient import no_gradient
from dagexec.core.schema import OperatorCall, TensorType
from dagexec.errors import ArgumentError
from dagexec.ops.base.array_function import array_function
from dagexec.ops.base.blocks import Array


def _length(call: OperatorCall) -> int:
    length = call.arguments.int("length", 3)
    if length < 0:
        raise ArgumentError(f"{call.label}: argument 'length' must be at least 0, found {length}")
    return length


def _text(argument: str) -> Callable[[OperatorCall], bytes]:
    return lambda call: call.arguments.string(argument, "").encode(errors="surrogateescape")


def _operator(
    name: str,
    argument: tuple[str, str],
    wanted: Callable[[OperatorCall], Any],
    of: Callable[[bytes, Any], bytes | bool],
    doc: str,
) -> None:
    """Register an operator of each string and one argument, a truth value where a text is asked for."""
    is_part = argument[0] == "length"

    def infer(call: OperatorCall) -> list[TensorType]:
        call.require_types(0, STRING)
        wanted(call)
        return [TensorType(call.inputs[0].shape, STRING if is_part else BOOL)]

    def compute(call: OperatorCall, strings: Array) -> Sequence[Array]:
        found = np.empty(strings.size, np.object_ if is_part else np.bool_)
        found[:] = [of(string, wanted(call)) for string in strings.reshape(-1)]
        return [found]

    required = () if is_part else (argument[0],)
    array_function(
        name,
        infer=infer,
        doc=doc,
        input_names=("strings",),
        output_names=("Y",),
        args=dict([argument]),
        required_args=required,
    )(compute)
    no_gradient(name)


_operator(
    "StringPrefix",
    ("length", "bytes of a beginning (default 3)"),
    _length,
    lambda string, length: string[:length],
    "The first bytes of each string; of a shorter one all.",
)
_operator(
    "StringSuffix",
    ("length", "bytes of an end (default 3)"),
    _length,
    lambda string, length: string[max(0, len(string) - length) :],
    "The last bytes of each string; of a shorter one all.",
)
_operator(
    "StringStartsWith",
    ("prefix", "what strings may begin with"),
    _text("prefix"),
    bytes.startswith,
    "Whether each string begins with a text.",
)
_operator(
    "StringEndsWith",
    ("suffix", "what strings may end with"),
    _text("suffix"),
    bytes.endswith,
    "Whether each string ends with a text.",
)
_operator(
    "StringEquals",
    ("text", "what strings may be"),
    _text("text"),
    bytes.__eq__,
    "Whether each string is a text.",
)


def infer_string_join(call: OperatorCall) -> list[TensorType]:
    """A string for each row, or for each column with axis 1."""
    call.require_types(0, STRING, FLOAT32, FLOAT64, INT8, INT16, INT32, INT64, UINT8, UINT16)
    shape = call.inputs[0].shape
    if len(shape) not in (1, 2):
        raise call.fail(f"X must be a vector or a matrix, found shape {list(shape)}")
    return [TensorType((shape[call.axis("axis", 0, len(shape))],), STRING)]


@array_function(
    "StringJoin",
    infer=infer_string_join,
    doc="The elements of each row of a matrix as one string, a delimiter behind each; those of a vector one by one. "
    "Numbers are written with six digits.",
    input_names=("X",),
    output_names=("Y",),
    args={"delimiter": "what is behind each element (default a comma)", "axis": "1: columns are joined (default 0)"},
)
def string_join(call: OperatorCall, x: Array) -> Sequence[Array]:
    """Row by row."""
    delimiter = call.arguments.string("delimiter", ",").encode(errors="surrogateescape")
    rows = np.moveaxis(x, call.axis("axis", 0, x.ndim), 0)
    rows = rows[:, None] if x.ndim == 1 else rows
    found = np.empty(len(rows), np.object_)
    found[:] = [b"".join(_written(element) + delimiter for element in row.tolist()) for row in rows]
    return [found]


def _written(element: bytes | float) -> bytes:
    if isinstance(element, bytes):
        return element
    return (f"{element:g}" if isinstance(element, float) else str(element)).encode()


no_gradient("StringJoin")
