"""ClassLoss and SoftmaxClassLoss: the negative logarithm of the probability of the right class, at each place.

What SoftmaxWithLoss of Caffe2 has for a matrix, for any axes, with weights of classes and one that is ignored.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dagexec.core.dtypes import FLOAT_TYPES, INT32, INT64
from dagexec.core.gradient import not_differentiable
from dagexec.core.schema import OperatorCall, TensorType, memory_cost
from dagexec.errors import ArgumentError, ShapeError
from dagexec.ops.base.array_function import array_function
from dagexec.ops.base.blocks import Array, compute_dtype

_REDUCTIONS = ("mean", "sum", "none")
_ARGS = {
    "reduction": "mean (of weighted places, divided by their weights), sum or none (default mean)",
    "ignore_index": "a class whose places count 0 (default: none)",
}
_INPUTS = ("labels, of the shape of X without classes", "weights, one a class")


def infer_class_loss(call: OperatorCall) -> list[TensorType]:
    """One number, or one for each place; and the logarithms, of the type of X."""
    meta = call.require_types(0, *FLOAT_TYPES)
    call.require_types(1, INT32, INT64)
    shape = call.inputs[0].shape
    if len(shape) < 2:
        raise call.fail("X must be batch x classes x places")
    places = (shape[0], *shape[2:])
    call.require_shape(1, places, "a class for each place")
    if len(call.inputs) > 2:
        call.require_same_type(0, 2)
        call.require_shape(2, shape[1:2], "a weight for each class")
    reduction = call.arguments.string("reduction", "mean")
    if reduction not in _REDUCTIONS:
        raise ArgumentError(f"{call.label}: 'reduction' must be one of {', '.join(_REDUCTIONS)}, found {reduction!r}")
    call.arguments.int("ignore_index", 0)
    loss = TensorType(places if reduction == "none" else (), meta)
    return [loss, call.inputs[0]][: len(call.definition.output)]


@array_function(
    "ClassLoss",
    inputs=(2, 3),
    infer=infer_class_loss,
    doc="-X of the class that the labels say, at each place, times the weight of the class. (dagexec's own.)",
    input_names=("X, batch x classes x places, logarithms of probabilities", *_INPUTS),
    output_names=("loss",),
    args=_ARGS,
    cost=lambda call, outputs: memory_cost(call, outputs, 4),
)
def class_loss(call: OperatorCall, x: Array, labels: Array, weights: Array | None = None) -> Sequence[Array]:
    """A choice by the labels. Raises ShapeError for a label that is no class."""
    return [_loss(call, x.astype(compute_dtype(x.dtype), copy=False), labels, weights)]


@array_function(
    "SoftmaxClassLoss",
    inputs=(2, 3),
    outputs=(1, 2),
    infer=infer_class_loss,
    doc="ClassLoss of the logarithm of the softmax of X over the classes. (dagexec's own, for ONNX.)",
    input_names=("X, batch x classes x places", *_INPUTS),
    output_names=("loss", "the logarithms"),
    args=_ARGS,
    cost=lambda call, outputs: memory_cost(call, outputs, 20),
)
def softmax_class_loss(call: OperatorCall, x: Array, labels: Array, weights: Array | None = None) -> Sequence[Array]:
    """Softmax by the largest element, then the choice. Raises ShapeError for a label that is no class."""
    wide = x.astype(compute_dtype(x.dtype))
    if wide.size:
        wide -= wide.max(1, keepdims=True)
        wide -= np.log(np.exp(wide).sum(1, keepdims=True))
    return [_loss(call, wide, labels, weights), wide][: len(call.definition.output)]


def _loss(call: OperatorCall, x: Array, labels: Array, weights: Array | None) -> Array:
    classes = x.shape[1]
    counted = np.ones(labels.shape, np.bool_)
    if "ignore_index" in call.arguments:
        counted = labels != call.arguments.int("ignore_index", 0)
    wrong = labels[counted & ((labels < 0) | (labels >= classes))]
    if wrong.size:
        raise ShapeError(f"{call.label}: a label must be in [0, {classes - 1}], found {wrong[0]}")
    chosen = np.where(counted, labels, 0)
    loss = -np.take_along_axis(x, chosen[:, None], 1)[:, 0] if classes else np.zeros(labels.shape, x.dtype)
    weight = counted.astype(x.dtype)
    if weights is not None and classes:
        weight *= weights.astype(x.dtype)[chosen]
    loss = np.where(weight == 0, 0, loss * weight)
    reduction = call.arguments.string("reduction", "mean")
    if reduction == "none":
        return loss
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(loss.sum() / weight.sum() if reduction == "mean" else loss.sum())


not_differentiable("train with SoftmaxWithLoss", "ClassLoss", "SoftmaxClassLoss")
