"""LinearRegressor and LinearClassifier: products of rows with coefficients, and what becomes of them, by NumPy.

Sums are made column by column, so that a row's do not depend on how many rows there are.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dagexec.core.arguments import Arguments
from dagexec.core.dtypes import FLOAT32, FLOAT64, INT32, INT64
from dagexec.core.gradient import no_gradient
from dagexec.core.operator import Operator, Step
from dagexec.core.registry import new_operator
from dagexec.core.rows import first_axis
from dagexec.core.schema import OperatorCall, TensorType
from dagexec.errors import ModelFormatError
from dagexec.ops.families.tabular.attributes import Array, check_length, numbers, onnx_name
from dagexec.ops.families.tabular.ensemble import LABEL_ARGS, class_types, labels_of
from dagexec.ops.families.tabular.scores import HELP, Finish, ManyScores, OneScore, transform_of

NUMBERS = (FLOAT32, FLOAT64, INT64, INT32)


class Linear:
    """Coefficients [columns, targets] and intercepts [targets], float32."""

    def __init__(self, arguments: Arguments, label: str, columns: int, targets: int | None) -> None:
        """As many targets as there are coefficients for, unless that is given. Raises ModelFormatError."""
        given = numbers(arguments, label, "coefficients").astype(np.float32)
        count = targets or max(1, given.size // max(1, columns))
        check_length(given, label, "coefficients", count * columns)
        self.weights = np.ascontiguousarray(given.reshape(count, columns).T)
        bias = numbers(arguments, label, "intercepts").astype(np.float32)
        if bias.size:
            check_length(bias, label, "intercepts", count)
        self.bias = bias if bias.size else np.zeros(count, np.float32)

    @property
    def targets(self) -> int:
        """The number of sums of a row."""
        return int(self.weights.shape[1])

    def sums(self, x: Array) -> Array:
        """Those of float32 rows."""
        return products(x, self.weights) + self.bias


def products(x: Array, weights: Array) -> Array:
    """x @ weights, each sum in the order of the columns, whatever the number of rows."""
    found = np.zeros((len(x), weights.shape[1]), np.float32)
    for column, row in zip(x.T, weights, strict=True):
        found += column[:, np.newaxis] * row
    return found


def row_count(call: OperatorCall) -> tuple[int, int]:
    """Rows and columns of X. Raises ShapeError."""
    call.require_types(0, *NUMBERS)
    *rows, columns = call.require_rank(0, 1, 2)
    return (rows[0] if rows else 1), columns


def linear_of(call: OperatorCall) -> Linear:
    """What an operator has. Raises ModelFormatError."""
    columns = row_count(call)[1]
    targets = call.arguments.int("targets", 1) if call.definition.type == "LinearRegressor" else None
    if targets is not None and targets < 1:
        raise ModelFormatError(f"{call.label}: attribute 'targets' must be at least 1, found {targets}")
    return call.arguments.once(("linear", columns), lambda: Linear(call.arguments, call.label, columns, targets))


class RowsOperator(Operator):
    """Base of operators on rows of numbers, which they look at as float32."""

    def rows(self) -> tuple[Array, list[Step]]:
        """Input 0 as float32 [rows, columns], and what brings it there."""
        x = self.x(0)
        x = x.reshape(1, -1) if x.ndim == 1 else x
        if x.dtype == np.float32:
            return x, []
        held = self.scratch(x.shape, np.float32)
        return held, [lambda: np.copyto(held, x, casting="unsafe")]


def infer_regressor(call: OperatorCall) -> Sequence[TensorType]:
    """float32 [rows, targets]."""
    return [TensorType((row_count(call)[0], linear_of(call).targets), FLOAT32)]


_COEFFICIENTS = {
    "coefficients": "[targets, columns], what each column is multiplied by",
    "intercepts": "what is added for each target (default 0)",
    "post_transform": HELP,
}
_REGRESSOR = _COEFFICIENTS | {"targets": "the number of results of a row (default 1)"}


@new_operator(
    "LinearRegressor",
    infer=infer_regressor,
    doc="Y = X * coefficients^T + intercepts, in float32. (ai.onnx.ml.)",
    input_names=("X",),
    output_names=("Y",),
    args=_REGRESSOR,
    required_args=("coefficients",),
    rows=first_axis,
    onnx=onnx_name("LinearRegressor", 1, *_REGRESSOR),
)
class LinearRegressor(RowsOperator):
    """Numbers that are sums of columns."""

    def prepare(self) -> Step:
        """Column by column."""
        linear, (x, before), y = linear_of(self.call()), self.rows(), self.y(0)
        finish = self.finish()

        def step() -> None:
            for one in before:
                one()
            y[...] = finish.scores(linear.sums(x))

        return step

    def finish(self) -> Finish:
        """The transform."""
        return Finish(np.empty(0, np.float32), 1, transform_of(self.arguments, self.label))


def _labels(call: OperatorCall) -> Array:
    names = labels_of(call.arguments, call.label)
    count = linear_of(call).targets
    if len(names) != count and (count, len(names)) != (1, 2):
        raise ModelFormatError(f"{call.label}: it has coefficients for {count} classes, and {len(names)} labels")
    return names


def infer_classifier(call: OperatorCall) -> Sequence[TensorType]:
    """Labels [rows], and float32 scores [rows, classes]."""
    _labels(call)
    transform_of(call.arguments, call.label)
    return class_types(call, row_count(call)[0])


_CLASSIFIER = (
    _COEFFICIENTS
    | {"multi_class": "not read", "classlabels_ints": "labels of the classes, if they are numbers"}
    | {"classlabels_strings": LABEL_ARGS["classlabels_strings"]}
)


@new_operator(
    "LinearClassifier",
    infer=infer_classifier,
    doc="The class with the greatest score X * coefficients^T + intercepts, and the scores of all. (ai.onnx.ml.)",
    input_names=("X",),
    output_names=("labels", "scores"),
    args=_CLASSIFIER,
    required_args=("coefficients",),
    rows=first_axis,
    onnx=onnx_name("LinearClassifier", 1, *_CLASSIFIER),
)
class LinearClassifier(RowsOperator):
    """Classes that sums of columns name."""

    def prepare(self) -> Step:
        """Column by column."""
        linear, (x, before), finish = linear_of(self.call()), self.rows(), self.finish()
        labels, scores, names = self.y(0), self.y(1), labels_of(self.arguments, self.label)

        def step() -> None:
            for one in before:
                one()
            sums = linear.sums(x)
            chosen, found = finish.classes(sums, None) if isinstance(finish, ManyScores) else finish.classes(sums)
            labels[...], scores[...] = names[chosen], found

        return step

    def finish(self) -> OneScore | ManyScores:
        """How scores name classes; of one score, the second class is that of what is above 0."""
        finish = Finish(np.empty(0, np.float32), 1, transform_of(self.arguments, self.label))
        is_one = linear_of(self.call()).targets == 1 and self.y(1).shape[1] == 2
        return OneScore(finish, 0.0, sums_to_one=True) if is_one else ManyScores(finish)


no_gradient("LinearRegressor", "LinearClassifier")
