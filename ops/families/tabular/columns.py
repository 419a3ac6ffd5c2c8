"""What prepares columns: Scaler, Imputer, Binarizer, Normalizer, ArrayFeatureExtractor and FeatureVectorizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from dagexec.core.dtypes import FLOAT32, FLOAT64, INT32, INT64
from dagexec.core.gradient import no_gradient
from dagexec.core.operator import Operator, Step
from dagexec.core.registry import new_operator
from dagexec.core.rows_call import RowsCall
from dagexec.core.schema import UNBOUNDED, OperatorCall, TensorType, same_as_input
from dagexec.core.traits import Rows
from dagexec.errors import ModelFormatError, ShapeError
from dagexec.ops.families.tabular.attributes import Array, numbers, onnx_name

NUMBERS = (FLOAT32, FLOAT64, INT64, INT32)


def _not_on_columns(asked: RowsCall) -> list[Rows | None]:
    """Those of X, unless they are on its last axis, that of columns."""
    rows = asked.only(0)
    if rows.axis == asked.rank(0) - 1:
        raise asked.mixes(rows.axis)
    return asked.all_outputs(rows)


def _columns(call: OperatorCall, *names: str) -> None:
    """Raise unless each of these arguments has one number, or one for each column of X."""
    call.require_types(0, *NUMBERS)
    shape = call.inputs[0].shape
    for name in names:
        count = numbers(call.arguments, call.label, name).size
        if count > 1 and (not shape or count != shape[-1]):
            raise call.fail(f"attribute {name!r} has {count} numbers, one for each column of X")


def _one_or_all(values: Array) -> Array:
    """In float32; a single one without an axis, which goes with every X."""
    found = values.astype(np.float32)
    return found.reshape(()) if found.size == 1 else found


def infer_scaler(call: OperatorCall) -> Sequence[TensorType]:
    """float32 in the shape of X."""
    _columns(call, "offset", "scale")
    return [TensorType(call.inputs[0].shape, FLOAT32)]


_SCALER = {
    "offset": "what is subtracted first, one number or one a column (default 0)",
    "scale": "what is multiplied by then, one number or one a column (default 1)",
}


@new_operator(
    "Scaler",
    infer=infer_scaler,
    doc="Y = (X - offset) * scale, in float32. (ai.onnx.ml.)",
    input_names=("X",),
    output_names=("Y",),
    args=_SCALER,
    rows=_not_on_columns,
    onnx=onnx_name("Scaler", 1, *_SCALER),
)
class Scaler(Operator):
    """Columns moved and scaled."""

    def numbers(self) -> tuple[Array, Array]:
        """Offset and scale."""
        offset, scale = (_one_or_all(numbers(self.arguments, self.label, name)) for name in ("offset", "scale"))
        return offset if offset.size else np.zeros((), np.float32), scale if scale.size else np.ones((), np.float32)

    def prepare(self) -> Step:
        """A difference and a product; of float64 in float64."""
        offset, scale = self.numbers()
        x, y = self.x(0), self.y(0)
        held = self.scratch(x.shape, np.float64) if x.dtype == np.float64 else y

        def step() -> None:
            np.subtract(x, offset, out=held, casting="unsafe")
            np.multiply(held, scale, out=y, casting="unsafe")

        return step


def infer_imputer(call: OperatorCall) -> Sequence[TensorType]:
    """The type of X."""
    meta = call.require_types(0, *NUMBERS)
    given = [name for name in ("imputed_value_floats", "imputed_value_int64s") if name in call.arguments]
    if len(given) != 1 or ("floats" in given[0]) != meta.is_float:
        raise call.fail(f"it must have the values for elements of X, found {given}")
    if not numbers(call.arguments, call.label, given[0]).size:
        raise call.fail(f"attribute {given[0]!r} must have values")
    _columns(call, given[0])
    return [call.inputs[0]]


_IMPUTER = {
    "imputed_value_floats": "what stands in place of missing numbers, one number or one a column",
    "imputed_value_int64s": "the same for integers",
    "replaced_value_float": "what is missing (default 0); NaN is any NaN",
    "replaced_value_int64": "the same for integers",
}


@new_operator(
    "Imputer",
    infer=infer_imputer,
    doc="X with other numbers in place of what is missing. (ai.onnx.ml.)",
    input_names=("X",),
    output_names=("Y",),
    args=_IMPUTER,
    rows=_not_on_columns,
    onnx=onnx_name("Imputer", 1, *_IMPUTER),
)
class Imputer(Operator):
    """Missing numbers replaced."""

    def numbers(self) -> tuple[Array, float]:
        """What stands in place, and of what."""
        if self.input(0).meta.is_float:
            values = numbers(self.arguments, self.label, "imputed_value_floats")
            replaced = (self.arguments.field("replaced_value_float", field) for field in ("f", "i"))
            return values, float(next(filter(None, replaced), 0.0))
        return numbers(self.arguments, self.label, "imputed_value_int64s"), self.arguments.int(
            "replaced_value_int64", 0
        )

    def prepare(self) -> Step:
        """A comparison, and a choice."""
        values, replaced = self.numbers()
        x, y = self.x(0), self.y(0)
        missing = self.scratch(x.shape, np.bool_)
        find: Callable[..., Any] = np.isnan if replaced != replaced else partial(np.equal, replaced)

        def step() -> None:
            find(x, out=missing)
            np.copyto(y, x)
            np.copyto(y, values, where=missing, casting="unsafe")

        return step


def infer_binarizer(call: OperatorCall) -> Sequence[TensorType]:
    """The type of X."""
    call.require_types(0, *NUMBERS)
    return same_as_input(call)


@new_operator(
    "Binarizer",
    infer=infer_binarizer,
    doc="1 where X is above the threshold, else 0. (ai.onnx.ml.)",
    input_names=("X",),
    output_names=("Y",),
    args={"threshold": "default 0"},
    rows=lambda asked: asked.all_outputs(asked.only(0)),
    onnx=onnx_name("Binarizer", 1, "threshold"),
)
class Binarizer(Operator):
    """Zeros and ones."""

    def prepare(self) -> Step:
        """A comparison."""
        return partial(
            np.greater, self.x(0), np.float32(self.arguments.float("threshold", 0.0)), out=self.y(0), casting="unsafe"
        )


NORMS = ("MAX", "L1", "L2")


def infer_normalizer(call: OperatorCall) -> Sequence[TensorType]:
    """float32 in the shape of X."""
    call.require_types(0, *NUMBERS)
    call.require_rank(0, 1, 2)
    norm = call.arguments.string("norm", "MAX")
    if norm not in NORMS:
        raise ModelFormatError(f"{call.label}: attribute 'norm' is {norm!r}; expected one of {NORMS}")
    return [TensorType(call.inputs[0].shape, FLOAT32)]


@new_operator(
    "Normalizer",
    infer=infer_normalizer,
    doc="Each row of X over its greatest number (MAX), its sum of absolute numbers (L1), or the square root of its "
    "sum of squares (L2); rows of zeros stay. (ai.onnx.ml.)",
    input_names=("X",),
    output_names=("Y",),
    args={"norm": "MAX (default), L1 or L2"},
    rows=_not_on_columns,
    onnx=onnx_name("Normalizer", 1, "norm"),
)
class Normalizer(Operator):
    """Rows over their norms."""

    def prepare(self) -> Step:
        """A norm for each row, and a quotient."""
        x, y = self.x(0), self.y(0)
        norm = self.arguments.string("norm", "MAX")

        def step() -> None:
            values = x.astype(np.float32)
            if norm == "MAX":
                found = values.max(axis=-1, keepdims=True, initial=-np.inf)
            elif norm == "L1":
                found = np.abs(values).sum(axis=-1, keepdims=True)
            else:
                found = np.sqrt(np.square(values).sum(axis=-1, keepdims=True))
            y[...] = values / np.where(found == 0, 1, found)

        return step


def infer_extractor(call: OperatorCall) -> Sequence[TensorType]:
    """The columns of X that Y names; of a vector one row of them."""
    kind, places = call.inputs
    call.require_types(1, INT64)
    if not kind.shape or not places.elements:
        raise call.fail("X must have columns, and Y must name some")
    rows = kind.shape[:-1] or (1,)
    return [TensorType((*rows, places.elements), kind.meta)]


@new_operator(
    "ArrayFeatureExtractor",
    infer=infer_extractor,
    on_host=True,
    doc="The columns of X, on its last axis, whose places Y has. (ai.onnx.ml.)",
    input_names=("X", "Y"),
    output_names=("Z",),
    rows=_not_on_columns,
    onnx=onnx_name("ArrayFeatureExtractor", 1),
)
class ArrayFeatureExtractor(Operator):
    """Some of the columns."""

    def prepare(self) -> Step:
        """One `np.take`. The step raises ShapeError for a place that is no column."""
        x, places, z = self.x(0), self.x(1), self.y(0)
        count, out = x.shape[-1], z.reshape(*x.shape[:-1], places.size)

        def step() -> None:
            wanted = places.reshape(-1)
            if wanted.min() < 0 or wanted.max() >= count:
                raise ShapeError(f"{self.label}: {self.definition.input[1]!r} names a column that is none of {count}")
            np.take(x, wanted, axis=-1, out=out, mode="clip")

        return step


def infer_vectorizer(call: OperatorCall) -> Sequence[TensorType]:
    """float32 [rows, sum of dimensions]."""
    sizes = call.arguments.ints("inputdimensions")
    if len(sizes) != len(call.inputs) or any(size < 1 for size in sizes):
        raise ModelFormatError(
            f"{call.label}: attribute 'inputdimensions' must have a size for each of {len(call.inputs)} inputs"
        )
    for index in range(len(call.inputs)):
        call.require_types(index, *NUMBERS)
        call.require_rank(index, 1, 2)
    rows = {_row_count(kind.shape) for kind in call.inputs}
    if len(rows) != 1:
        raise call.fail("its inputs must have as many rows")
    return [TensorType((rows.pop(), sum(sizes)), FLOAT32)]


def _row_count(shape: tuple[int, ...]) -> int:
    return shape[0] if len(shape) == 2 else 1


def _of_all(asked: RowsCall) -> list[Rows | None]:
    """Those of all inputs, on axis 0."""
    rows = asked.only(*range(len(asked.rows)))
    if rows.axis or None in asked.rows:
        raise asked.refuse("joins columns, and needs the rows of all inputs")
    return asked.all_outputs(rows)


@new_operator(
    "FeatureVectorizer",
    infer=infer_vectorizer,
    doc="The columns of all inputs beside each other, of each as many as it is said to have: cut, or with zeros "
    "behind them. (ai.onnx.ml.)",
    inputs=(1, UNBOUNDED),
    input_names=("X...",),
    output_names=("Y",),
    args={"inputdimensions": "how many columns each input has"},
    required_args=("inputdimensions",),
    rows=_of_all,
    onnx=onnx_name("FeatureVectorizer", 1, "inputdimensions"),
)
class FeatureVectorizer(Operator):
    """Columns side by side."""

    def prepare(self) -> Step:
        """A copy for each input."""
        y, place = self.y(0), 0
        copies: list[tuple[Array, Array]] = []
        for index, size in enumerate(self.arguments.ints("inputdimensions")):
            x = self.x(index)
            count = _row_count(x.shape)
            rows = x.reshape(count, x.size // max(count, 1))
            width = min(size, rows.shape[1])
            copies.append((y[:, place : place + width], rows[:, :width]))
            place += size

        def step() -> None:
            y[...] = 0
            for target, source in copies:
                np.copyto(target, source, casting="unsafe")

        return step


no_gradient(
    "Scaler", "Imputer", "Binarizer", "Normalizer", "ArrayFeatureExtractor", "FeatureVectorizer"
)  # fmt: skip
