"""APMeter: the average precision of each class over the latest predictions."""

from __future__ import annotations

from functools import partial

import numpy as np

from dagexec.core.dtypes import FLOAT32, INT32
from dagexec.core.gradient import no_gradient
from dagexec.core.node import Node
from dagexec.core.operator import Operator, Step
from dagexec.core.registry import new_operator
from dagexec.core.schema import OperatorCall, TensorType
from dagexec.core.workspace import Workspace
from dagexec.errors import ArgumentError
from dagexec.ops.base.blocks import Array


def infer_average_precision(call: OperatorCall) -> list[TensorType]:
    """A number for each class."""
    call.require_types(0, FLOAT32)
    call.require_types(1, INT32)
    shape = call.require_rank(0, 2)
    call.require_shape(1, shape, "1 or 0 for each prediction")
    return [TensorType(shape[1:], FLOAT32)]


def average_precision(scores: Array, labels: Array) -> Array:
    """Of each column: the mean, over what is true, of the share of true ones down to it, by falling score."""
    order = np.argsort(-scores, axis=0, kind="stable")
    ranked = np.take_along_axis(labels, order, axis=0).astype(np.float64)
    precision = ranked.cumsum(axis=0) / np.arange(1, len(ranked) + 1)[:, np.newaxis]
    true = ranked == 1
    found: Array = np.where(true, precision, 0).sum(axis=0) / np.maximum(true.sum(axis=0), 1)
    return found


@new_operator(
    "APMeter",
    infer=infer_average_precision,
    doc="The average precision of each class (column) over the latest `buffer_size` rows of all runs: of what is true "
    "the mean share of true ones among those with scores as high.",
    input_names=("predictions", "labels"),
    output_names=("AP",),
    args={"buffer_size": "how many rows are kept (default 1000)"},
    keeps=lambda node: [f"{node.output[0]}:buffer"],
    effects=True,
    on_host=True,
    reproducible=False,
)
class APMeter(Operator):
    """Rows of former runs are kept here."""

    def __init__(self, definition: Node, workspace: Workspace, *, index: int = -1, net: str = "") -> None:
        """Raises ArgumentError for a buffer without rows."""
        super().__init__(definition, workspace, index=index, net=net)
        self._size = self.arguments.int("buffer_size", 1000)
        self._kept: tuple[Array, Array] | None = None
        if self._size < 1:
            raise ArgumentError(f"{self.label}: argument 'buffer_size' must be at least 1, found {self._size}")

    def prepare(self) -> Step:
        """Rows of another number of classes begin anew."""
        return partial(self._measure, self.x(0), self.x(1), self.y(0))

    def _measure(self, scores: Array, labels: Array, y: Array) -> None:
        before = self._kept
        if before is None or before[0].shape[1] != scores.shape[1]:
            before = scores[:0], labels[:0]
        latest = [np.concatenate(pair)[-self._size :] for pair in zip(before, (scores, labels), strict=True)]
        self._kept = latest[0], latest[1]
        y[...] = average_precision(*self._kept)


no_gradient("APMeter")
