"""SoftmaxWithLoss and SpatialSoftmaxWithLoss: softmax and the cross entropy of its result in one, and their gradients.

Both see the logits as outer x classes x inner: a row is one (outer, inner), and `inner` is 1 without pixels. The loss
comes from shifted logits, ln(sum of exp) minus the label's, so it stays finite where the probability rounds to zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from dagexec.core.dtypes import FLOAT32, FLOAT_TYPES
from dagexec.core.gradient import GradientOperators, GradientRequest, gradient_of
from dagexec.core.operator import Operator, Step, in_sequence
from dagexec.core.registry import declares
from dagexec.core.schema import OperatorCall, OpSchema, TensorType, memory_cost
from dagexec.errors import ArgumentError, FeedError
from dagexec.ops.base.blocks import BLOCK, Array, compute_dtype, convert, is_narrow, row_pieces
from dagexec.ops.families.loss.averaged import require_one_element
from dagexec.ops.families.loss.labels import IGNORED, label_check, require_labels
from dagexec.platform.records import dataclass

MIN_LOG = math.log(1e-20)
"""Below this logarithm a probability counts as 1e-20 with label_prob, as in Caffe2."""


@dataclass(frozen=True, slots=True)
class ClassView:
    """Logits as outer x classes x inner."""

    outer: int
    classes: int
    inner: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """The three sizes."""
        return (self.outer, self.classes, self.inner)

    @property
    def rows(self) -> int:
        """How many labels there are."""
        return self.outer * self.inner


def flat_view(call: OperatorCall) -> ClassView:
    """The axes from `axis` on are the classes. Raises ShapeError."""
    shape = call.inputs[0].shape
    axis = call.axis("axis", 1, len(shape))
    return ClassView(math.prod(shape[:axis]), math.prod(shape[axis:]), 1)


def spatial_view(call: OperatorCall) -> ClassView:
    """The second axis is the classes; every pixel has a label. Raises ShapeError."""
    shape = call.inputs[0].shape
    if len(shape) < 2:
        raise call.fail(f"X must have at least 2 axes (N, classes, spatial), found {len(shape)}")
    return ClassView(shape[0], shape[1], math.prod(shape[2:]))


View = Callable[[OperatorCall], ClassView]


def _require(call: OperatorCall, view: View, weights: int | None) -> ClassView:
    """The view of the logits. Raises ShapeError unless labels and weights fit, ArgumentError for an order but NCHW."""
    call.require_types(0, *FLOAT_TYPES)
    found = view(call)
    order = call.arguments.string("order", "NCHW").upper()
    if order != "NCHW":
        raise ArgumentError(f"{call.label}: argument 'order' must be NCHW, found {order!r}")
    scale = call.arguments.float("scale", 1.0)
    if scale < 0:
        raise ArgumentError(f"{call.label}: argument 'scale' must be at least 0, found {scale:g}")
    if found.rows and not found.classes:
        raise call.fail("there must be at least one class")
    if call.arguments.bool("label_prob"):
        if view is spatial_view:
            raise ArgumentError(
                f"{call.label}: with a label per pixel, labels are classes; label_prob=1 requires SoftmaxWithLoss"
            )
        call.require_types(1, call.inputs[0].meta, FLOAT32)
        if call.inputs[1].elements != math.prod(found.shape):
            raise call.fail(
                f"with label_prob=1 the labels must be probabilities for {found.rows} rows and {found.classes} "
                f"classes, found shape {call.inputs[1].shape}"
            )
    else:
        require_labels(call, 1, found.rows, f"one for each of {found.rows} rows of {found.classes} classes")
    if weights is not None:
        call.require_types(weights, call.inputs[0].meta, FLOAT32)
        if call.inputs[weights].elements != found.rows:
            raise call.fail(
                f"there must be {found.rows} weights, one per row, found shape {call.inputs[weights].shape}"
            )
    return found


def infer_loss(view: View) -> Callable[[OperatorCall], list[TensorType]]:
    """The softmax has the type of the logits; the loss is a scalar."""

    def infer(call: OperatorCall) -> list[TensorType]:
        _require(call, view, 2 if len(call.inputs) == 3 else None)
        return [call.inputs[0], TensorType((), call.inputs[0].meta)]

    return infer


def infer_loss_gradient(view: View) -> Callable[[OperatorCall], list[TensorType]]:
    """The type of the logits."""

    def infer(call: OperatorCall) -> list[TensorType]:
        count = len(call.inputs)
        _require(call, view, 2 if count == 5 else None)
        call.require_shape(count - 2, call.inputs[0].shape, "the shape of X")
        call.require_same_type(0, count - 2)
        require_one_element(call, count - 1)
        return [call.inputs[0]]

    return infer


ARGUMENTS = {
    "scale": "factor of the loss, at least 0 (default 1)",
    "order": "NCHW, the only one",
    "only_loss": "1: nothing but the loss is used; the gradient may then take the place of the softmax (default 0)",
}


class _SoftmaxLoss(Operator):
    """What the operators of this module share.

    Attributes:
        view: how the logits are seen.
        least: the least label; IGNORED when a row may be skipped.
    """

    view: View
    least = 0

    @property
    def with_distribution(self) -> bool:
        """The labels are probabilities, one a class."""
        return self.arguments.bool("label_prob")

    def sizes(self) -> ClassView:
        """The sizes of the logits."""
        return type(self).view(self.call())

    def row_weights(self, index: int | None, target: Array) -> tuple[list[Step], Array | None]:
        """The steps that write the weight of each row, zero where it is ignored, to the float64 array `target`.

        Also an array that then says which rows are ignored, where some may be.
        """
        steps: list[Step] = []
        if target.size and not self.with_distribution:
            steps.append(label_check(self, 1, self.sizes().classes, self.least))
        if index is None:
            steps.append(partial(target.fill, 1))
        else:
            steps.append(partial(np.copyto, target, self.x(index).reshape(target.shape), casting="unsafe"))
        if self.least != IGNORED:
            return steps, None
        ignored = self.scratch(target.shape, np.bool_)
        steps.append(partial(np.equal, self.x(1).reshape(target.shape), IGNORED, out=ignored))
        steps.append(partial(np.copyto, target, 0, where=ignored))
        return steps, ignored

    def places(self, outer: slice, target: Array) -> list[Step]:
        """The steps that write, for the rows of images `outer`, where the label's class is in the flat piece."""
        sizes = self.sizes()
        labels = self.x(1).reshape(sizes.outer, sizes.inner)[outer]  # outer, inner
        count = len(labels)
        base = np.arange(count)[:, None] * (sizes.classes * sizes.inner) + np.arange(sizes.inner)
        return [
            partial(np.maximum, labels, 0, out=target, casting="unsafe"),
            partial(np.multiply, target, sizes.inner, out=target),
            partial(np.add, target, base, out=target),
        ]


