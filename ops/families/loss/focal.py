"""Focal losses of RetinaNet, and GroupSpatialSoftmax: classes of several anchors, one group of channels each.

X is N, anchors * classes, H, W, and there is a label for each anchor of each pixel. Lin et al., 2017, arXiv:1708.02002.
All compute in float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from dagexec.core.dtypes import FLOAT_TYPES, INT32
from dagexec.core.gradient import GradientOperators, GradientRequest, gradient_by, gradient_of
from dagexec.core.rows import along_axis
from dagexec.core.schema import OperatorCall, TensorType
from dagexec.errors import ArgumentError
from dagexec.ops.base.array_function import array_function
from dagexec.ops.base.blocks import Array
from dagexec.ops.base.layout import ORDER_HELP
from dagexec.ops.families.loss.boxes import (
    SCALE_ARGS,
    gradient_of_loss,
    normalizer_of,
    require_normalizer,
    scalar_loss,
    scale_of_loss,
)
from dagexec.ops.families.loss.labels import IGNORED, check_labels

_LEAST_LOG = math.log(np.finfo(np.float32).tiny)
"""Below this logarithm a probability counts as the smallest normal float32, as in Caffe2."""


def _groups(call: OperatorCall, default: int) -> tuple[int, int, int, int, int]:
    """Images, anchors, classes, rows and columns of X. Raises ShapeError, or ArgumentError for an order but NCHW."""
    call.require_types(0, *FLOAT_TYPES)
    images, channels, height, width = call.require_rank(0, 4)
    classes = call.arguments.int("num_classes", default)
    if call.arguments.string("order", "NCHW") != "NCHW":
        raise ArgumentError(f"{call.label}: argument 'order' must be NCHW")
    if classes < 1 or channels % classes:
        raise call.fail(f"the {channels} channels of X must be a multiple of num_classes={classes}")
    return images, channels // classes, classes, height, width


_GROUP_ARGS = {"num_classes": "channels of an anchor (default 81)", "order": ORDER_HELP}


def infer_group_softmax(call: OperatorCall) -> list[TensorType]:
    """The type of the scores, or of the probabilities in the gradient."""
    _groups(call, 81)
    if len(call.inputs) > 1:
        call.require_same_type(0, 1)
        call.require_shape(1, call.inputs[0].shape, "the shape of the probabilities")
    return [call.inputs[0]]


@array_function(
    "GroupSpatialSoftmax",
    infer=infer_group_softmax,
    doc="The softmax of each group of channels, at each pixel.",
    input_names=("scores",),
    output_names=("probabilities",),
    args=_GROUP_ARGS,
    rows=along_axis(0, 0),
)
def group_spatial_softmax(call: OperatorCall, scores: Array) -> Sequence[Array]:
    """Group by group."""
    return [_softmax(scores.reshape(_groups(call, 81)))]


def _softmax(grouped: Array) -> Array:
    wide = grouped.astype(np.float64)
    if not wide.size:
        return wide
    powers = np.exp(wide - wide.max(2, keepdims=True))
    found: Array = powers / powers.sum(2, keepdims=True)
    return found


@array_function(
    "GroupSpatialSoftmaxGradient",
    infer=infer_group_softmax,
    doc="The gradient of GroupSpatialSoftmax, from its probabilities.",
    input_names=("probabilities", "dprobabilities"),
    output_names=("dscores",),
    args=_GROUP_ARGS,
    rows=along_axis(0, 0, 1),
)
def group_spatial_softmax_gradient(call: OperatorCall, y: Array, dy: Array) -> Sequence[Array]:
    """y (dy - the sum of y dy over the group)."""
    p, slope = (part.reshape(_groups(call, 81)).astype(np.float64) for part in (y, dy))
    return [p * (slope - (p * slope).sum(2, keepdims=True))]


gradient_by("GroupSpatialSoftmax", "GroupSpatialSoftmaxGradient", ("Y", "dY"))

_FOCAL_ARGS = {
    "alpha": "weight of objects; the background's is 1 - alpha (default 0.25)",
    "gamma": "the power that takes weight from what is well classified (default 1)",
    **SCALE_ARGS,
}


def _require_labeled(call: OperatorCall, classes: int) -> None:
    images, anchors, _, height, width = _groups(call, classes)
    call.require_types(1, INT32)
    if call.inputs[1].elements != images * anchors * height * width:
        raise call.fail(
            f"expected a label for each of {anchors} anchors of a pixel, found shape {call.inputs[1].shape}"
        )
    require_normalizer(call, 2)
    scale_of_loss(call)


def _weights(call: OperatorCall, count: Array) -> tuple[float, float, float]:
    """Of objects and of the background, divided by their count; gamma."""
    alpha, factor = call.arguments.float("alpha", 0.25), scale_of_loss(call) / normalizer_of(count)
    return alpha * factor, (1 - alpha) * factor, call.arguments.float("gamma", 1.0)


def _require_binary(call: OperatorCall) -> None:
    _require_labeled(call, 80)


def _binary(call: OperatorCall, x: Array, labels: Array) -> tuple[Array, Array, Array, Array]:
    """Whether each logit is that of its label, whether it is of another class, and ln p and ln(1 - p)."""
    images, anchors, classes, height, width = _groups(call, 80)
    logits = x.reshape(images, anchors, classes, height, width).astype(np.float64)
    label = labels.reshape(images, anchors, 1, height, width)
    own = label == np.arange(1, classes + 1)[:, None, None]
    tail = np.log1p(np.exp(-np.abs(logits)))
    return own, ~own & (label != IGNORED), np.minimum(logits, 0) - tail, np.minimum(-logits, 0) - tail


_BINARY_ARGS = {"num_classes": "channels of an anchor, the background not among them (default 80)", **_FOCAL_ARGS}
_LABELED = ("logits", "labels: one for each anchor of a pixel, 0 the background, -1 ignored", "normalizer")


@array_function(
    "SigmoidFocalLoss",
    infer=scalar_loss(_require_binary),
    doc="scale / max(normalizer, 1) * the sum of -alpha (1 - p)^gamma ln p for the class of the label and "
    "-(1 - alpha) p^gamma ln(1 - p) for the others, p the logistic function of the logit.",
    input_names=_LABELED,
    output_names=("loss",),
    args=_BINARY_ARGS,
)
def sigmoid_focal_loss(call: OperatorCall, x: Array, labels: Array, count: Array) -> Sequence[Array]:
    """All logits at once."""
    own, other, log_p, log_q = _binary(call, x, labels)
    objects, background, gamma = _weights(call, count)
    of_own = objects * np.exp(gamma * log_q) * np.maximum(log_p, _LEAST_LOG)
    return [np.asarray(-np.where(own, of_own, other * background * np.exp(gamma * log_p) * log_q).sum())]


@array_function(
    "SigmoidFocalLossGradient",
    infer=gradient_of_loss(_require_binary),
    doc="The gradient of SigmoidFocalLoss by the logits.",
    input_names=(*_LABELED, "dloss"),
    output_names=("dlogits",),
    args=_BINARY_ARGS,
)
def sigmoid_focal_loss_gradient(
    call: OperatorCall, x: Array, labels: Array, count: Array, dloss: Array
) -> Sequence[Array]:
    """By the derivative of the logistic function, p (1 - p)."""
    own, other, log_p, log_q = _binary(call, x, labels)
    objects, background, gamma = _weights(call, count)
    p, q = np.exp(log_p), np.exp(log_q)
    of_own = objects * np.exp(gamma * log_q) * (gamma * p * np.maximum(log_p, _LEAST_LOG) - q)
    of_other = background * np.exp(gamma * log_p) * (p - gamma * q * log_q)
    return [np.where(own, of_own, other * of_other) * float(dloss.reshape(-1)[0])]


gradient_by("SigmoidFocalLoss", "SigmoidFocalLossGradient", ("X0", "X1", "X2", "dY"))

_SOFTMAX_ARGS = {"num_classes": "channels of an anchor, the first the background (default 81)", **_FOCAL_ARGS}


def _require_softmax(call: OperatorCall) -> None:
    _require_labeled(call, 81)
    if len(call.inputs) > 3:
        call.require_same_type(0, 3)
        if call.inputs[3].elements != call.inputs[0].elements:
            raise call.fail(f"expected a probability for each score, found shape {call.inputs[3].shape}")


def infer_softmax_focal(call: OperatorCall) -> list[TensorType]:
    """The loss, and probabilities like the scores."""
    return [*scalar_loss(_require_softmax)(call), call.inputs[0]]


def _of_labels(call: OperatorCall, probabilities: Array, labels: Array, count: Array) -> tuple[Array, Array, Array]:
    """Probabilities of the labels, their weights and places. Raises FeedError for a label out of range."""
    images, anchors, classes, height, width = _groups(call, 81)
    label = labels.reshape(images, anchors, 1, height, width)
    check_labels(label, classes, IGNORED, call.label, call.definition.input[1])
    objects, background, _ = _weights(call, count)
    weights = np.where(label == 0, background, objects) * (label != IGNORED)
    places = np.maximum(label, 0)
    return np.take_along_axis(probabilities, places, 2), weights, places


@array_function(
    "SoftmaxFocalLoss",
    outputs=(2, 2),
    infer=infer_softmax_focal,
    doc="scale / max(normalizer, 1) * the sum of -w (1 - p)^gamma ln p, p the softmax's probability of the label and w "
    "alpha for objects, 1 - alpha for the background.",
    input_names=("scores", *_LABELED[1:]),
    output_names=("loss", "probabilities"),
    args=_SOFTMAX_ARGS,
)
def softmax_focal_loss(call: OperatorCall, scores: Array, labels: Array, count: Array) -> Sequence[Array]:
    """The softmax first."""
    probabilities = _softmax(scores.reshape(_groups(call, 81)))
    p, weights, _ = _of_labels(call, probabilities, labels, count)
    logarithms = np.log(np.maximum(p, math.exp(_LEAST_LOG)))
    losses = weights * (1 - p) ** call.arguments.float("gamma", 1.0) * logarithms
    return [np.asarray(-losses.sum()), probabilities]


@array_function(
    "SoftmaxFocalLossGradient",
    infer=gradient_of_loss(_require_softmax),
    doc="The gradient of SoftmaxFocalLoss by the scores; their values are not read.",
    input_names=("scores", *_LABELED[1:], "probabilities", "dloss"),
    output_names=("dscores",),
    args=_SOFTMAX_ARGS,
)
def softmax_focal_loss_gradient(
    call: OperatorCall, _scores: Array, labels: Array, count: Array, probabilities: Array, dloss: Array
) -> Sequence[Array]:
    """The slope by the probability of the label, times p, to the label's score and away from all."""
    all_p = probabilities.reshape(_groups(call, 81)).astype(np.float64)
    p, weights, places = _of_labels(call, all_p, labels, count)
    gamma, rest = call.arguments.float("gamma", 1.0), 1 - p
    logarithms = np.log(np.maximum(p, math.exp(_LEAST_LOG)))
    steep = np.power(rest, gamma - 1, out=np.zeros_like(rest), where=rest > 0)
    slope = weights * (gamma * steep * p * logarithms - rest**gamma) * float(dloss.reshape(-1)[0])
    result = -slope * all_p
    np.put_along_axis(result, places, np.take_along_axis(result, places, 2) + slope, 2)
    return [result]


@gradient_of("SoftmaxFocalLoss")
def softmax_focal_loss_maker(request: GradientRequest) -> GradientOperators:
    """Its probabilities are there to be read again, not to be differentiated."""
    request.require_no_dy(1)
    inputs = [request.x(0), request.x(1), request.x(2), request.y(1), request.dy(0)]
    return request.single("SoftmaxFocalLossGradient", inputs, (0,))
