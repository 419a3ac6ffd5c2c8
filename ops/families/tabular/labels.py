"""LabelEncoder and CategoryMapper: keys become values; OneHotEncoder: a column for each category."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dagexec.core.arguments import Arguments
from dagexec.core.dtypes import FLOAT32, FLOAT64, INT32, INT64, STRING, TypeMeta, from_numpy
from dagexec.core.gradient import no_gradient
from dagexec.core.operator import Operator, Step, nothing_to_do
from dagexec.core.registry import new_operator
from dagexec.core.rows_call import RowsCall
from dagexec.core.schema import OperatorCall, TensorType
from dagexec.core.traits import Rows
from dagexec.errors import FeedError, ModelFormatError
from dagexec.ops.families.tabular.attributes import Array, check_length, integers, numbers, onnx_name, texts

_KINDS = ("strings", "int64s", "floats", "tensor")
_DEFAULTS: Mapping[TypeMeta, tuple[str, object]] = {
    STRING: ("default_string", b"_Unused"), INT64: ("default_int64", -1), FLOAT32: ("default_float", -0.0),
}  # fmt: skip


def _given(arguments: Arguments, label: str, side: str) -> Array:
    """The one list of `keys` or `values` that is given. Raises ModelFormatError."""
    found = [f"{side}_{kind}" for kind in _KINDS if f"{side}_{kind}" in arguments]
    if len(found) != 1:
        raise ModelFormatError(f"{label}: it must have one of {[f'{side}_{kind}' for kind in _KINDS]}, found {found}")
    tensor = arguments.field(found[0], "t")
    is_text = bool(arguments.field(found[0], "strings")) or (tensor is not None and bool(tensor.string_data))
    return texts(arguments, label, found[0]) if is_text else numbers(arguments, label, found[0])


class Encoding:
    """Keys and values of a LabelEncoder.

    Attributes:
        keys, values: arrays of one length.
        default: what becomes of other keys.
    """

    def __init__(self, arguments: Arguments, label: str) -> None:
        """Raises ModelFormatError."""
        self.keys, self.values = _given(arguments, label, "keys"), _given(arguments, label, "values")
        check_length(self.values, label, "values", self.keys.size)
        self.default = self._default(arguments, label)
        if self.keys.dtype == np.object_:
            self._places = {key: place for place, key in reversed(list(enumerate(self.keys.tolist())))}
            return
        self._nan = np.flatnonzero(np.isnan(self.keys)) if self.keys.dtype.kind == "f" else np.empty(0, np.intp)
        known = self.keys if not self._nan.size else np.delete(self.keys, self._nan)
        order = np.arange(self.keys.size) if not self._nan.size else np.delete(np.arange(self.keys.size), self._nan)
        self._sorted, first = np.unique(known, return_index=True)
        self._order = order[first]

    def _default(self, arguments: Arguments, label: str) -> object:
        given = numbers(arguments, label, "default_tensor") if self.values.dtype != np.object_ else texts(
            arguments, label, "default_tensor"
        )  # fmt: skip
        if given.size:
            return given[0]
        meta = from_numpy(self.values.dtype)
        name, default = _DEFAULTS.get(meta, ("", 0))
        if name == "default_string":
            return arguments.string(name, "_Unused").encode()
        if name == "default_float":
            return arguments.float(name, -0.0)
        return arguments.int(name, -1) if name else default

    def places(self, x: Array) -> tuple[Array, Array]:
        """For each key the place of its value, and whether it has one. NaN is a key like others."""
        if self.keys.dtype == np.object_:
            found = np.fromiter((self._places.get(key, -1) for key in x.reshape(-1).tolist()), np.intp, x.size)
            return np.maximum(found, 0).reshape(x.shape), (found >= 0).reshape(x.shape)
        if not self._sorted.size:
            places, known = np.zeros(x.shape, np.intp), np.zeros(x.shape, np.bool_)
        else:
            at = np.minimum(np.searchsorted(self._sorted, x), len(self._sorted) - 1)
            places, known = self._order[at], self._sorted[at] == x
        if self._nan.size:
            missing = np.isnan(x)
            places, known = np.where(missing, self._nan[0], places), known | missing
        return places, known

    def encoded(self, x: Array) -> Array:
        """The value of each key."""
        places, known = self.places(x)
        if not self.values.size:
            found = np.full(x.shape, self.default, self.values.dtype)
        else:
            found = self.values[places]
            found[~known] = self.default
        return found


class OldEncoding(Encoding):
    """Texts and their places in a list, either of which becomes the other (ai.onnx.ml 1)."""

    def __init__(self, arguments: Arguments, label: str, *, from_texts: bool) -> None:
        """Raises ModelFormatError."""
        listed = texts(arguments, label, "classes_strings")
        places = np.arange(len(listed))
        self.keys, self.values = (listed, places) if from_texts else (places, listed)
        self.default = self._default(arguments, label)
        self._places = {key: place for place, key in reversed(list(enumerate(listed.tolist())))}
        self._nan = np.empty(0, np.intp)
        self._sorted = self._order = places


def _encoding(call: OperatorCall) -> Encoding:
    if "classes_strings" not in call.arguments:
        return call.arguments.once("encoding", lambda: Encoding(call.arguments, call.label))
    is_text = call.inputs[0].meta is STRING
    return call.arguments.once(
        ("encoding", is_text), lambda: OldEncoding(call.arguments, call.label, from_texts=is_text)
    )


def infer_label_encoder(call: OperatorCall) -> Sequence[TensorType]:
    """Values in the shape of X."""
    encoding = _encoding(call)
    call.require_types(0, from_numpy(encoding.keys.dtype))
    return [TensorType(call.inputs[0].shape, from_numpy(encoding.values.dtype))]


def _same_rows(asked: RowsCall) -> list[Rows | None]:
    """Those of X."""
    return asked.all_outputs(asked.only(0))


_ENCODER = {
    "classes_strings": "texts; each becomes its place in the list, and each place its text",
    **{f"{side}_{kind}": f"the {side}" for side in ("keys", "values") for kind in _KINDS},
    "default_string": "the value of other keys, a text (default _Unused)",
    "default_int64": "the value of other keys, an integer (default -1)",
    "default_float": "the value of other keys, a float (default -0.0)",
    "default_tensor": "the value of other keys",
}


@new_operator(
    "LabelEncoder",
    infer=infer_label_encoder,
    on_host=True,
    doc="The value of each key in X; NaN may be a key. (ai.onnx.ml.)",
    input_names=("X",),
    output_names=("Y",),
    args=_ENCODER,
    rows=_same_rows,
    onnx=onnx_name("LabelEncoder", 4, *_ENCODER),
)
class LabelEncoder(Operator):
    """Values of keys."""

    def prepare(self) -> Step:
        """A look-up of each."""
        encoding, x, y = _encoding(self.call()), self.x(0), self.y(0)
        if not x.size:
            return nothing_to_do

        def step() -> None:
            y[...] = encoding.encoded(x)

        return step


def infer_one_hot_encoder(call: OperatorCall) -> Sequence[TensorType]:
    """A last axis of as many columns as there are categories."""
    call.require_types(0, STRING, INT32, INT64, FLOAT32, FLOAT64)
    count = len(_categories(call))
    return [TensorType((*call.inputs[0].shape, count), FLOAT32)]


def _categories(call: OperatorCall) -> Array:
    names, values = texts(call.arguments, call.label, "cats_strings"), call.arguments.ints("cats_int64s")
    if bool(names.size) == bool(values):
        raise ModelFormatError(f"{call.label}: it must have either 'cats_strings' or 'cats_int64s'")
    if bool(names.size) != (call.inputs[0].meta is STRING):
        raise call.fail("its categories are not of the kind of X")
    return names if names.size else np.array(values, np.int64)


_ONE_HOT = {
    "cats_strings": "the categories, if they are texts",
    "cats_int64s": "the categories, if they are integers",
    "zeros": "1 (default): a row of zeros for what is no category; 0: an error",
}


@new_operator(
    "OneHotEncoder",
    infer=infer_one_hot_encoder,
    on_host=True,
    doc="For each element a 1 in the column of its category, and zeros; floats count as the integers below them in "
    "size. (ai.onnx.ml.)",
    input_names=("X",),
    output_names=("Y",),
    args=_ONE_HOT,
    rows=_same_rows,
    onnx=onnx_name("OneHotEncoder", 1, *_ONE_HOT),
)
class OneHotEncoder(Operator):
    """A column a category."""

    def prepare(self) -> Step:
        """Comparisons with all categories. The step raises FeedError for what is none, without zeros."""
        categories, x, y = _categories(self.call()), self.x(0), self.y(0)
        allows = self.arguments.bool("zeros", True)

        def step() -> None:
            values: Any = x if x.dtype == np.object_ else np.trunc(x)
            y[...] = values[..., np.newaxis] == categories
            if not allows and not y.any(axis=-1).all():
                raise self._unknown(x, y)

        return step

    def _unknown(self, x: Array, y: Array) -> Exception:
        value = x.reshape(-1).tolist()[np.argmin(y.any(axis=-1))]
        return FeedError(f"{self.label}: {value!r} is no category")


_MAPPER = {
    "cats_int64s": "the number of each text",
    "cats_strings": "texts",
    "default_int64": "the number of other texts (default -1)",
    "default_string": "the text of other numbers (default _Unused)",
}


def _mapped(call: OperatorCall) -> tuple[dict[object, object], object]:
    names = texts(call.arguments, call.label, "cats_strings").tolist()
    values = integers(call.arguments, call.label, "cats_int64s", len(names)).tolist()
    if call.inputs[0].meta is STRING:
        return dict(zip(names, values, strict=True)), call.arguments.int("default_int64", -1)
    return dict(zip(values, names, strict=True)), call.arguments.string("default_string", "_Unused").encode()


def infer_mapper(call: OperatorCall) -> Sequence[TensorType]:
    """Numbers of texts, and texts of numbers."""
    _mapped(call)
    meta = call.require_types(0, STRING, INT64)
    return [TensorType(call.inputs[0].shape, INT64 if meta is STRING else STRING)]


@new_operator(
    "CategoryMapper",
    infer=infer_mapper,
    on_host=True,
    doc="The number of each text, or the text of each number. (ai.onnx.ml.)",
    input_names=("X",),
    output_names=("Y",),
    args=_MAPPER,
    rows=_same_rows,
    onnx=onnx_name("CategoryMapper", 1, *_MAPPER),
)
class CategoryMapper(Operator):
    """A look-up of each."""

    def prepare(self) -> Step:
        """By a `dict`."""
        (known, other), x, y = _mapped(self.call()), self.x(0), self.y(0)

        def step() -> None:
            y.reshape(-1)[:] = [known.get(item, other) for item in x.reshape(-1).tolist()]

        return step


no_gradient("LabelEncoder", "OneHotEncoder", "CategoryMapper")
