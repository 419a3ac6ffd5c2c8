"""Accuracy, over all rows or for each class. They have no gradient."""

from __future__ import annotations

from functools import partial

import numpy as np

from dagexec.core.dtypes import FLOAT32, FLOAT_TYPES, INT32
from dagexec.core.gradient import no_gradient
from dagexec.core.operator import Operator, Step, in_sequence
from dagexec.core.registry import new_operator
from dagexec.core.schema import OperatorCall, TensorType, memory_cost
from dagexec.errors import ArgumentError
from dagexec.ops.base.blocks import BLOCK, Array, compute_dtype, convert, is_narrow, row_pieces
from dagexec.ops.families.loss.labels import label_check, require_labels

no_gradient("Accuracy", "MultiClassAccuracy")


def _require_scores(call: OperatorCall) -> tuple[int, int]:
    """Rows and classes of the predictions. Raises ShapeError."""
    call.require_types(0, *FLOAT_TYPES)
    rows, classes = call.require_rank(0, 2)
    require_labels(call, 1, rows, "one for each row of the predictions")
    return rows, classes


def infer_accuracy(call: OperatorCall) -> list[TensorType]:
    """A float32 scalar. Raises ArgumentError for top_k below 1."""
    _require_scores(call)
    top = call.arguments.int("top_k", 1)
    if top < 1:
        raise ArgumentError(f"{call.label}: argument 'top_k' must be at least 1, found {top}")
    return [TensorType((), FLOAT32)]


@new_operator(
    "Accuracy",
    infer=infer_accuracy,
    doc="The fraction of rows whose label is among the `top_k` classes of the largest scores, a float32 scalar. "
    "Of equal scores the lower class comes first. A row whose score is NaN at its label, or at another class that "
    "would then decide, counts as wrong. NaN when there are no rows.",
    input_names=("predictions", "labels"),
    output_names=("accuracy",),
    args={"top_k": "how many classes count (default 1)"},
    cost=lambda call, outputs: memory_cost(call, outputs, 4.0 * call.inputs[0].elements),
)
class Accuracy(Operator):
    """Top-k accuracy.

    A class is before the label's when its score is greater, or equal and the class is lower; the row is right when
    fewer than k are. Nothing is sorted.
    """

    def prepare(self) -> Step:
        """Piece by piece of rows: scores below the label's, and equal ones that are not before it."""
        x, labels, result = self.x(0), self.x(1).reshape(-1), self.y(0)
        rows, classes = x.shape
        top = self.arguments.int("top_k", 1)
        steps: list[Step] = [label_check(self, 1, classes)]
        count = max(1, min(rows, BLOCK // max(1, classes)))
        work = compute_dtype(x.dtype)
        wide = self.scratch((count, classes), work) if is_narrow(x.dtype) else None
        own = self.scratch((count, 1), work)
        behind, equal, later = (self.scratch((count, classes), np.bool_) for _ in range(3))
        place = self.scratch((count,), np.int64)
        number = self.scratch((count,), np.int64)
        hits: Array = np.zeros((), np.int64)
        numbers, starts = np.arange(classes), np.arange(count) * classes
        steps.append(partial(hits.fill, 0))
        for piece in row_pieces(rows, count):
            part = x[piece]
            size = len(part)
            if wide is not None:
                steps.append(convert(part, wide[:size]))
                part = wide[:size]
            steps += [
                partial(np.add, starts[:size], labels[piece], out=place[:size]),
                partial(np.take, part.reshape(-1), place[:size], out=own[:size, 0], mode="clip"),
                partial(np.less, part, own[:size], out=behind[:size]),
                partial(np.equal, part, own[:size], out=equal[:size]),
                partial(np.greater_equal, numbers, labels[piece][:, None], out=later[:size]),
                partial(np.logical_and, equal[:size], later[:size], out=equal[:size]),
                partial(np.logical_or, behind[:size], equal[:size], out=behind[:size]),
                partial(np.add.reduce, behind[:size], axis=1, dtype=np.int64, out=number[:size]),
                partial(_count_at_least, number[:size], classes - top + 1, hits),
            ]

        def finish() -> None:
            result[...] = int(hits) / rows if rows else np.nan

        return in_sequence([*steps, finish])


def _count_at_least(numbers: Array, least: int, total: Array) -> None:
    total += np.count_nonzero(numbers >= least)


def infer_multi_class_accuracy(call: OperatorCall) -> list[TensorType]:
    """A float32 and an int32 for each class."""
    _, classes = _require_scores(call)
    return [TensorType((classes,), FLOAT32), TensorType((classes,), INT32)]


@new_operator(
    "MultiClassAccuracy",
    infer=infer_multi_class_accuracy,
    doc="For each class, the fraction of the rows with that label whose largest score is that class's (the first "
    "of equal ones), 0 without such rows; and their number.",
    input_names=("prediction", "labels"),
    output_names=("accuracies", "amounts"),
    cost=lambda call, outputs: memory_cost(call, outputs, call.inputs[0].elements),
)
class MultiClassAccuracy(Operator):
    """Accuracy for each class."""

    def prepare(self) -> Step:
        """The class of the largest score of each row, compared with its label, counted by label."""
        x, labels = self.x(0), self.x(1).reshape(-1)
        accuracies, amounts = self.y(0), self.y(1)
        classes = x.shape[1]
        check = label_check(self, 1, classes)

        def step() -> None:
            check()
            amounts[...] = np.bincount(labels, minlength=classes)
            if not x.size:
                accuracies.fill(0)
                return
            right = labels[np.argmax(x, axis=1) == labels]
            np.divide(np.bincount(right, minlength=classes), np.maximum(amounts, 1), out=accuracies, casting="unsafe")

        return step
