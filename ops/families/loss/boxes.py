"""Detectron's losses of boxes and of whether they hold an object, with their gradients; each is a scalar.

Girshick, 2015, arXiv:1504.08083. All compute in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from dagexec.core.dtypes import FLOAT_TYPES, INT32
from dagexec.core.gradient import gradient_by
from dagexec.core.schema import OperatorCall, TensorType
from dagexec.errors import ArgumentError, FeedError
from dagexec.ops.base.array_function import array_function
from dagexec.ops.base.blocks import Array
from dagexec.ops.families.loss.averaged import require_one_element

SCALE_ARGS = {"scale": "factor of the loss, at least 0 (default 1)"}


def scale_of_loss(call: OperatorCall) -> float:
    """Argument `scale`. Raises ArgumentError for one below 0."""
    scale = call.arguments.float("scale", 1.0)
    if not scale >= 0:
        raise ArgumentError(f"{call.label}: argument 'scale' must be at least 0, found {scale:g}")
    return scale


def require_normalizer(call: OperatorCall, index: int) -> None:
    """Raise ShapeError unless an input is one number, of any float type."""
    call.require_types(index, *FLOAT_TYPES)
    if call.inputs[index].elements != 1:
        raise call.fail(f"the normalizer must have one element, found shape {call.inputs[index].shape}")


def normalizer_of(value: Array) -> float:
    """What a loss is divided by: a count, 1 at least."""
    return max(float(value.reshape(-1)[0]), 1.0)


def scalar_loss(require: Callable[[OperatorCall], None]) -> Callable[[OperatorCall], list[TensorType]]:
    """Inference of a loss: a scalar of X's type."""

    def infer(call: OperatorCall) -> list[TensorType]:
        require(call)
        return [TensorType((), call.inputs[0].meta)]

    return infer


def gradient_of_loss(require: Callable[[OperatorCall], None]) -> Callable[[OperatorCall], list[TensorType]]:
    """Inference of a loss's gradient, whose last input is the gradient of the loss: the type of X."""

    def infer(call: OperatorCall) -> list[TensorType]:
        require(call)
        require_one_element(call, len(call.inputs) - 1)
        return [call.inputs[0]]

    return infer


_BETA_ARGS = {"beta": "the difference at which the square ends, above 0 (default 1)", **SCALE_ARGS}


def _beta(call: OperatorCall) -> float:
    beta = call.arguments.float("beta", 1.0)
    if not beta > 0:
        raise ArgumentError(f"{call.label}: argument 'beta' must be above 0, found {beta:g}")
    return beta


def _smooth_l1(difference: Array, beta: float) -> Array:
    size = np.abs(difference)
    return np.where(size < beta, difference * difference / (2 * beta), size - beta / 2)


def _slope(difference: Array, beta: float) -> Array:
    return np.clip(difference / beta, -1, 1)


def _require_weighted(call: OperatorCall) -> None:
    call.require_same_type(0, 1, 2, 3)
    x = call.inputs[0]
    if not x.shape:
        raise call.fail("Y_hat must have at least 1 axis, found a scalar")
    for index in range(1, 4):
        other = call.inputs[index]
        if other.elements != x.elements or (index == 1 and other.shape[:1] != x.shape[:1]):
            name = call.definition.input[index]
            raise call.fail(f"input {name!r} must have as many elements as Y_hat, {x.shape}, found shape {other.shape}")
    call.require_types(0, *FLOAT_TYPES)
    _beta(call)
    scale_of_loss(call)


def _weighted(call: OperatorCall, y_hat: Array, y: Array, inside: Array) -> tuple[Array, Array, float]:
    """The weights inside, the differences times these, and the factor of the loss."""
    weights = inside.reshape(y_hat.shape).astype(np.float64)
    return weights, weights * (y_hat - y.astype(np.float64).reshape(y_hat.shape)), scale_of_loss(call) / max(len(y), 1)


_WEIGHTED = ("Y_hat", "Y", "alpha_in", "alpha_out")


@array_function(
    "SmoothL1Loss",
    infer=scalar_loss(_require_weighted),
    doc="scale / N * the sum of alpha_out * f(alpha_in * (Y_hat - Y)), where f(x) is x^2 / (2 beta) if |x| < beta, "
    "else |x| - beta / 2, and N is the size of the first axis.",
    input_names=_WEIGHTED,
    output_names=("loss",),
    args=_BETA_ARGS,
)
def smooth_l1_loss(call: OperatorCall, y_hat: Array, y: Array, inside: Array, outside: Array) -> Sequence[Array]:
    """All elements at once."""
    _, difference, factor = _weighted(call, y_hat, y, inside)
    return [np.asarray((_smooth_l1(difference, _beta(call)) * outside.reshape(y_hat.shape)).sum() * factor)]


@array_function(
    "SmoothL1LossGradient",
    infer=gradient_of_loss(_require_weighted),
    doc="The gradient of SmoothL1Loss by Y_hat.",
    input_names=(*_WEIGHTED, "dloss"),
    output_names=("dY_hat",),
    args=_BETA_ARGS,
)
def smooth_l1_loss_gradient(
    call: OperatorCall, y_hat: Array, y: Array, inside: Array, outside: Array, dloss: Array
) -> Sequence[Array]:
    """The slope times both weights."""
    weights, difference, factor = _weighted(call, y_hat, y, inside)
    slope = _slope(difference, _beta(call)) * weights * outside.reshape(y_hat.shape)
    return [slope * factor * float(dloss.reshape(-1)[0])]


