"""Gradients of activations and of softmax by oneDNN, in one pass over Y and dY.

A gradient of an activation is a binary primitive of Y, a comparison or a product, whose post-ops make it the derivative
and multiply it by dY. That takes the time of a product of two tensors; oneDNN 3.1's own backward primitives take two to
four times that (737,280 elements, one core with AVX-512: 0.1 ms against 0.3). Where dY is infinite or NaN and a Relu or
a Clip is closed, the product is NaN; the default engine's gradient is 0. A Y that is NaN counts as between the limits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np

from dagexec.core.dtypes import FLOAT32
from dagexec.core.operator import Operator, Step
from dagexec.core.registry import operator
from dagexec.errors import UnsupportedFeatureError
from dagexec.ops.engines.onednn.descriptors import (
    DIFF_DST,
    DIFF_SRC,
    DST,
    FORWARD_TRAINING,
    POST_OP,
    SRC,
    SRC_1,
    Array,
    Descriptor,
)
from dagexec.ops.engines.onednn.operator import OneDNNOperator
from dagexec.ops.engines.onednn.post_ops import BINARY, ELTWISE
from dagexec.ops.engines.onednn.softmax import LOG_SOFTMAX, SOFTMAX
from dagexec.ops.families.activation import gradient as activation_gradient
from dagexec.ops.families.activation import softmax_gradient
from dagexec.ops.families.activation.softmax import grouping
from dagexec.platform.records import dataclass

_AT_LEAST, _ABOVE, _BELOW = 0x1FFF6, 0x1FFF7, 0x1FFF9


@dataclass(frozen=True)
class Derivative:
    """A derivative as a function of Y: `algorithm` of Y and a number, or of Y and Y, then times a and plus b.

    Attributes:
        algorithm: of a binary primitive (`dnnl_alg_kind_t`).
        number: its second operand; None for Y.
        linear: a and b.
        times_y: the result is multiplied by Y.
        above: that product counts as 1 above this number, else as 0; None where it counts as it is.
    """

    algorithm: int
    number: float | None
    linear: tuple[float, float] = (1.0, 0.0)
    times_y: bool = False
    above: float | None = None


def _leaky_relu(op: Operator) -> Derivative:
    alpha = op.arguments.float("alpha", activation_gradient.LeakyReluGradient.constants["alpha"])
    return Derivative(_AT_LEAST, 0.0, (1 - alpha, alpha))


def _window(op: activation_gradient.ClipGradient) -> Derivative:
    """1 between the limits: where Y is below the upper one, Y, else 0, is above the lower one, if that is not negative.

    Raises UnsupportedFeatureError for a negative lower limit with an upper one, and for 16-bit floats.
    """
    low, high = op.limits()
    if op.input(0).meta is not FLOAT32:
        raise UnsupportedFeatureError(f"{op.label}: oneDNN would round the limits")
    if math.isinf(high):
        return Derivative(_ABOVE, low)
    if math.isinf(low):
        return Derivative(_BELOW, high)
    if low < 0:
        raise UnsupportedFeatureError(f"{op.label}: oneDNN does not support two limits with a negative lower one")
    return Derivative(_BELOW, high, times_y=True, above=low)


DERIVATIVES: Mapping[type[Operator], Callable[[Any], Derivative]] = {
    activation_gradient.ReluGradient: lambda op: Derivative(_ABOVE, 0.0),
    activation_gradient.LeakyReluGradient: _leaky_relu,
    activation_gradient.ClipGradient: _window,
    activation_gradient.SigmoidGradient: lambda op: Derivative(BINARY["mul"], 1.0, (-1.0, 1.0), times_y=True),
    activation_gradient.TanhGradient: lambda op: Derivative(BINARY["mul"], None, (-1.0, 1.0)),
}
"""By the default engine's class."""


