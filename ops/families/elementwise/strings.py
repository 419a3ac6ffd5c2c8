"""Operators of strings, which are UTF-8 bytes: StringConcat, StringSplit and StringNormalizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from dagexec.core.dtypes import INT64, STRING
from dagexec.core.gradient import no_gradient
from dagexec.core.onnx_name import OnnxName
from dagexec.core.schema import OperatorCall, TensorType
from dagexec.errors import ArgumentError
from dagexec.ops.base.array_function import array_function
from dagexec.ops.base.blocks import Array
from dagexec.ops.base.broadcasting import broadcast_shape

CASES = ("NONE", "LOWER", "UPPER")


def _text(value: bytes) -> str:
    return value.decode(errors="surrogateescape")


def _strings(values: Sequence[bytes], shape: tuple[int, ...]) -> Array:
    found = np.empty(len(values), np.object_)
    found[:] = values
    return found.reshape(shape)


def infer_string_concat(call: OperatorCall) -> list[TensorType]:
    """Strings, in the shape that both operands broadcast to."""
    for index in (0, 1):
        call.require_types(index, STRING)
    return [TensorType(broadcast_shape(call, [kind.shape for kind in call.inputs]), STRING)]


@array_function(
    "StringConcat",
    infer=infer_string_concat,
    doc="Each string of X with that of Y behind it; the operands broadcast as in NumPy. (dagexec's own, for ONNX.)",
    input_names=("X", "Y"),
    output_names=("Z",),
    onnx=(OnnxName("StringConcat", 20),),
)
def string_concat(_call: OperatorCall, x: Array, y: Array) -> Sequence[Array]:
    """A sum of byte strings."""
    joined = np.empty(np.broadcast_shapes(x.shape, y.shape), np.object_)
    return [np.add(x, y, out=joined)]


def _parts(call: OperatorCall) -> list[list[bytes]]:
    """The parts of each string."""
    delimiter, most = call.arguments.string("delimiter", "") or None, call.arguments.int("maxsplit", -1)
    texts = (_text(value) for value in call.known_value(0).reshape(-1))
    return [[part.encode(errors="surrogateescape") for part in text.split(delimiter, most)] for text in texts]


def infer_string_split(call: OperatorCall) -> list[TensorType]:
    """A new last axis for as many parts as any string has, and the numbers of parts."""
    call.require_types(0, STRING)
    shape = call.inputs[0].shape
    return [TensorType((*shape, max(map(len, _parts(call)), default=0)), STRING), TensorType(shape, INT64)]


@array_function(
    "StringSplit",
    infer=infer_string_split,
    doc="The parts of each string between delimiters, empty strings behind the last one, and how many there are "
    "(int64). Without a delimiter strings are split at runs of white space. (dagexec's own, for ONNX.)",
    input_names=("X",),
    output_names=("Y", "counts"),
    args={
        "delimiter": "what parts are split at (default: white space)",
        "maxsplit": "split at so many places at most (default: at all)",
    },
    value_inputs=(0,),
    onnx=(OnnxName("StringSplit", 20, {"delimiter": "delimiter", "maxsplit": "maxsplit"}),),
)
def string_split(call: OperatorCall, x: Array) -> Sequence[Array]:
    """One row a string."""
    rows = _parts(call)
    counts = np.array([len(row) for row in rows], np.int64)
    width = max(map(len, rows), default=0)
    filled = [part for row in rows for part in (*row, *[b""] * (width - len(row)))]
    return [_strings(filled, (*x.shape, width)), counts.reshape(x.shape)]


def _normalized(call: OperatorCall) -> list[bytes]:
    """The strings that are no stop words, or an empty one, in the case that is asked for."""
    case = call.arguments.string("case_change_action", "NONE")
    if case not in CASES:
        raise ArgumentError(f"{call.label}: 'case_change_action' must be one of {', '.join(CASES)}; found {case!r}")
    change: Callable[[str], str] = {"NONE": str, "LOWER": str.lower, "UPPER": str.upper}[case]  # type: ignore[assignment]
    known: Callable[[str], str] = str if call.arguments.bool("is_case_sensitive") else str.lower
    stops = {known(word) for word in call.arguments.strings("stopwords")}
    words = [text for text in map(_text, call.known_value(0).reshape(-1)) if known(text) not in stops]
    return [change(word).encode(errors="surrogateescape") for word in words] or [b""]


def infer_string_normalizer(call: OperatorCall) -> list[TensorType]:
    """A vector, or a matrix of one row, of as many strings as are kept, at least one."""
    call.require_types(0, STRING)
    shape = call.inputs[0].shape
    if len(shape) not in (1, 2) or (len(shape) == 2 and shape[0] != 1):
        raise call.fail("X must be a vector or have one row")
    return [TensorType((*shape[:-1], len(_normalized(call))), STRING)]


@array_function(
    "StringNormalizer",
    infer=infer_string_normalizer,
    doc="The strings of X, a vector or one row, that are no stop words, in lower or upper case where that is asked "
    "for; one empty string where none is left. (dagexec's own, for ONNX.)",
    input_names=("X",),
    output_names=("Y",),
    args={
        "case_change_action": "NONE (the default), LOWER or UPPER",
        "is_case_sensitive": "1: a stop word is one in the same case only (default 0)",
        "stopwords": "strings that are left out",
    },
    value_inputs=(0,),
)
def string_normalizer(call: OperatorCall, x: Array) -> Sequence[Array]:
    """A list of strings."""
    words = _normalized(call)
    return [_strings(words, (*x.shape[:-1], len(words)))]


no_gradient("StringConcat", "StringSplit", "StringNormalizer")