gradient_by("SmoothL1Loss", "SmoothL1LossGradient", ("X0", "X1", "X2", "X3", "dY"))


def _require_selected(call: OperatorCall) -> None:
    call.require_same_type(0, 1)
    call.require_types(0, *FLOAT_TYPES)
    call.require_rank(0, 4)
    call.require_types(2, *FLOAT_TYPES)
    rows = call.require_rank(1, 2)[0]
    call.require_shape(1, (rows, 4), "4 numbers for each box")
    call.require_shape(2, (rows, 4), "image, first channel, row and column of each box")
    require_normalizer(call, 3)
    _beta(call)
    scale_of_loss(call)


def _selected(call: OperatorCall, x: Array, locations: Array) -> tuple[Array, ...]:
    """Where the four numbers of each box are. Raises FeedError for places that are not in X."""
    image, channel, row, column = (part[:, None] for part in locations.astype(np.int64).T)
    places = (image, channel + np.arange(4), row, column)
    if any(part.size and (part.min() < 0 or part.max() >= size) for part, size in zip(places, x.shape, strict=True)):
        raise FeedError(f"{call.label}: a location is not in Y_hat, which has shape {x.shape}")
    return places


_SELECTED = ("Y_hat", "Y", "locations: image, first channel, row, column", "normalizer")


@array_function(
    "SelectSmoothL1Loss",
    infer=scalar_loss(_require_selected),
    doc="scale / max(normalizer, 1) * the sum of f(Y_hat - Y) over boxes, four channels of Y_hat each from a location "
    "on; f is that of SmoothL1Loss.",
    input_names=_SELECTED,
    output_names=("loss",),
    args=_BETA_ARGS,
)
def select_smooth_l1_loss(call: OperatorCall, x: Array, y: Array, locations: Array, count: Array) -> Sequence[Array]:
    """The boxes at once."""
    difference = x[_selected(call, x, locations)].astype(np.float64) - y
    return [np.asarray(_smooth_l1(difference, _beta(call)).sum() * scale_of_loss(call) / normalizer_of(count))]


@array_function(
    "SelectSmoothL1LossGradient",
    infer=gradient_of_loss(_require_selected),
    doc="The gradient of SelectSmoothL1Loss by Y_hat: zero but at the locations.",
    input_names=(*_SELECTED, "dloss"),
    output_names=("dY_hat",),
    args=_BETA_ARGS,
)
def select_smooth_l1_loss_gradient(
    call: OperatorCall, x: Array, y: Array, locations: Array, count: Array, dloss: Array
) -> Sequence[Array]:
    """The slopes, added up where locations meet."""
    places, result = _selected(call, x, locations), np.zeros(x.shape)
    factor = scale_of_loss(call) / normalizer_of(count) * float(dloss.reshape(-1)[0])
    np.add.at(result, places, _slope(x[places].astype(np.float64) - y, _beta(call)) * factor)
    return [result]


gradient_by("SelectSmoothL1Loss", "SelectSmoothL1LossGradient", ("X0", "X1", "X2", "X3", "dY"))

_OBJECT_ARGS = {"normalize": "0: the sum of the losses, else their mean (default 1)", **SCALE_ARGS}


def _require_targets(call: OperatorCall) -> None:
    call.require_types(0, *FLOAT_TYPES)
    call.require_types(1, INT32)
    if call.inputs[0].elements != call.inputs[1].elements:
        raise call.fail(f"X and the targets must have as many elements, found {call.inputs[1].shape} targets")
    scale_of_loss(call)
    call.arguments.bool("normalize", True)


def _factor(call: OperatorCall, counted: Array) -> float:
    normalize = call.arguments.bool("normalize", True)
    return scale_of_loss(call) / (max(float(np.count_nonzero(counted)), 1e-5) if normalize else 1)


@array_function(
    "SigmoidCrossEntropyLoss",
    infer=scalar_loss(_require_targets),
    doc="scale times the mean of -ln of the likelihood of targets 0 and 1 under the logistic function of X; targets -1 "
    "are passed over.",
    input_names=("X", "targets"),
    output_names=("loss",),
    args=_OBJECT_ARGS,
)
def sigmoid_cross_entropy_loss(call: OperatorCall, x: Array, targets: Array) -> Sequence[Array]:
    """max(x, 0) - t x + ln(1 + exp(-|x|)), which does not overflow."""
    wide, t = x.reshape(-1).astype(np.float64), targets.reshape(-1)
    losses = np.maximum(wide, 0) - wide * t + np.log1p(np.exp(-np.abs(wide)))
    return [np.asarray(losses[t != -1].sum() * _factor(call, t != -1))]


@array_function(
    "SigmoidCrossEntropyLossGradient",
    infer=gradient_of_loss(_require_targets),
    doc="The gradient of SigmoidCrossEntropyLoss by X.",
    input_names=("X", "targets", "dloss"),
    output_names=("dX",),
    args=_OBJECT_ARGS,
)
def sigmoid_cross_entropy_loss_gradient(call: OperatorCall, x: Array, targets: Array, dloss: Array) -> Sequence[Array]:
    """The logistic function less the target."""
    t = targets.reshape(x.shape)
    slope = (1 + np.tanh(x.astype(np.float64) / 2)) / 2 - t
    return [np.where(t == -1, 0, slope) * (_factor(call, t != -1) * float(dloss.reshape(-1)[0]))]


gradient_by("SigmoidCrossEntropyLoss", "SigmoidCrossEntropyLossGradient", ("X0", "X1", "dY"))
