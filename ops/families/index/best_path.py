"""Best paths through a matrix of scores (times, labels): ViterbiPath, and SwapBestPath, which makes a path the best."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dagexec.core.dtypes import FLOAT32, INT32
from dagexec.core.gradient import no_gradient
from dagexec.core.schema import OperatorCall, TensorType
from dagexec.ops.base.array_function import array_function
from dagexec.ops.base.blocks import Array
from dagexec.ops.families.index.indexing import check_indices


def infer_viterbi(call: OperatorCall) -> list[TensorType]:
    """A label for each time. Raises ShapeError without a label, or without a score for each pair of them."""
    call.require_types(0, FLOAT32)
    call.require_types(1, FLOAT32)
    times, labels = call.require_rank(0, 2)
    call.require_shape(1, (labels, labels), "from each label to each")
    if not labels:
        raise call.fail("there must be at least one label")
    return [TensorType((times,), INT32)]


@array_function(
    "ViterbiPath",
    infer=infer_viterbi,
    doc="The labels, one for each time, whose predictions and transitions[label before, label] add up to most "
    "(Viterbi 1967); of several such paths that with the lowest last labels.",
    input_names=("predictions", "transitions"),
    output_names=("path",),
)
def viterbi(_call: OperatorCall, predictions: Array, transitions: Array) -> Sequence[Array]:
    """The best score up to each label, time by time, and then back from the last."""
    path = np.zeros(len(predictions), np.int32)
    if not len(path):
        return [path]
    scores, before = predictions[0], np.zeros(predictions.shape, np.int64)
    for time, row in enumerate(predictions[1:], 1):
        arriving = scores[:, np.newaxis] + transitions
        before[time] = arriving.argmax(axis=0)
        scores = arriving.max(axis=0) + row
    path[-1] = scores.argmax()
    for time in range(len(path) - 1, 0, -1):
        path[time - 1] = before[time, path[time]]
    return [path]


def infer_swap(call: OperatorCall) -> list[TensorType]:
    """That of X."""
    call.require_types(0, FLOAT32)
    call.require_types(1, INT32)
    call.require_shape(1, call.require_rank(0, 2)[:1], "a label for each time")
    return [call.inputs[0]]


@array_function(
    "SwapBestPath",
    infer=infer_swap,
    doc="X, where in each row the largest element and the one that the path names are exchanged.",
    input_names=("X", "path"),
    output_names=("Y",),
)
def swap(call: OperatorCall, x: Array, path: Array) -> Sequence[Array]:
    """One exchange a row."""
    check_indices(path, 0, x.shape[1], call.label)
    if not x.size:
        return [x]
    rows, best = np.arange(len(x)), x.argmax(axis=1)
    y = x.copy()
    y[rows, best], y[rows, path] = x[rows, path], x[rows, best]
    return [y]


no_gradient("ViterbiPath", "SwapBestPath")
