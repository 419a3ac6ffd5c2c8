"""LSTMGradient: the gradient of an LSTM from the gates and cells that it saved."""

from __future__ import annotations

from functools import partial

import numpy as np

from dagexec.core.gradient import gradient_of
from dagexec.core.operator import Operator, Step, in_sequence
from dagexec.core.registry import new_operator
from dagexec.ops.base.blocks import Array
from dagexec.ops.families.recurrent.layer_gradient import (
    GRADIENT_ARGS,
    BackwardArrays,
    gradient_cost,
    infer_gradient,
    layer_gradient,
)
from dagexec.ops.families.recurrent.lstm import LSTM_KIND

gradient_of("LSTM")(partial(layer_gradient, kind=LSTM_KIND))


@new_operator(
    "LSTMGradient",
    inputs=(7, 13),
    outputs=(1, 6),
    infer=partial(infer_gradient, kind=LSTM_KIND),
    doc="Gradients of the inputs of an LSTM, as the argument `wanted` says, from its inputs, its outputs Y, gates "
    "and cells, and the gradients of Y, Y_h and Y_c that the argument `given` names.",
    input_names=("X and the other inputs of the LSTM", "Y", "gates", "cells", "the gradients of its outputs"),
    output_names=("dX and the gradients of the other inputs",),
    args=GRADIENT_ARGS,
    cost=partial(gradient_cost, kind=LSTM_KIND),
)
class LSTMGradient(Operator):
    """Gradient of long short-term memory."""

    def prepare(self) -> Step:
        """Each direction backwards, step by step; then one product over all steps for each of dX, dW, dR and dB."""
        arrays = BackwardArrays(self, LSTM_KIND)
        sizes = arrays.sizes
        steps: list[Step] = [arrays.padding.read]
        earlier = None if arrays.wanted(2) is None else arrays.scratch((sizes.steps, sizes.batch, sizes.hidden))
        passes: list[Step] = []
        for number in range(sizes.directions):
            passes.append(self._direction(arrays, number))
            if earlier is not None:
                passes += self._recurrent_gradient(arrays, number, earlier)
        passes += arrays.input_gradients()
        if arrays.bias_sums is not None:
            columns = sizes.directions * sizes.width
            sums = arrays.sums.reshape(sizes.rows, columns)
            passes += [arrays.bias_gradient(sums, arrays.bias_sums.reshape(columns)), *self.bias_copies(arrays)]
        return in_sequence([*steps, *arrays.before, *passes, *arrays.after])

    def _direction(self, arrays: BackwardArrays, number: int) -> Step:
        """The step that sets the gradients of one direction's sums, and those of its initial state."""
        sizes, padding = arrays.sizes, arrays.padding
        hidden, batch = sizes.hidden, sizes.batch
        gates, sums = arrays.saved(0)[:, :, number], arrays.sums[:, :, number]
        recurrent, dy = arrays.x(2)[number], arrays.given(0, number)
        (dh, dc), begin = arrays.first_gradients(number)
        end = arrays.state_copies(number, [dh, dc])
        work = arrays.scratch((batch, hidden))
        pieces = arrays.blocks(number)
        longest = len(pieces[0]) if pieces else 0
        tanhs, slopes = (arrays.scratch((longest, batch, hidden)) for _ in range(2))
        blocks = []
        for piece in pieces:
            low, high = min(piece), max(piece) + 1
            factors = self._factors(arrays, number, low, high, tanhs[: high - low], slopes[: high - low])
            parts = []
            for step in piece:
                total = sums[step]
                i, o = total[:, :hidden], total[:, hidden : 2 * hidden]
                forget_and_cell = total[:, 2 * hidden :].reshape(batch, 2, hidden)
                forget, slope = gates[step, :, 2 * hidden : 3 * hidden], slopes[step - low]
                parts.append((step, total, i, o, forget_and_cell, slope, forget))
            ended = padding.ended[low:high]
            blocks.append((in_sequence(factors), high, sums[low:high], slopes[: high - low], ended, parts))
        dc_twice = dc[:, None, :]

        def run() -> None:
            for setting in begin:
                setting()
            for factors, high, block, block_slopes, ended, parts in blocks:
                factors()
                if high > padding.full:
                    np.copyto(block, 0, where=ended)
                    np.copyto(block_slopes, 0, where=ended)
                for step, total, i, o, forget_and_cell, slope, forget in parts:
                    ends = step >= padding.full
                    if dy is not None:
                        if ends:
                            np.add(dh, dy[step], dh, where=padding.running[step])
                        else:
                            np.add(dh, dy[step], dh)
                    np.multiply(dh, slope, work)
                    np.add(dc, work, dc)
                    np.multiply(i, dc, i)
                    np.multiply(o, dh, o)
                    np.multiply(forget_and_cell, dc_twice, forget_and_cell)
                    if ends:
                        running = padding.running[step]
                        np.multiply(dc, forget, dc, where=running)
                        np.matmul(total, recurrent, work)
                        np.copyto(dh, work, where=running)
                    else:
                        np.multiply(dc, forget, dc)
                        np.matmul(total, recurrent, dh)
            for copy in end:
                copy()

        return run

    def _factors(
        self, arrays: BackwardArrays, number: int, low: int, high: int, tanhs: Array, slopes: Array
    ) -> list[Step]:
        """Array passes that write to `arrays.sums`, for steps `low` to `high`, each gate's factor of its gradient.

        Times dC (dH for o), it is the gradient of the gate's pre-activation. `slopes` gets the factor from dH to dC,
        o (1 - tanh(C)^2).
        """
        sizes, hidden = arrays.sizes, arrays.sizes.hidden
        gates, sums = arrays.saved(0)[low:high, :, number], arrays.sums[low:high, :, number]
        cells, first_c = arrays.saved(1)[:, number], arrays.first_states(sizes, number)[1]
        passes = self._derivatives(gates, sums, cells[low:high], tanhs, slopes)
        of_f = sums[:, :, 2 * hidden : 3 * hidden]
        backwards = sizes.reversed[number]
        start = sizes.steps - 1 if backwards else 0
        if low <= start < high:
            at_start = of_f[start - low]
            passes.append(partial(np.multiply, at_start, first_c, at_start))
        if backwards:
            rest, earlier = of_f[: min(high, start) - low], cells[low + 1 : min(high, start) + 1]
        else:
            rest, earlier = of_f[max(low, 1) - low :], cells[max(low, 1) - 1 : high - 1]
        return [*passes, partial(np.multiply, rest, earlier, rest)]

    def _derivatives(self, gates: Array, sums: Array, cells: Array, tanhs: Array, slopes: Array) -> list[Step]:
        """The same, except that f's factor still lacks the cell state of the step before."""
        hidden = slopes.shape[-1]
        one = np.asarray(1, gates.dtype)
        i, o, _, g = (gates[:, :, gate * hidden : (gate + 1) * hidden] for gate in range(4))
        of_i, of_o, _, of_g = (sums[:, :, gate * hidden : (gate + 1) * hidden] for gate in range(4))
        return [
            partial(np.subtract, one, gates, sums),
            partial(np.multiply, sums, gates, sums),
            partial(np.multiply, of_i, g, of_i),
            partial(np.square, g, of_g),
            partial(np.subtract, one, of_g, of_g),
            partial(np.multiply, of_g, i, of_g),
            partial(np.tanh, cells, tanhs),
            partial(np.multiply, of_o, tanhs, of_o),
            partial(np.square, tanhs, slopes),
            partial(np.subtract, one, slopes, slopes),
            partial(np.multiply, slopes, o, slopes),
        ]

    @staticmethod
    def _recurrent_gradient(arrays: BackwardArrays, number: int, earlier: Array) -> list[Step]:
        sizes, target = arrays.sizes, arrays.wanted(2)
        assert target is not None
        sums = arrays.sums.reshape(sizes.rows, sizes.directions, sizes.width)[:, number]  # steps * batch, gates
        states = earlier.reshape(sizes.rows, sizes.hidden)  # steps * batch, hidden
        return [*arrays.earlier_states(number, earlier), partial(np.matmul, sums.T, states, out=target[number])]

    @staticmethod
    def bias_copies(arrays: BackwardArrays) -> list[Step]:
        """The copy of the sums for B to both of its parts, which are added and so have the same gradient."""
        sizes = arrays.sizes
        if arrays.bias_sums is None or sizes.bias is None:
            return []
        both = arrays.y(arrays.inputs.wanted[sizes.bias]).reshape(sizes.directions, 2, sizes.width)
        return [partial(np.copyto, both, arrays.bias_sums)]
