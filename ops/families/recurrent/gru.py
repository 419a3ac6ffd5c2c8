"""GRU: a layer of gated recurrent units over a whole sequence, in one or both directions.

Names, shapes and the order of the gates (update, reset, hidden) are those of ONNX's operator. With four outputs it also
gives what GRUGradient reads; see `lstm` for when it pays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from dagexec.core.operator import Operator, Step, in_sequence, nothing_to_do
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

GRU_KIND = RecurrentKind(
    "GRU",
    gates=3,
    sigmoids=2,
    functions=("Sigmoid", "Tanh"),
    states=("h",),
    saved=(("gates", 3), ("reset", 0)),
)
GRU_ARGS = LAYER_ARGS | {
    "linear_before_reset": "1: the reset gate multiplies what R makes of H; else H itself (default 0)"
}

Candidate = Callable[[Array, Array, Array, Array], None]
"""Computes the gates of a step, in place of the sums of X: from h; opened (z and r side by side), r, n, and reset."""


def infer_gru(call: OperatorCall) -> list[TensorType]:
    """Y of all steps, the last state, and what the gradient reads."""
    call.arguments.bool("linear_before_reset")
    return infer_layer(call, GRU_KIND)


@new_operator(
    "GRU",
    inputs=(3, 6),
    outputs=(1, 4),
    results=2,
    infer=infer_gru,
    doc="For each step t of X, with W, R and biases in three parts: z = sigmoid(X[t] Wz^T + H Rz^T + biases); r "
    "likewise; n = tanh(X[t] Wn^T + (r H) Rn^T + biases), or with linear_before_reset n = tanh(X[t] Wn^T + bias of "
    "W + r (H Rn^T + bias of R)); Y[t] = H = (1 - z) n + z H. X is steps x batch x features, Y steps x directions "
    "x batch x hidden. Behind the end of a sequence Y is 0 and its state stays. Cho et al., 2014, arXiv:1406.1078. "
    "(dagexec's own, for ONNX.)",
    input_names=GRU_KIND.input_names(),
    output_names=(
        "Y",
        "Y_h, the last state",
        "gates: the three of all steps, steps x batch x directions x 3 hidden, for the gradient",
        "reset: of all steps r H, or with linear_before_reset what r multiplies, shaped as Y, for the gradient",
    ),
    args=GRU_ARGS,
    cost=partial(layer_cost, kind=GRU_KIND),
    rows=recurrent_rows,
)
class GRU(Operator):
    """Gated recurrent units."""

    def prepare(self) -> Step:
        """One product for X of all steps and directions, then step after step; directions one after the other."""
        sizes = read_recurrence(self.call(), GRU_KIND)
        linear = self.arguments.bool("linear_before_reset")
        arrays, padding = WorkArrays(self), Padding(self, sizes)
        weights = Weights(arrays, sizes)
        saves = len(self.output_blobs) > GRU_KIND.results
        gates = self.y(2) if saves else arrays.scratch((sizes.steps, sizes.batch, sizes.directions, sizes.width))
        steps = weights.input_sums(gates, joined=2 if linear else 3)
        recurrent = []
        for first, last in [(0, 3)] if linear else [(0, 2), (2, 3)]:
            fill, turned = weights.recurrent(first, last)
            steps.append(fill)
            recurrent.append(turned)
        for number in range(sizes.directions):
            h, held = (arrays.scratch((sizes.batch, sizes.hidden)) for _ in range(2))
            resets = list(self.y(3)[:, number]) if saves else [held] * sizes.steps
            products = [turned[number] for turned in recurrent]
            if linear:
                candidate = self._reset_behind(arrays, sizes, number, products[0], h)
            else:
                candidate = self._reset_before(arrays, products, h, held)
            steps.append(self._direction(arrays, sizes, number, padding, gates[:, :, number], resets, candidate, h))
        return in_sequence([padding.read, *arrays.before, *steps])

    def _direction(
        self,
        arrays: WorkArrays,
        sizes: Recurrence,
        number: int,
        padding: Padding,
        gates: Array,
        resets: Sequence[Array],
        candidate: Candidate,
        h: Array,
    ) -> Step:
        """The steps of one direction, on `gates` that hold the sums of X; `candidate` computes the gates of a step.

        It reads the state, batch x hidden, from `h`.
        """
        hidden, sequence = sizes.hidden, self.y(0)[:, number]
        work = arrays.scratch((sizes.batch, hidden))
        (first_h,) = arrays.first_states(sizes, number)
        parts = [
            (
                step,
                gates[step, :, : 2 * hidden],
                *(gates[step, :, gate * hidden : (gate + 1) * hidden] for gate in range(3)),
                resets[step],
                sequence[step],
            )
            for step in sizes.order(number)
        ]
        last = convert(h, self.y(1)[number]) if len(self.output_blobs) > 1 else nothing_to_do

        def run() -> None:
            np.copyto(h, first_h)
            for step, opened, z, r, n, reset, y in parts:
                candidate(opened, r, n, reset)
                np.subtract(h, n, work)
                np.multiply(z, work, work)
                if step < padding.full:
                    np.add(n, work, h)
                    np.copyto(y, h, casting="unsafe")
                else:
                    np.add(n, work, work)
                    np.copyto(h, work, where=padding.running[step])
                    np.copyto(y, work, casting="unsafe")
                    np.copyto(y, 0, casting="unsafe", where=padding.ended[step])
            last()

        return run

    def _reset_behind(
        self, arrays: WorkArrays, sizes: Recurrence, number: int, recurrent: Array, h: Array
    ) -> Candidate:
        """The gates of a step with linear_before_reset."""
        hidden = sizes.hidden
        stage, work = arrays.scratch((sizes.batch, 3 * hidden)), arrays.scratch((sizes.batch, hidden))
        of_gates, of_candidate = stage[:, : 2 * hidden], stage[:, 2 * hidden :]
        half, bias = np.asarray(0.5, arrays.dtype), np.zeros((), arrays.dtype)
        if sizes.bias is not None:
            bias = arrays.x(sizes.bias)[number, -hidden:] if hidden else bias
        multiply = row_product(self, h, recurrent, stage)

        def candidate(opened: Array, r: Array, n: Array, reset: Array) -> None:
            multiply()
            np.add(opened, of_gates, opened)
            np.tanh(opened, opened)
            np.multiply(opened, half, opened)
            np.add(opened, half, opened)
            np.add(of_candidate, bias, reset)
            np.multiply(r, reset, work)
            np.add(n, work, n)
            np.tanh(n, n)

        return candidate

    def _reset_before(self, arrays: WorkArrays, recurrent: Sequence[Array], h: Array, held: Array) -> Candidate:
        """The gates of a step where the reset gate multiplies the state, into `held`."""
        batch, hidden = h.shape
        stage, work = arrays.scratch((batch, 2 * hidden)), arrays.scratch(h.shape)
        half = np.asarray(0.5, arrays.dtype)
        multiply, multiply_held = row_product(self, h, recurrent[0], stage), row_product(self, held, recurrent[1], work)

        def candidate(opened: Array, r: Array, n: Array, reset: Array) -> None:
            multiply()
            np.add(opened, stage, opened)
            np.tanh(opened, opened)
            np.multiply(opened, half, opened)
            np.add(opened, half, opened)
            np.multiply(r, h, held)
            if reset is not held:
                np.copyto(reset, held)
            multiply_held()
            np.add(n, work, n)
            np.tanh(n, n)

        return candidate
