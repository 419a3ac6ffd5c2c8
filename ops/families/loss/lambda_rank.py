"""LambdaRankNdcg: how far the order of scores is from that of ratings, in each session.

Burges et al., 2006, "Learning to rank with nonsmooth cost functions". The gradient is that of a loss over pairs, whose
weights say how much their exchange changes the discounted cumulative gain.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dagexec.core.dtypes import FLOAT32
from dagexec.core.gradient import GradientOperators, GradientRequest, gradient_of
from dagexec.core.schema import OperatorCall, TensorType
from dagexec.ops.base.array_function import array_function
from dagexec.ops.base.blocks import Array
from dagexec.ops.families.sparse.segments import checked_lengths

_ARGS = {
    "use_ndcg_as_loss": "1: the loss is what is missing in the gain of the order (default 0: the loss over pairs)",
    "use_idcg_normalization": "1: gains are divided by that of the best order (default 1)",
    "use_exp_gain": "0: with use_ndcg_as_loss the gain is the rating, else 2 to its power (default 1)",
}


def infer_lambda_rank(call: OperatorCall) -> list[TensorType]:
    """A loss for each session, and a number for each score."""
    call.require_types(0, FLOAT32)
    call.require_same_type(0, 1)
    (count,) = call.require_rank(0, 1)
    call.require_shape(1, (count,), "a rating for each score")
    checked_lengths(call, 2, count)
    return [TensorType(call.inputs[2].shape, FLOAT32), call.inputs[0]]


def _discounts(values: Array) -> Array:
    """1 / log2(1 + place) of each value, the greatest being at place 1, of equal ones the last."""
    found = np.empty(len(values))
    found[np.argsort(values, kind="stable")] = 1 / np.log2(np.arange(len(values), 0, -1) + 1)
    return found


def _session(call: OperatorCall, y: Array, r: Array) -> tuple[float, Array]:
    """Loss and slopes of one session; nothing where there are no ratings."""
    arguments = call.arguments
    if np.abs(r).sum() < 1e-6:
        return 0.0, np.zeros(len(y))
    by_gain = arguments.bool("use_ndcg_as_loss")
    gains = r if by_gain and not arguments.bool("use_exp_gain", True) else 2**r
    discounts = _discounts(y)
    best = max(float((gains * _discounts(r)).sum()), 1e-5)
    scale = 1 / best if arguments.bool("use_idcg_normalization", True) else 1.0
    weights = np.abs((gains[:, None] - gains) * (discounts[:, None] - discounts)) * scale
    above, apart = r[:, None] > r, y[:, None] - y
    slopes = (weights * (np.exp(-np.logaddexp(0, -apart)) - above)).sum(1)
    if by_gain:
        return (best - float((gains * discounts).sum())) * scale, slopes
    return 2 * float((weights * above * np.logaddexp(0, -apart)).sum()), slopes


@array_function(
    "LambdaRankNdcg",
    infer=infer_lambda_rank,
    doc="For each session how far the order of its scores is from that of its ratings; and by pairs how each score "
    "changes that.",
    input_names=("Y", "R", "SESSION_LENS"),
    output_names=("LOSS", "DY"),
    args=_ARGS,
    value_inputs=(2,),
)
def lambda_rank(call: OperatorCall, y: Array, r: Array, lengths: Array) -> Sequence[Array]:
    """Session by session, in float64."""
    losses, slopes = np.zeros(len(lengths)), np.zeros(len(y))
    ends = np.cumsum(lengths)
    for number, (start, end) in enumerate(zip(ends - lengths, ends, strict=True)):
        own = slice(int(start), int(end))
        losses[number], slopes[own] = _session(call, y[own].astype(np.float64), r[own].astype(np.float64))
    return [losses, slopes]


def infer_lambda_rank_gradient(call: OperatorCall) -> list[TensorType]:
    """A slope for each score."""
    call.require_types(0, FLOAT32)
    call.require_same_type(0, 2, 3)
    (count,) = call.require_rank(0, 1)
    call.require_shape(2, (count,), "a slope for each score")
    checked_lengths(call, 1, count)
    call.require_shape(3, call.inputs[1].shape, "a gradient for each session")
    return [call.inputs[0]]


@array_function(
    "LambdaRankNdcgGradient",
    infer=infer_lambda_rank_gradient,
    doc="The gradient of LambdaRankNdcg by its scores: slopes times the gradient of their session's loss.",
    input_names=("Y", "SESSION_LENS", "DY", "dLOSS"),
    output_names=("dY",),
    args=_ARGS,
    value_inputs=(1,),
)
def lambda_rank_gradient(_call: OperatorCall, _y: Array, lengths: Array, dy: Array, dloss: Array) -> Sequence[Array]:
    """One product."""
    return [dy * np.repeat(dloss, lengths)]


@gradient_of("LambdaRankNdcg")
def lambda_rank_maker(request: GradientRequest) -> GradientOperators:
    """(Y, SESSION_LENS, DY, dLOSS) -> dY, as Caffe2's."""
    request.require_no_dy(1)
    inputs = [request.x(0), request.x(2), request.y(1), request.dy(0)]
    return request.single("LambdaRankNdcgGradient", inputs, [0])
