"""HSoftmax: the loss of a tree of softmaxes, on whose leaves classes are (Morin and Bengio, 2005).

Argument `hierarchy` is a message of Caffe2's: how many rows of weights there are, and for each class the softmaxes on
the way to it, each as its first row, how many rows it has, and which of them leads on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from dagexec.core.dtypes import FLOAT32, INT32
from dagexec.core.gradient import GradientOperators, GradientRequest, gradient_of
from dagexec.core.schema import OperatorCall, TensorType
from dagexec.errors import ArgumentError
from dagexec.ops.base.array_function import array_function
from dagexec.ops.base.blocks import Array
from dagexec.platform.records import dataclass
from dagexec.storage.wire import WireError, fields, read_varint

Floats = npt.NDArray[np.float32]

_ARGS = {"hierarchy": "the tree, a HierarchyProto in bytes"}
_INPUTS = ("X", "W", "b", "labels")


@dataclass(frozen=True)
class Choice:
    """A softmax on the way to a class: `count` rows of the weights from `first` on, of which `target` leads on."""

    first: int
    count: int
    target: int

    @property
    def rows(self) -> slice:
        """Its rows of the weights."""
        return slice(self.first, self.first + self.count)


def _numbers(message: memoryview) -> dict[int, int]:
    return {number: read_varint(value, 0)[0] for number, kind, value, _ in fields(message) if kind == 0}


def _messages(message: memoryview, number: int) -> Iterator[memoryview]:
    return (value for field, kind, value, _ in fields(message) if (field, kind) == (number, 2))


def _paths(call: OperatorCall) -> tuple[int, dict[int, list[Choice]]]:
    """The rows of the weights, and the way to each class. Raises ArgumentError for what is no tree over these rows."""
    message = memoryview(call.arguments.field("hierarchy", "s") or b"")
    try:
        size = _numbers(message).get(1, 0)
        found = {
            _numbers(path).get(1, 0): [
                Choice(*(_numbers(node).get(number, 0) for number in (1, 2, 3))) for node in _messages(path, 2)
            ]
            for path in _messages(message, 2)
        }
    except WireError as error:
        raise ArgumentError(f"{call.label}: argument 'hierarchy' is no HierarchyProto: {error}") from None
    for word, choices in found.items():
        for choice in choices:
            if not (0 <= choice.target < choice.count and choice.first + choice.count <= size):
                raise ArgumentError(f"{call.label}: class {word} has {choice}, which is not among {size} rows")
    return size, found


def _ways(call: OperatorCall, labels: Array) -> list[list[Choice]]:
    """The way to each label. Raises ShapeError for a class that has none."""
    paths = _paths(call)[1]
    unknown = [label for label in labels.reshape(-1).tolist() if label not in paths]
    if unknown:
        raise call.fail(f"label {unknown[0]} has no path in 'hierarchy'")
    return [paths[label] for label in labels.reshape(-1).tolist()]


def _require(call: OperatorCall) -> int:
    """The number of values between, logits and probabilities. Raises ShapeError for inputs that do not fit."""
    call.require_same_type(0, 1, 2)
    call.require_types(0, FLOAT32)
    call.require_types(3, INT32)
    rows, width = call.require_rank(0, 2)
    size = _paths(call)[0]
    call.require_shape(1, (size, width), "a row for each that 'hierarchy' has")
    call.require_shape(2, (size,), "a number for each row of W")
    if call.inputs[3].elements != rows:
        raise call.fail(f"expected a label for each of {rows} rows, found {call.inputs[3].elements}")
    return 2 * sum(choice.count for way in _ways(call, call.known_value(3)) for choice in way)


def infer_hsoftmax(call: OperatorCall) -> list[TensorType]:
    """A loss for each row, and what is between."""
    between = _require(call)
    return [TensorType(call.inputs[0].shape[:1], FLOAT32), TensorType((between,), FLOAT32)]


@array_function(
    "HSoftmax",
    infer=infer_hsoftmax,
    doc="For each row of X the negative logarithm of the probability of its label: the product of those of the choices "
    "on the way to it, each by a softmax of X W^T + b over its rows of W. Between: logits and probabilities of each.",
    input_names=_INPUTS,
    output_names=("loss", "between"),
    args=_ARGS,
    required_args=("hierarchy",),
    value_inputs=(3,),
)
def hsoftmax(call: OperatorCall, x: Array, weights: Array, bias: Array, labels: Array) -> Sequence[Array]:
    """Choice by choice, in float32."""
    losses, between = np.zeros(len(x), np.float32), [np.empty(0, np.float32)]
    for place, way in enumerate(_ways(call, labels)):
        for choice in way:
            logits = weights[choice.rows] @ x[place] + bias[choice.rows]
            powers = np.exp(logits - logits.max())
            probabilities = powers / powers.sum()
            losses[place] -= np.log(max(probabilities[choice.target], np.finfo(np.float32).tiny))
            between += [logits, probabilities]
    return [losses, np.concatenate(between)]


def infer_hsoftmax_gradient(call: OperatorCall) -> list[TensorType]:
    """As X, W, b and what is between."""
    between = _require(call)
    call.require_shape(4, (between,), "what HSoftmax left between")
    call.require_shape(5, call.inputs[0].shape[:1], "a gradient for each row")
    return [*call.inputs[:3], call.inputs[4]]


@array_function(
    "HSoftmaxGradient",
    infer=infer_hsoftmax_gradient,
    doc="Gradients of HSoftmax by X, W, b and by what is between.",
    input_names=(*_INPUTS, "between", "dloss"),
    output_names=("dX", "dW", "db", "dbetween"),
    args=_ARGS,
    required_args=("hierarchy",),
    value_inputs=(3,),
)
def hsoftmax_gradient(
    call: OperatorCall, x: Array, weights: Array, bias: Array, labels: Array, between: Array, dloss: Array
) -> Sequence[Array]:
    """Choice by choice: by the probability -dloss / p at the one that leads on, by the logits dloss (p - 1 or 0)."""
    dx, dweights, dbias, dbetween = (np.zeros_like(array) for array in (x, weights, bias, between))
    start = 0
    for place, way in enumerate(_ways(call, labels)):
        for choice in way:
            inner = start + choice.count
            probabilities = between[inner : inner + choice.count]
            dbetween[inner + choice.target] = -dloss[place] / max(
                probabilities[choice.target], np.finfo(np.float32).tiny
            )
            dlogits = dbetween[start:inner]
            dlogits[:] = dloss[place] * probabilities
            dlogits[choice.target] -= dloss[place]
            dx[place] += dlogits @ weights[choice.rows]
            dweights[choice.rows] += np.outer(dlogits, x[place])
            dbias[choice.rows] += dlogits
            start = inner + choice.count
    return [dx, dweights, dbias, dbetween]


@gradient_of("HSoftmax")
def hsoftmax_maker(request: GradientRequest) -> GradientOperators:
    """All gradients by one operator; that of what is between has a name of its own."""
    if not request.has_dy(0):
        return request.result([], {})
    inputs = [*request.definition.input, request.y(1), request.dy(0)]
    outputs = [request.dx(index) for index in range(3)]
    made = request.operator("HSoftmaxGradient", inputs, [*outputs, f"{request.y(1)}_grad"])
    return request.result([made], dict(enumerate(outputs)))