class _Forward(_SoftmaxLoss):
    """Softmax and its loss."""

    def prepare(self) -> Step:
        """Piece by piece of whole rows; then the sum of the losses, in float64."""
        sizes, loss = self.sizes(), self.y(1)
        losses, weights = (self.scratch((sizes.outer, sizes.inner), np.float64) for _ in range(2))
        steps, ignored = self.row_weights(2 if len(self.input_blobs) == 3 else None, weights)
        if sizes.rows == 0:
            return in_sequence([*steps, partial(loss.fill, 0)])
        x, y = self.x(0).reshape(sizes.shape), self.y(0).reshape(sizes.shape)  # outer, classes, inner
        work = compute_dtype(x.dtype)
        count = min(sizes.outer, max(1, BLOCK // (sizes.classes * sizes.inner)))
        piece_shape = (count, sizes.classes, sizes.inner)
        rows = self.scratch((count, 1, sizes.inner), work)
        wide = self.scratch(piece_shape, work) if is_narrow(x.dtype) else None
        picked = self.scratch((count, sizes.inner), work)
        place = self.scratch((count, sizes.inner), np.int64)
        spare = self.scratch(piece_shape, work) if self.with_distribution else None
        if self.with_distribution:
            steps.append(self._check_distribution(sizes))
        for piece in row_pieces(sizes.outer, count):
            source, target, size = x[piece], y[piece], len(x[piece])
            out, row, pick, at = target, rows[:size], picked[:size], place[:size]
            if wide is not None:
                out = wide[:size]
                steps.append(convert(source, out))
                source = out
            steps += [
                partial(np.maximum.reduce, source, axis=1, keepdims=True, out=row),
                partial(np.subtract, source, row, out=out),
            ]
            if spare is None:
                steps += self.places(piece, at)
                steps.append(partial(np.take, out.reshape(-1), at, out=pick, mode="clip"))
            else:
                steps.append(partial(np.copyto, spare[:size], out))
            steps += [
                partial(np.exp, out, out=out),
                partial(np.add.reduce, out, axis=1, keepdims=True, out=row),
                partial(np.divide, out, row, out=out),
                partial(np.log, row, out=row),
            ]
            if spare is None:
                steps.append(partial(np.subtract, row[:, 0], pick, out=losses[piece]))
            else:
                logarithms = spare[:size]
                steps += [
                    partial(np.subtract, logarithms, row, out=logarithms),
                    partial(np.maximum, logarithms, np.asarray(MIN_LOG, work), out=logarithms),
                    partial(np.multiply, logarithms, self.x(1).reshape(sizes.shape)[piece], out=logarithms),
                    partial(np.add.reduce, logarithms, axis=1, out=losses[piece]),
                    partial(np.negative, losses[piece], out=losses[piece]),
                ]
            if wide is not None:
                steps.append(convert(out, target))
        if ignored is not None:
            steps.append(partial(np.copyto, losses, 0, where=ignored))
        steps.append(partial(np.multiply, losses, weights, out=losses))
        scale = self.arguments.float("scale", 1.0)

        def finish() -> None:
            total = float(np.add.reduce(weights, axis=None))
            loss[...] = scale * float(np.add.reduce(losses, axis=None)) / total if total else 0

        return in_sequence([*steps, finish])

    def _check_distribution(self, sizes: ClassView) -> Step:
        """A step that raises FeedError unless every row of labels is a distribution."""
        labels = self.x(1)
        totals = self.scratch((sizes.outer, sizes.inner), total_dtype(labels.dtype))
        return partial(check_distribution, labels, sizes, totals, self.label, self.definition.input[1])


def total_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """In what the probabilities of a row are added up."""
    return np.dtype(np.float64) if dtype == np.float64 else np.dtype(np.float32)


def distribution_tolerance(dtype: np.dtype[Any]) -> float:
    """How far from 1 the probabilities of a row may sum to."""
    return 1e-2 if is_narrow(dtype) else 1e-5


def check_distribution(labels: Array, sizes: ClassView, totals: Array, label: str, name: str) -> None:
    """Raise FeedError, naming the operator `label` and the blob `name`, unless each row of `labels` is a distribution.

    `totals` is memory for a sum a row.
    """
    given, tolerance = labels.reshape(sizes.shape), distribution_tolerance(labels.dtype)
    if not given.min() >= 0:
        place = [int(axis[0]) for axis in np.nonzero(~(labels >= 0))]
        value = float(labels[tuple(place)])
        raise FeedError(f"{label}: probability {value:g} at position {place} of blob {name!r} must be at least 0")
    np.add.reduce(given, axis=1, dtype=totals.dtype, out=totals)
    if not (totals.min() >= 1 - tolerance and totals.max() <= 1 + tolerance):
        row = int(np.flatnonzero(~(abs(totals - 1) <= tolerance))[0])
        found = float(totals.reshape(-1)[row])
        raise FeedError(f"{label}: the probabilities of row {row} of blob {name!r} must sum to 1, found {found:g}")


class _Backward(_SoftmaxLoss):
    """dX = (softmax - label) * weight * scale * dloss / (sum of weights)."""

    def prepare(self) -> Step:
        """A factor a row, then piece by piece."""
        sizes, inputs = self.sizes(), len(self.input_blobs)
        weights = self.scratch((sizes.outer, sizes.inner), np.float64)
        steps, ignored = self.row_weights(2 if inputs == 5 else None, weights)
        if sizes.rows == 0:
            return in_sequence(steps)
        probabilities, gradient = self.x(inputs - 2).reshape(sizes.shape), self.x(inputs - 1).reshape(-1)
        dx = self.y(0).reshape(sizes.shape)
        work = compute_dtype(dx.dtype)
        factors = self.scratch((sizes.outer, sizes.inner), work)
        scale = self.arguments.float("scale", 1.0)

        def factor_of_rows() -> None:
            total = float(np.add.reduce(weights, axis=None))
            np.multiply(weights, scale * float(gradient[0]) / total if total else 0.0, out=factors, casting="unsafe")

        steps.append(factor_of_rows)
        count = min(sizes.outer, max(1, BLOCK // (sizes.classes * sizes.inner)))
        wide = self.scratch((count, sizes.classes, sizes.inner), work) if is_narrow(dx.dtype) else None
        picked = self.scratch((count, sizes.inner), work)
        place = self.scratch((count, sizes.inner), np.int64)
        for piece in row_pieces(sizes.outer, count):
            source, target, factor = probabilities[piece], dx[piece], factors[piece]
            size = len(target)
            out = target
            if wide is not None:
                out = wide[:size]
                steps.append(convert(source, out))
                source = out
            if self.with_distribution:
                steps.append(partial(np.subtract, source, self.x(1).reshape(sizes.shape)[piece], out=out))
                steps.append(partial(np.multiply, out, factor[:, None], out=out))
            else:
                pick, at = picked[:size], place[:size]
                steps += [
                    partial(np.multiply, source, factor[:, None], out=out),
                    *self.places(piece, at),
                    partial(np.take, out.reshape(-1), at, out=pick, mode="clip"),
                    partial(np.subtract, pick, factor, out=pick),
                    partial(np.put, out.reshape(-1), at, pick, mode="clip"),
                ]
            if ignored is not None:
                steps.append(partial(np.copyto, out, 0, where=ignored[piece][:, None]))
            if wide is not None:
                steps.append(convert(out, target))
        return in_sequence(steps)


@declares
def _loss_operator(name: str, view: View, doc: str, args: dict[str, str]) -> OpSchema:
    return OpSchema(
        name,
        inputs=(2, 3),
        infer=infer_loss(view),
        doc=doc,
        input_names=("logits", "labels", "weights"),
        output_names=("softmax", "loss"),
        args=args | ARGUMENTS,
        cost=lambda call, outputs: memory_cost(call, outputs, 16),
    )


@declares
def _gradient_operator(name: str, view: View, args: dict[str, str]) -> OpSchema:
    return OpSchema(
        name,
        inputs=(4, 5),
        infer=infer_loss_gradient(view),
        doc="dX = (softmax - label) * weight * scale * dloss / (sum of weights), 0 when the weights sum to 0.",
        input_names=("logits", "labels", "weights (may be left out)", "softmax", "dloss"),
        output_names=("dX",),
        args=args | ARGUMENTS,
        inplace=lambda source, target: target == 0 and source in (2, 3),
        cost=lambda call, outputs: memory_cost(call, outputs, 2),
    )


_FLAT_ARGUMENTS = {
    "label_prob": "1: the labels are a distribution over the classes (default 0)",
    "axis": "first axis of the classes (default 1)",
}


@_loss_operator(
    "SoftmaxWithLoss",
    flat_view,
    "Softmax over the axes from `axis` on, and scale * (sum over rows of weight * -ln p(label)) / (sum of "
    "weights), a scalar; 0 without rows. With label_prob, -ln p(label) is the cross entropy with a row of labels.",
    _FLAT_ARGUMENTS,
)
class SoftmaxWithLoss(_Forward):
    """Softmax and cross entropy of each row."""

    view = staticmethod(flat_view)


@_gradient_operator("SoftmaxWithLossGradient", flat_view, _FLAT_ARGUMENTS)
class SoftmaxWithLossGradient(_Backward):
    """The gradient of SoftmaxWithLoss."""

    view = staticmethod(flat_view)


@_loss_operator(
    "SpatialSoftmaxWithLoss",
    spatial_view,
    "Softmax over the second axis, and the loss of SoftmaxWithLoss with a label a pixel (N, spatial); pixels with "
    "label -1 are left out.",
    {},
)
class SpatialSoftmaxWithLoss(_Forward):
    """Softmax and cross entropy of each pixel."""

    view = staticmethod(spatial_view)
    least = IGNORED


@_gradient_operator("SpatialSoftmaxWithLossGradient", spatial_view, {})
class SpatialSoftmaxWithLossGradient(_Backward):
    """The gradient of SpatialSoftmaxWithLoss; zero at pixels that are left out."""

    view = staticmethod(spatial_view)
    least = IGNORED


@gradient_of("SoftmaxWithLoss", "SpatialSoftmaxWithLoss")
def softmax_with_loss_gradient(request: GradientRequest) -> GradientOperators:
    """SoftmaxWithLossGradient(X, labels, [weights], softmax, dloss) -> dX; labels and weights have none.

    Caffe2 passes over what depends on the softmax; here its part is added, by SoftmaxGradient.
    """
    inputs = [*request.definition.input, request.y(0)]
    op_type, total = f"{request.definition.type}Gradient", request.dx(0)
    if not request.has_dy(0):
        return request.single(op_type, [*inputs, request.dy(1)], [0])
    axes: dict[str, int] = {"axis": request.arguments.int("axis", 1)}
    if request.definition.type == "SpatialSoftmaxWithLoss":
        axes = {"axis": 1, "single_axis": 1}
    parts = [f"_{total}_of_softmax", f"_{total}_of_loss"]
    made = [request.plain_operator("SoftmaxGradient", [request.y(0), request.dy(0)], [parts[0]], **axes)]
    if not request.has_dy(1):
        made[0].output[0] = total
        return request.result(made, {0: total})
    made.append(request.operator(op_type, [*inputs, request.dy(1)], [parts[1]]))
    made.append(request.plain_operator("Sum", parts[::-1], [total]))
    return request.result(made, {0: total})
