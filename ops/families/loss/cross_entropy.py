"""Cross entropy of probabilities: LabelCrossEntropy with a class a row, CrossEntropy with a distribution; MakeTwoClass.

A probability below 1e-20 counts as that much, in the loss and in what its gradient divides by, as in Caffe2.
"""

from __future__ import annotations

import math
from functools import partial

import numpy as np

from dagexec.core.dtypes import FLOAT_TYPES
from dagexec.core.expressions import Expression, log, maximum, row_sum
from dagexec.core.gradient import gradient_by
from dagexec.core.operator import Operator, Step, in_sequence
from dagexec.core.registry import new_operator
from dagexec.core.rows import along_axis
from dagexec.core.schema import OperatorCall, TensorType
from dagexec.ops.base.blocks import Array, compute_dtype
from dagexec.ops.base.row_operator import all_but_first, row_operator
from dagexec.ops.families.loss.labels import label_check, require_labels

MIN_PROBABILITY = 1e-20


def _require_labeled(call: OperatorCall) -> tuple[int, int]:
    """Rows and classes of X; a tensor of one axis is one row. Raises ShapeError unless the labels fit."""
    call.require_types(0, *FLOAT_TYPES)
    shape = call.inputs[0].shape
    if not shape:
        raise call.fail("X must have at least 1 axis, found a scalar")
    rows, classes = (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, shape[0])
    if rows and not classes:
        raise call.fail("there must be at least one class")
    require_labels(call, 1, rows)
    return rows, classes


class _Labeled(Operator):
    """What LabelCrossEntropy and its gradient share: the probability of each row's label."""

    def picked(self) -> tuple[Array, Array, list[Step]]:
        """The probabilities of the labels, at least 1e-20, where they are in X, and the steps that find both."""
        rows, classes = _require_labeled(self.call())
        x, labels = self.x(0).reshape(-1), self.x(1).reshape(-1)
        work = compute_dtype(x.dtype)
        place, given, found = (
            self.scratch((rows,), np.int64),
            self.scratch((rows,), x.dtype),
            self.scratch((rows,), work),
        )
        steps: list[Step] = [
            label_check(self, 1, classes),
            partial(np.add, np.arange(rows) * classes, labels, out=place),
            partial(np.take, x, place, out=given, mode="clip"),
            partial(np.maximum, given, np.asarray(MIN_PROBABILITY, work), out=found),
        ]
        return found, place, steps if rows else []


def infer_label_cross_entropy(call: OperatorCall) -> list[TensorType]:
    """One element a row."""
    rows, _ = _require_labeled(call)
    return [TensorType((rows,), call.inputs[0].meta)]


@new_operator(
    "LabelCrossEntropy",
    infer=infer_label_cross_entropy,
    doc="Y = -ln max(X[label], 1e-20) for each row of X, probabilities of the classes.",
    input_names=("X", "label"),
    output_names=("Y",),
    rows=along_axis(0, 0, 1),
)
class LabelCrossEntropy(_Labeled):
    """Minus the logarithm of the probability of the label."""

    def prepare(self) -> Step:
        """Pick, and take the logarithm."""
        found, _, steps = self.picked()
        return in_sequence(
            [*steps, partial(np.log, found, out=found), partial(np.negative, found, out=self.y(0), casting="same_kind")]
        )


def infer_label_cross_entropy_gradient(call: OperatorCall) -> list[TensorType]:
    """The type of X."""
    rows, _ = _require_labeled(call)
    call.require_same_type(0, 2)
    call.require_shape(2, (rows,), "one element a row")
    return [call.inputs[0]]


@new_operator(
    "LabelCrossEntropyGradient",
    infer=infer_label_cross_entropy_gradient,
    doc="dX = -dY / max(X, 1e-20) at the label of each row, else 0.",
    input_names=("X", "label", "dY"),
    output_names=("dX",),
    rows=along_axis(0, 0, 1, 2),
)
class LabelCrossEntropyGradient(_Labeled):
    """The gradient of LabelCrossEntropy."""

    def prepare(self) -> Step:
        """Zeros, and an element a row."""
        found, place, steps = self.picked()
        dx = self.y(0)
        return in_sequence(
            [
                *steps,
                partial(np.divide, self.x(2), found, out=found),
                partial(np.negative, found, out=found),
                partial(dx.fill, 0),
                partial(np.put, dx.reshape(-1), place, found, mode="clip"),
            ]
        )


gradient_by("LabelCrossEntropy", "LabelCrossEntropyGradient", ("X0", "X1", "dY"))


@row_operator(
    "CrossEntropy",
    {},
    members=all_but_first,
    inputs=("X", "label"),
    gradient=("X0", "X1", "dY"),
    slope=lambda x, label, dy: label / maximum(x, MIN_PROBABILITY) * -dy,
)
def cross_entropy(x: Expression, label: Expression) -> Expression:
    """Y = -sum of label * ln max(X, 1e-20) over each row, of the first axis: X probabilities, label a distribution."""
    return -row_sum(log(maximum(x, MIN_PROBABILITY)) * label)


def infer_make_two_class(call: OperatorCall) -> list[TensorType]:
    """One more axis, of size 2."""
    meta = call.require_types(0, *FLOAT_TYPES)
    return [TensorType((*call.inputs[0].shape, 2), meta)]


@new_operator(
    "MakeTwoClass",
    infer=infer_make_two_class,
    doc="Y[i] = (1 - X[i], X[i]): the probabilities of both classes, from that of the second. Y has one more axis "
    "than X, of size 2.",
    input_names=("X",),
    output_names=("Y",),
)
class MakeTwoClass(Operator):
    """Probabilities of two classes."""

    def prepare(self) -> Step:
        x, y = self.x(0).reshape(-1), self.y(0).reshape(-1, 2)
        return in_sequence([partial(np.subtract, np.ones((), x.dtype), x, out=y[:, 0]), partial(np.copyto, y[:, 1], x)])


def infer_make_two_class_gradient(call: OperatorCall) -> list[TensorType]:
    """The shape of dY without its last axis, of size 2."""
    meta, shape = call.require_types(0, *FLOAT_TYPES), call.inputs[0].shape
    if not shape or shape[-1] != 2:
        raise call.fail(f"the last axis of dY must have size 2, found shape {shape}")
    return [TensorType(shape[:-1], meta)]


@new_operator(
    "MakeTwoClassGradient",
    infer=infer_make_two_class_gradient,
    doc="dX[i] = dY[i, 1] - dY[i, 0].",
    input_names=("dY",),
    output_names=("dX",),
)
class MakeTwoClassGradient(Operator):
    """The gradient of MakeTwoClass."""

    def prepare(self) -> Step:
        dy = self.x(0).reshape(-1, 2)
        return partial(np.subtract, dy[:, 1], dy[:, 0], out=self.y(0).reshape(-1))


gradient_by("MakeTwoClass", "MakeTwoClassGradient", ("dY",))
