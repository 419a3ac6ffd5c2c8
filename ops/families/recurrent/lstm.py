"""LSTM: a layer of long short-term memory over a whole sequence, in one or both directions.

Names, shapes and the order of the gates (input, output, forget, cell) are those of ONNX's operator. With five outputs
it also gives what LSTMGradient reads. The maker of a gradient adds them with a second LSTM where they are not there:
that saves their memory, five times that of Y, between the two passes, and costs the time of the layer once more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from dagexec.core.operator import Operator, Step, in_sequence
from dagexec.core.registry import new_operator
from dagexec.core.schema import OperatorCall, TensorType
from dagexec.ops.base.blocks import Array, convert
from dagexec.ops.base.row_products import row_product
from dagexec.ops.families.recurrent.layer import (
    LAYER_ARGS,
    Padding,
    Recurrence,
    RecurrentKind,
    Weights,
    WorkArrays,
    infer_layer,
    layer_cost,
    read_recurrence,
    recurrent_rows,
)

LSTM_KIND = RecurrentKind(
    "LSTM",
    gates=4,
    sigmoids=3,
    functions=("Sigmoid", "Tanh", "Tanh"),
    states=("h", "c"),
    saved=(("gates", 4), ("cells", 0)),
)


def infer_lstm(call: OperatorCall) -> list[TensorType]:
    """Y of all steps, the last hidden state and cell, and what the gradient reads."""
    return infer_layer(call, LSTM_KIND)


@new_operator(
    "LSTM",
    inputs=(3, 7),
    outputs=(1, 5),
    results=3,
    infer=infer_lstm,
    doc="For each step t of X: (i, o, f, g) = X[t] W^T + H R^T + biases; C = sigmoid(f) C + sigmoid(i) tanh(g); "
    "Y[t] = H = sigmoid(o) tanh(C). X is steps x batch x features, Y steps x directions x batch x hidden. "
    "Behind the end of a sequence Y is 0 and its state stays. Hochreiter and Schmidhuber, 1997, with the forget "
    "gate of Gers et al., 2000. (dagexec's own, for ONNX, and in place of Caffe2's RecurrentNetwork.)",
    input_names=LSTM_KIND.input_names(),
    output_names=(
        "Y",
        "Y_h, the last hidden state",
        "Y_c, the last cell",
        "gates: the four of all steps, steps x batch x directions x 4 hidden, for the gradient",
        "cells: those of all steps, shaped as Y, for the gradient",
    ),
    args=LAYER_ARGS,
    cost=partial(layer_cost, kind=LSTM_KIND),
    rows=recurrent_rows,
)
class LSTM(Operator):
    """Long short-term memory."""

    def prepare(self) -> Step:
        """One product for X of all steps and directions, then step after step; directions one after the other."""
        sizes = read_recurrence(self.call(), LSTM_KIND)
        arrays, padding = WorkArrays(self), Padding(self, sizes)
        weights = Weights(arrays, sizes)
        saves = len(self.output_blobs) > LSTM_KIND.results
        gates = self.y(3) if saves else arrays.scratch((sizes.steps, sizes.batch, sizes.directions, sizes.width))
        fill, recurrent = weights.recurrent(0, 4)
        steps = [*weights.input_sums(gates, joined=4), fill]
        for number in range(sizes.directions):
            if saves:
                cells: Sequence[Array] = list(self.y(4)[:, number])
            else:
                two = arrays.scratch((2, sizes.batch, sizes.hidden))
                cells = [two[step % 2] for step in range(sizes.steps)]
            multiply = partial(_multiply, self, recurrent[number])
            steps.append(one_direction(arrays, sizes, number, padding, gates[:, :, number], cells, multiply))
        return in_sequence([padding.read, *arrays.before, *steps])


def _multiply(owner: Operator, recurrent: Array, h: Array, sums: Array) -> Step:
    return row_product(owner, h, recurrent, sums)


def one_direction(
    arrays: WorkArrays,
    sizes: Recurrence,
    number: int,
    padding: Padding,
    gates: Array,
    cells: Sequence[Array],
    multiply: Callable[[Array, Array], Step],
) -> Step:
    """The steps of direction `number`, on `gates` that hold the sums of X, with memory for the cell of every step.

    `multiply` gives the step that sets its second array, batch x gates, to the products of R and the state in its
    first. Sums of sigmoid gates are halved.
    """
    owner = arrays.owner
    hidden, sequence = sizes.hidden, owner.y(0)[:, number]
    h, stage, product = (arrays.scratch((sizes.batch, size)) for size in (hidden, sizes.width, hidden))
    recurrent = multiply(h, stage)
    first_h, first_c = arrays.first_states(sizes, number)
    half = np.asarray(0.5, arrays.dtype)
    parts = [
        (
            step,
            gates[step],
            gates[step, :, : 3 * hidden],
            *(gates[step, :, gate * hidden : (gate + 1) * hidden] for gate in range(4)),
            cells[step],
            sequence[step],
        )
        for step in sizes.order(number)
    ]
    last_c = parts[-1][-2] if parts else first_c
    last = [
        convert(state, owner.y(index)[number])
        for index, state in ((1, h), (2, last_c))
        if index < len(owner.output_blobs)
    ]

    def run() -> None:
        np.copyto(h, first_h)
        previous = first_c
        for step, gate, opened, i, o, f, g, cell, y in parts:
            recurrent()
            np.add(gate, stage, gate)
            np.tanh(gate, gate)
            np.multiply(opened, half, opened)
            np.add(opened, half, opened)
            np.multiply(f, previous, cell)
            np.multiply(i, g, product)
            np.add(cell, product, cell)
            np.tanh(cell, product)
            if step < padding.full:
                np.multiply(o, product, h)
                np.copyto(y, h, casting="unsafe")
            else:
                np.multiply(o, product, product)
                ended = padding.ended[step]
                np.copyto(h, product, where=padding.running[step])
                np.copyto(cell, previous, where=ended)
                np.copyto(y, product, casting="unsafe")
                np.copyto(y, 0, casting="unsafe", where=ended)
            previous = cell
        for copy in last:
            copy()

    return run
