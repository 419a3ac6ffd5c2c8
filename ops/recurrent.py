"""LSTM: a layer of long short-term memory over a whole sequence, in one or both directions.

Names, shapes and the order of the gates (input, output, forget, cell) are those of ONNX's operator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from dagexec.core.dtypes import FLOAT_TYPES
from dagexec.core.errors import ArgumentError
from dagexec.core.operator import Operator, Step, in_sequence
from dagexec.core.registry import operator
from dagexec.core.schema import Cost, OperatorCall, OpSchema, TensorType
from dagexec.ops.activation_passes import sigmoid_passes
from dagexec.ops.blocks import Array, compute_dtype, convert, is_narrow

DIRECTIONS = ("forward", "reverse", "bidirectional")
GATES = 4


@dataclass(frozen=True)
class Recurrence:
    """The sizes of an LSTM, and where its optional inputs are.

    Attributes:
        steps, batch, features: of X.
        directions: 1, or 2 of a bidirectional one.
        hidden: size of the state.
        reversed: for each direction, whether it goes from the last step to the first.
        bias, state: the numbers of input B and of input initial_h, which initial_c follows; None where absent.
    """

    steps: int
    batch: int
    features: int
    directions: int
    hidden: int
    reversed: tuple[bool, ...]
    bias: int | None
    state: int | None


def read_recurrence(call: OperatorCall) -> Recurrence:
    """The sizes that arguments and inputs agree on. Raises ArgumentError or ShapeError."""
    direction = call.arguments.string("direction", "forward")
    if direction not in DIRECTIONS:
        raise ArgumentError(f"{call.label}: argument 'direction' must be one of {DIRECTIONS}, found {direction!r}")
    bias, state = call.arguments.bool("bias"), call.arguments.bool("initial_state")
    expected = 3 + bias + 2 * state
    if len(call.inputs) != expected:
        raise call.fail(f"with bias={int(bias)} and initial_state={int(state)} there are {expected} inputs")
    steps, batch, features = call.require_rank(0, 3)
    directions = 2 if direction == "bidirectional" else 1
    hidden = call.require_rank(2, 3)[2]
    wanted = call.arguments.int("hidden_size", hidden)
    if wanted != hidden:
        raise call.fail(f"argument 'hidden_size' is {wanted}, R has a state of {hidden}")
    call.require_shape(1, (directions, GATES * hidden, features), "directions, 4 gates of the state, features of X")
    call.require_shape(2, (directions, GATES * hidden, hidden), "directions, 4 gates of the state, the state")
    if bias:
        call.require_shape(3, (directions, 2 * GATES * hidden), "directions, 4 gates for W and 4 for R")
    if state:
        for index in (expected - 2, expected - 1):
            call.require_shape(index, (directions, batch, hidden), "directions, batch, the state")
    backward = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}[direction]
    sizes = (steps, batch, features, directions, hidden)
    return Recurrence(*sizes, backward, 3 if bias else None, expected - 2 if state else None)


def infer_lstm(call: OperatorCall) -> list[TensorType]:
    """Y of all steps, and the last hidden state and cell."""
    call.require_types(0, *FLOAT_TYPES)
    meta = call.require_same_type()
    sizes = read_recurrence(call)
    state = TensorType((sizes.directions, sizes.batch, sizes.hidden), meta)
    sequence = TensorType((sizes.steps, *state.shape), meta)
    return [sequence, state, state][: len(call.definition.output)]


def _cost(call: OperatorCall, outputs: Sequence[TensorType]) -> Cost:
    sizes = read_recurrence(call)
    flops = 2 * outputs[0].elements * GATES * (sizes.features + sizes.hidden) + 30 * outputs[0].elements
    return Cost(flops, sum(kind.nbytes for kind in call.inputs), sum(kind.nbytes for kind in outputs))


@operator(
    OpSchema(
        "LSTM",
        inputs=(3, 6),
        outputs=(1, 3),
        infer=infer_lstm,
        doc="For each step t of X: (i, o, f, g) = X[t] W^T + H R^T + biases; C = sigmoid(f) C + sigmoid(i) tanh(g); "
        "Y[t] = H = sigmoid(o) tanh(C). X is steps x batch x features, Y steps x directions x batch x hidden. "
        "Hochreiter and Schmidhuber, 1997, with the forget gate of Gers et al., 2000. (dagexec's own, for ONNX.)",
        input_names=("X", "W", "R", "B, with bias=1", "initial_h, with initial_state=1", "initial_c"),
        output_names=("Y", "Y_h", "Y_c"),
        args={
            "direction": "forward, reverse or bidirectional (default forward)",
            "hidden_size": "size of the state (default: R's)",
            "bias": "1: input 3 is B, the biases of W and those of R (default 0)",
            "initial_state": "1: the last two inputs are the state before the first step (default 0: zeros)",
        },
        cost=_cost,
    )
)
class LSTM(Operator):
    """Long short-term memory."""

    def prepare(self) -> Step:
        """One product for X of all steps, then step after step; directions one after the other."""
        sizes = read_recurrence(self.call())
        work = compute_dtype(self.x(0).dtype)
        inputs, steps = [], []
        for index in range(len(self.input_blobs)):
            array = self.x(index)
            if is_narrow(array.dtype):
                wide = self.scratch(array.shape, work)
                steps.append(convert(array, wide))
                array = wide
            inputs.append(array)
        gates = self.scratch((sizes.steps, sizes.batch, GATES * sizes.hidden), work)
        for number in range(sizes.directions):
            steps.append(self._direction(sizes, inputs, gates, number))
        return in_sequence(steps)

    def _direction(self, sizes: Recurrence, inputs: Sequence[Array], gates: Array, number: int) -> Step:
        batch, hidden, work = sizes.batch, sizes.hidden, gates.dtype
        x, weights, recurrent = inputs[0].reshape(-1, sizes.features), inputs[1][number].T, inputs[2][number].T
        rows = gates.reshape(-1, GATES * hidden)
        before: list[Step] = [partial(np.matmul, x, weights, out=rows)]
        if sizes.bias is not None:
            biases = inputs[sizes.bias][number].reshape(2, -1)
            total = self.scratch((GATES * hidden,), work)
            before += [partial(np.add, biases[0], biases[1], out=total), partial(np.add, rows, total, out=rows)]
        h, c = self.scratch((batch, hidden), work), self.scratch((batch, hidden), work)
        for index, state in enumerate((h, c)):
            given = None if sizes.state is None else inputs[sizes.state + index][number]
            before.append(partial(state.fill, 0) if given is None else partial(np.copyto, state, given))
        stage, product = self.scratch((batch, GATES * hidden), work), self.scratch((batch, hidden), work)
        opened = stage[:, : 3 * hidden]
        i, o, f, g = (stage[:, gate * hidden : (gate + 1) * hidden] for gate in range(GATES))
        cell = in_sequence(
            [
                *sigmoid_passes(opened, opened),
                partial(np.tanh, g, out=g),
                partial(np.multiply, c, f, out=c),
                partial(np.multiply, i, g, out=product),
                partial(np.add, c, product, out=c),
                partial(np.tanh, c, out=product),
                partial(np.multiply, o, product, out=h),
            ]
        )
        begin, sequence = in_sequence(before), self.y(0)[:, number]
        order = range(sizes.steps - 1, -1, -1) if sizes.reversed[number] else range(sizes.steps)
        last = [
            convert(state, self.y(index)[number]) for index, state in ((1, h), (2, c)) if index < len(self.output_blobs)
        ]

        def run() -> None:
            begin()
            for step in order:
                np.matmul(h, recurrent, out=stage)
                np.add(stage, gates[step], out=stage)
                cell()
                np.copyto(sequence[step], h, casting="unsafe")
            for copy in last:
                copy()

        return run
