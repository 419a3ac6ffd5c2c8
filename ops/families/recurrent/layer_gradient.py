"""What the gradients of LSTM and GRU share: their maker, inputs and outputs, and the products over all steps.

A gradient operator goes through the steps backwards and computes the gradients of all sums; those of X, W, R and B are
then one matrix product each, over all steps at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from dagexec.core.gradient import GradientOperators, GradientRequest
from dagexec.core.operator import Operator, Step
from dagexec.core.schema import Cost, OperatorCall, TensorType
from dagexec.errors import ArgumentError
from dagexec.ops.base.blocks import BLOCK, Array, convert
from dagexec.ops.families.recurrent.layer import (
    LAYER_ARGS,
    Padding,
    Recurrence,
    RecurrentKind,
    WorkArrays,
    read_recurrence,
    require_floats,
    saved_types,
)
from dagexec.platform.cached import cached_property
from dagexec.platform.records import dataclass

GRADIENT_ARGS = LAYER_ARGS | {
    "given": "the outputs of the layer whose gradients are the last inputs, ascending (default 0: Y)",
    "wanted": "the inputs of the layer whose gradients are the outputs, ascending (default all but sequence lengths)",
}


def layer_gradient(request: GradientRequest, kind: RecurrentKind) -> GradientOperators:
    """The maker of both layers: their gradient, behind the layer once more where it saved nothing for it.

    Raises GradientError for a gradient of what is only saved.
    """
    request.require_no_dy(*range(kind.results, kind.outputs))
    lengths = 3 + request.arguments.bool("bias") if request.arguments.bool("sequence_lengths") else None
    wanted = sorted(index for index in request.wanted if index != lengths)
    if not wanted:
        return request.result([], {})
    given = [index for index in range(kind.results) if request.has_dy(index)]
    forward, operators = list(request.definition.input), []
    if request.has_y(kind.outputs - 1):
        saved = [request.y(0), *(request.y(index) for index in range(kind.results, kind.outputs))]
    else:
        again = [f"{request.y(0)}_again{name}" for name in ("", *(f"_{state}" for state in kind.states))]
        again += [f"{request.y(0)}_{name}" for name, _ in kind.saved]
        operators.append(request.operator(kind.type, forward, again))
        saved = [again[0], *again[kind.results :]]
    inputs = [*forward, *saved, *(request.dy(index) for index in given)]
    outputs = [request.dx(index) for index in wanted]
    operators.append(request.operator(f"{kind.type}Gradient", inputs, outputs, given=given, wanted=wanted))
    return request.result(operators, {index: request.dx(index) for index in wanted})


@dataclass(frozen=True)
class GradientInputs:
    """Inputs and outputs of a gradient operator.

    Attributes:
        sizes: of the layer.
        y: the number of the input that is the layer's Y; what it saved follows.
        given: by output of the layer, the number of the input that is its gradient.
        wanted: by input of the layer, the number of the output that is its gradient.
    """

    sizes: Recurrence
    y: int
    given: dict[int, int]
    wanted: dict[int, int]

    @property
    def state_inputs(self) -> range:
        """The numbers of the inputs that are the initial state."""
        return range(self.sizes.inputs if self.sizes.state is None else self.sizes.state, self.sizes.inputs)


def read_gradient(call: OperatorCall, kind: RecurrentKind) -> GradientInputs:
    """Where the inputs and outputs of a gradient operator are. Raises ArgumentError or ShapeError."""
    given = call.arguments.ints("given", [0])
    if given != sorted(set(given) & set(range(kind.results))):
        raise ArgumentError(
            f"{call.label}: argument 'given' must be ascending numbers below {kind.results}, found {given}"
        )
    saved = 1 + len(kind.saved)
    sizes = read_recurrence(call, kind, behind=saved + len(given))
    possible = [index for index in range(sizes.inputs) if index != sizes.lengths]
    wanted = call.arguments.ints("wanted", possible)
    if wanted != sorted(set(wanted) & set(possible)):
        raise ArgumentError(f"{call.label}: argument 'wanted' must be ascending numbers of {possible}, found {wanted}")
    if len(wanted) != len(call.definition.output):
        raise call.fail(f"expected {len(wanted)} outputs, for inputs {wanted}, found {len(call.definition.output)}")
    first = sizes.inputs + saved
    return GradientInputs(
        sizes,
        sizes.inputs,
        {output: first + place for place, output in enumerate(given)},
        {index: place for place, index in enumerate(wanted)},
    )


def infer_gradient(call: OperatorCall, kind: RecurrentKind) -> list[TensorType]:
    """The types of the inputs whose gradients are wanted."""
    found = read_gradient(call, kind)
    sizes = found.sizes
    meta = require_floats(call, sizes)
    state = (sizes.directions, sizes.batch, sizes.hidden)
    sequence = TensorType((sizes.steps, *state), meta)
    expected = {found.y: sequence}
    expected |= {found.y + 1 + place: saved for place, saved in enumerate(saved_types(sizes, meta))}
    expected |= {place: TensorType(state, meta) if output else sequence for output, place in found.given.items()}
    for index, one in expected.items():
        call.require_shape(index, one.shape, "as the layer gives it")
        call.require_types(index, one.meta)
    return [call.inputs[index] for index in found.wanted]


def gradient_cost(call: OperatorCall, outputs: Sequence[TensorType], kind: RecurrentKind) -> Cost:
    """Cost of the products back to the state, and of one for each wanted gradient of X, W and R."""
    found = read_gradient(call, kind)
    sizes = found.sizes
    sums = sizes.rows * sizes.directions * sizes.width
    widths = {0: sizes.features, 1: sizes.features, 2: sizes.hidden}
    products = sizes.hidden + sum(width for index, width in widths.items() if index in found.wanted)
    written = sum(one.nbytes for one in outputs)
    return Cost(2 * sums * products + 10 * sums, sum(one.nbytes for one in call.inputs), written)


class BackwardArrays(WorkArrays):
    """The arrays of a gradient operator.

    Attributes:
        inputs, sizes: where they are, and the layer's sizes.
        padding: which sequences have ended.
        sums: the gradients of the sums of all steps: steps x batch x directions x gates of the state.
    """

    def __init__(self, owner: Operator, kind: RecurrentKind) -> None:
        super().__init__(owner)
        self.inputs = read_gradient(owner.call(), kind)
        self.sizes = self.inputs.sizes
        self.padding = Padding(owner, self.sizes)
        sizes = self.sizes
        self.sums = self.scratch((sizes.steps, sizes.batch, sizes.directions, sizes.width))

    def saved(self, place: int) -> Array:
        """What the layer saved for its gradient, counted from 0."""
        return self.owner.x(self.inputs.y + 1 + place)

    def given(self, output: int, number: int) -> Array | None:
        """For direction `number` the gradient of output `output` of the layer; None where nothing depends on it."""
        index = self.inputs.given.get(output)
        if index is None:
            return None
        return self.x(index)[:, number] if output == 0 else self.x(index)[number]

    def wanted(self, index: int) -> Array | None:
        """The array for the gradient of input `index` of the layer; None where nobody asks for it."""
        return self.y(self.inputs.wanted[index]) if index in self.inputs.wanted else None

    @cached_property
    def bias_sums(self) -> Array | None:
        """Memory for the sums of B's gradient: directions x 1 x gates of the state; None where nobody asks for it."""
        sizes = self.sizes
        if sizes.bias is None or sizes.bias not in self.inputs.wanted:
            return None
        return self.scratch((sizes.directions, 1, sizes.width))

    def state_copies(self, number: int, states: Sequence[Array]) -> list[Step]:
        """The steps that set the gradients of direction `number`'s initial state, as far as wanted, to `states`."""
        found = [(index, state) for index, state in zip(self.inputs.state_inputs, states, strict=False)]
        return [
            convert(state, self.owner.y(self.inputs.wanted[index])[number])
            for index, state in found
            if index in self.inputs.wanted
        ]

    def first_gradients(self, number: int) -> tuple[list[Array], list[Step]]:
        """Gradients of direction `number`'s state, and the steps that set them to those behind the last step."""
        arrays: list[Array] = []
        steps: list[Step] = []
        for place in range(len(self.sizes.kind.states)):
            array = self.scratch((self.sizes.batch, self.sizes.hidden))
            given = self.given(1 + place, number)
            steps.append(partial(array.fill, 0) if given is None else partial(np.copyto, array, given))
            arrays.append(array)
        return arrays, steps

    def blocks(self, number: int) -> list[list[int]]:
        """The steps in the order in which the gradient of direction `number` goes through them, in pieces."""
        order = self.sizes.order(number)[::-1]
        length = max(1, BLOCK // max(1, self.sizes.batch * self.sizes.width))
        return [order[start : start + length] for start in range(0, len(order), length)]

    def earlier_states(self, number: int, target: Array) -> list[Step]:
        """The steps that fill `target`, steps x batch x hidden, with the hidden state before each step.

        Of a sequence that has ended any number may stand there.
        """
        if not self.sizes.steps:
            return []
        y, first = self.owner.x(self.inputs.y)[:, number], self.first_states(self.sizes, number)[0]
        if not self.sizes.reversed[number]:
            return [convert(y[:-1], target[1:]), partial(np.copyto, target[0], first)]
        steps: list[Step] = [convert(y[1:], target[:-1]), partial(np.copyto, target[-1], first)]
        if self.padding.is_possible:
            steps.append(partial(np.copyto, target[:-1], first, where=self.padding.ended[1:]))
        return steps

    def input_gradients(self) -> list[Step]:
        """The steps that compute the gradients of X and W, as far as wanted, from those of the sums."""
        sizes = self.sizes
        columns = sizes.directions * sizes.width
        sums = self.sums.reshape(sizes.rows, columns)  # steps * batch, directions * gates
        steps: list[Step] = []
        dx, dw = self.wanted(0), self.wanted(1)
        if dx is not None:
            weights = self.x(1).reshape(columns, sizes.features)  # directions * gates, features
            steps.append(partial(np.matmul, sums, weights, out=dx.reshape(sizes.rows, sizes.features)))
        if dw is not None:
            x, copies = self.x_of_sums()
            steps += copies
            rows = x.reshape(sizes.rows, sizes.features)  # steps * batch, features
            steps.append(partial(np.matmul, sums.T, rows, out=dw.reshape(columns, sizes.features)))
        return steps

    def x_of_sums(self) -> tuple[Array, list[Step]]:
        """X with zeros where a sequence has ended, and the steps that make it so."""
        x = self.x(0)
        if not self.padding.is_possible:
            return x, []
        found = self.scratch(x.shape)
        return found, [partial(np.copyto, found, x), *self.zeros_where_ended(found)]

    def zeros_where_ended(self, array: Array) -> list[Step]:
        """The step that makes `array`, steps x batch x more, 0 where a sequence has ended, if there are lengths.

        What stands there is multiplied by a gradient of 0, which would make NaN of what is not finite.
        """
        if not self.padding.is_possible:
            return []
        return [partial(np.copyto, array, np.zeros((), self.dtype), where=self.padding.ended)]

    def bias_gradient(self, columns: Array, target: Array) -> Step:
        """The step that sets `target` to the sums of `columns`, a matrix with a row a batch element and step."""
        ones = np.ones(self.sizes.rows, self.dtype)
        return partial(np.matmul, ones, columns, out=target)
