"""PairWiseLoss: how well scores of each session order its items by their labels (Burges et al. 2005)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from dagexec.core.dtypes import FLOAT32, FLOAT64
from dagexec.core.gradient import GradientOperators, GradientRequest, gradient_of
from dagexec.core.schema import OperatorCall, TensorType
from dagexec.ops.base.array_function import array_function
from dagexec.ops.base.blocks import Array
from dagexec.ops.families.sparse.segments import checked_lengths


def _check(call: OperatorCall, lengths: int) -> int:
    """How many sessions there are; input `lengths` is optional. Raises ShapeError."""
    call.require_types(0, FLOAT32, FLOAT64)
    call.require_same_type(*range(min(lengths, len(call.inputs))))
    count = call.inputs[0].elements
    if call.inputs[0].shape not in ((count,), (count, 1)) or call.inputs[1].elements != count:
        raise call.fail("expected a column of scores and the same number of labels")
    if len(call.inputs) <= lengths:
        return min(count, 1)
    checked_lengths(call, lengths, count)
    return call.inputs[lengths].shape[0]


def infer_pairwise(call: OperatorCall) -> list[TensorType]:
    """A loss for each session."""
    return [TensorType((_check(call, 2),), call.inputs[0].meta)]


def _sessions(x: Array, label: Array, lengths: Array | None) -> Iterator[tuple[slice, Array, Array]]:
    """Of each session its place, and for each two items the sign of the label's difference and the scores'."""
    counts = [x.size] if lengths is None else lengths.tolist()
    scores, labels, start = x.reshape(-1).astype(np.float64), label.reshape(-1), 0
    for count in counts:
        place = slice(start, start + count)
        sign = np.sign(labels[place, None] - labels[None, place]).astype(np.float64)
        yield place, sign, scores[place, None] - scores[None, place]
        start += count


@array_function(
    "PairWiseLoss",
    inputs=(2, 3),
    infer=infer_pairwise,
    doc="For each session the mean of ln(1 + exp(b - a)) of pairs of scores a and b where a has the greater label.",
    input_names=("X", "label", "lengths"),
    output_names=("loss",),
    value_inputs=(2,),
)
def pairwise_loss(_call: OperatorCall, x: Array, label: Array, *lengths: Array) -> Sequence[Array]:
    """0 for a session without pairs."""
    found = []
    for _, sign, apart in _sessions(x, label, lengths[0] if lengths else None):
        above = sign > 0
        losses = np.logaddexp(0, -apart[above])
        found.append(losses.mean() if losses.size else 0.0)
    return [np.array(found if x.size or lengths else [], x.dtype)]


def infer_pairwise_gradient(call: OperatorCall) -> list[TensorType]:
    """dX has the type of X."""
    sessions = _check(call, 3)
    call.require_shape(2, (sessions,), "a gradient for each session")
    return [call.inputs[0]]


@array_function(
    "PairWiseLossGradient",
    inputs=(3, 4),
    infer=infer_pairwise_gradient,
    doc="Gradient of PairWiseLoss by the scores.",
    input_names=("X", "label", "dLoss", "lengths"),
    output_names=("dX",),
    value_inputs=(3,),
)
def pairwise_slope(_call: OperatorCall, x: Array, label: Array, dy: Array, *lengths: Array) -> Sequence[Array]:
    """Each pair pulls its two scores apart."""
    dx = np.zeros(x.size)
    for (place, sign, apart), slope in zip(_sessions(x, label, lengths[0] if lengths else None), dy, strict=False):
        pulls = np.where(sign > 0, -1 / (1 + np.exp(apart)), 0)
        dx[place] = slope * (pulls.sum(axis=1) - pulls.sum(axis=0)) / max(1, np.count_nonzero(sign > 0))
    return [dx]


@gradient_of("PairWiseLoss")
def pairwise_gradient(request: GradientRequest) -> GradientOperators:
    """That of the scores; labels and lengths have none."""
    lengths = [request.x(2)] if request.has_x(2) else []
    return request.single("PairWiseLossGradient", [request.x(0), request.x(1), request.dy(0), *lengths], [0])