class FunctionGradient(OneDNNOperator):
    """The gradient of an activation, whose inputs are Y and dY."""

    def prepare_primitive(self) -> Step:
        """One primitive on the elements in a row."""
        derivative = next(DERIVATIVES[cls] for cls in type(self).__mro__ if cls in DERIVATIVES)(self)
        y, dy, dx = (array.reshape(1, -1) for array in (self.x(0), self.x(1), self.y(0)))
        layout, attributes = self.packed(y), self.attributes()
        if derivative.number is None:
            beside: tuple[Descriptor, Array] = (layout, y)
        else:
            beside = self._number(derivative.number)
        links: list[tuple[Descriptor, Array] | None] = []
        if derivative.linear != (1.0, 0.0):
            attributes.eltwise(*ELTWISE["linear"](*derivative.linear))
            links.append(None)
        if derivative.times_y:
            attributes.binary(BINARY["mul"], layout)
            links.append((layout, y))
        if derivative.above is not None:
            limit = self._number(derivative.above)
            attributes.binary(_ABOVE, limit[0])
            links.append(limit)
        attributes.binary(BINARY["mul"], layout)
        links.append((layout, dy))
        handles = (layout, beside[0], layout, attributes)
        found = self.describe_fast("binary", self.onednn.engine, derivative.algorithm, *handles)
        factors = {POST_OP * (number + 1) | SRC_1: link for number, link in enumerate(links) if link is not None}
        bound = self.in_parts(found, {SRC: (layout, y), SRC_1: beside, DST: (layout, dx), **factors}, (1,))
        if self.definition.input[0] == self.definition.input[1]:
            return bound.step
        inputs = {1: POST_OP * len(links) | SRC_1}
        if derivative.number is not None and not derivative.times_y:
            inputs[0] = SRC
        return self.rebindable(bound.step, bound, inputs, {0: DST})

    def _number(self, value: float) -> tuple[Descriptor, Array]:
        """An operand that is one number for all elements."""
        constant = np.full((1, 1), value, np.float32)
        return self.packed(constant), constant


class NormalizationGradient(OneDNNOperator):
    """The gradient of Softmax or LogSoftmax."""

    algorithm: ClassVar[int]

    def prepare_primitive(self) -> Step:
        """One primitive along the middle axis of outer x group x inner."""
        outer, group, inner = grouping(self.call())
        shape = (outer, group) if inner == 1 else (outer, group, inner)
        y, dy, dx = self.x(0).reshape(shape), self.x(1).reshape(shape), self.y(0).reshape(shape)
        layout, attributes = self.packed(y), self.attributes()
        both = (layout, layout)
        forward = self.describe(
            "softmax_forward", self.onednn.engine, FORWARD_TRAINING, self.algorithm, *both, 1, attributes
        )
        handles = (*both, layout, 1, forward, attributes)
        found = self.describe_fast("softmax_backward", self.onednn.engine, self.algorithm, *handles)
        bound = self.in_parts(found, {DST: (layout, y), DIFF_DST: (layout, dy), DIFF_SRC: (layout, dx)}, (0, 2))
        return self.rebindable(bound.step, bound, {0: DST, 1: DIFF_DST}, {0: DIFF_SRC})


for _default in DERIVATIVES:
    _members = {"__doc__": _default.__doc__, "__module__": __name__}
    operator(_default.schema, engine="ONEDNN")(type(_default.__name__, (FunctionGradient, _default), _members))


@operator(softmax_gradient.SoftmaxGradient.schema, engine="ONEDNN")
class SoftmaxGradient(NormalizationGradient, softmax_gradient.SoftmaxGradient):
    """Gradient of Softmax."""

    algorithm = SOFTMAX


@operator(softmax_gradient.LogSoftmaxGradient.schema, engine="ONEDNN")
class LogSoftmaxGradient(NormalizationGradient, softmax_gradient.LogSoftmaxGradient):
    """Gradient of LogSoftmax."""

    algorithm = LOG_SOFTMAX
