"""GRUGradient: the gradient of a GRU from the gates that it saved."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from dagexec.core.gradient import gradient_of
from dagexec.core.operator import Operator, Step, in_sequence
from dagexec.core.registry import new_operator
from dagexec.ops.base.blocks import Array
from dagexec.ops.families.recurrent.gru import GRU_ARGS, GRU_KIND
from dagexec.ops.families.recurrent.layer_gradient import (
    GRADIENT_ARGS,
    BackwardArrays,
    gradient_cost,
    infer_gradient,
    layer_gradient,
)

StepGradient = Callable[[int], None]
"""For a step, whose number it gets: the gradients of its sums from their factors and dH, and the dH before the step."""


gradient_of("GRU")(partial(layer_gradient, kind=GRU_KIND))


@new_operator(
    "GRUGradient",
    inputs=(7, 11),
    outputs=(1, 5),
    infer=partial(infer_gradient, kind=GRU_KIND),
    doc="Gradients of the inputs of a GRU, as the argument `wanted` says, from its inputs, its outputs Y, gates "
    "and reset, and the gradients of Y and Y_h that the argument `given` names.",
    input_names=("X and the other inputs of the GRU", "Y", "gates", "reset", "the gradients of its outputs"),
    output_names=("dX and the gradients of the other inputs",),
    args=GRU_ARGS | GRADIENT_ARGS,
    cost=partial(gradient_cost, kind=GRU_KIND),
)
class GRUGradient(Operator):
    """Gradient of gated recurrent units."""

    def prepare(self) -> Step:
        """Each direction backwards, step by step; then one product over all steps for each of dX, dW, dR and dB."""
        arrays = BackwardArrays(self, GRU_KIND)
        sizes = arrays.sizes
        linear = self.arguments.bool("linear_before_reset")
        earlier = arrays.scratch((sizes.steps, sizes.batch, sizes.hidden))
        behind = arrays.scratch((sizes.steps, sizes.batch, sizes.width)) if linear else None
        passes: list[Step] = []
        for number in range(sizes.directions):
            passes += arrays.earlier_states(number, earlier)
            passes.append(self._direction(arrays, number, earlier, behind))
            passes += [] if behind is None else arrays.zeros_where_ended(behind)
            passes += self._recurrent_gradient(arrays, number, earlier, behind)
            passes += self._bias_gradient(arrays, number, behind)
        passes += arrays.input_gradients()
        return in_sequence([arrays.padding.read, *arrays.before, *passes, *arrays.after])

    def _direction(self, arrays: BackwardArrays, number: int, earlier: Array, behind: Array | None) -> Step:
        """The step that sets the gradients of one direction's sums, and that of its initial state.

        `earlier` holds the states before each step; `behind` gets the gradients of what R made of them, with
        linear_before_reset, where they differ from those of the sums.
        """
        sizes, padding = arrays.sizes, arrays.padding
        sums, dy = arrays.sums[:, :, number], arrays.given(0, number)
        (dh,), begin = arrays.first_gradients(number)
        end = arrays.state_copies(number, [dh])
        before = arrays.scratch((sizes.batch, sizes.hidden))
        if behind is None:
            back = self._reset_before(arrays, number, dh, before)
        else:
            back = self._reset_behind(arrays, number, dh, before, behind)
        pieces = arrays.blocks(number)
        work = arrays.scratch((len(pieces[0]) if pieces else 0, sizes.batch, sizes.hidden))
        blocks = []
        for piece in pieces:
            low, high = min(piece), max(piece) + 1
            factors = self._factors(arrays, number, low, high, earlier[low:high], work[: high - low])
            blocks.append((in_sequence(factors), high, sums[low:high], padding.ended[low:high], piece))

        def run() -> None:
            for setting in begin:
                setting()
            for factors, high, block, ended, piece in blocks:
                factors()
                if high > padding.full:
                    np.copyto(block, 0, where=ended)
                for step in piece:
                    if step < padding.full:
                        if dy is not None:
                            np.add(dh, dy[step], dh)
                        back(step)
                        np.copyto(dh, before)
                    else:
                        running = padding.running[step]
                        if dy is not None:
                            np.add(dh, dy[step], dh, where=running)
                        back(step)
                        np.copyto(dh, before, where=running)
            for copy in end:
                copy()

        return run

    def _factors(
        self, arrays: BackwardArrays, number: int, low: int, high: int, earlier: Array, work: Array
    ) -> list[Step]:
        """Array passes that write to `arrays.sums`, for steps `low` to `high`, each gate's factor of its gradient.

        Times dH, the factors of z and n are the gradients of these gates' pre-activations. The factor of r is to be
        multiplied by that of n; without linear_before_reset, by the gradient of the reset state.
        """
        hidden, one = arrays.sizes.hidden, np.asarray(1, arrays.dtype)
        gates, sums = arrays.saved(0)[low:high, :, number], arrays.sums[low:high, :, number]
        z, n = gates[:, :, :hidden], gates[:, :, 2 * hidden :]
        of_z, of_r, of_n = (sums[:, :, gate * hidden : (gate + 1) * hidden] for gate in range(3))
        linear = self.arguments.bool("linear_before_reset")
        multiplied = arrays.saved(1)[low:high, number] if linear else earlier
        return [
            partial(np.subtract, one, gates, sums),
            partial(np.multiply, sums, gates, sums),
            partial(np.subtract, earlier, n, work),
            partial(np.multiply, of_z, work, of_z),
            partial(np.multiply, of_r, multiplied, of_r),
            partial(np.square, n, of_n),
            partial(np.subtract, one, of_n, of_n),
            partial(np.subtract, one, z, work),
            partial(np.multiply, of_n, work, of_n),
        ]

    def _reset_behind(
        self, arrays: BackwardArrays, number: int, dh: Array, before: Array, behind: Array
    ) -> StepGradient:
        """A step with linear_before_reset."""
        hidden, recurrent = arrays.sizes.hidden, arrays.x(2)[number]
        gates, sums = arrays.saved(0)[:, :, number], arrays.sums[:, :, number]
        parts = [
            (
                *(total[:, gate * hidden : (gate + 1) * hidden] for gate in range(3)),
                total[:, : 2 * hidden],
                other,
                other[:, : 2 * hidden],
                other[:, 2 * hidden :],
                gate[:, :hidden],
                gate[:, hidden : 2 * hidden],
            )
            for total, other, gate in zip(sums, behind, gates, strict=True)
        ]
        work = arrays.scratch(dh.shape)

        def back(step: int) -> None:
            of_z, of_r, of_n, opened, all_behind, opened_behind, candidate_behind, z, r = parts[step]
            np.multiply(of_z, dh, of_z)
            np.multiply(of_n, dh, of_n)
            np.multiply(of_r, of_n, of_r)
            np.copyto(opened_behind, opened)
            np.multiply(of_n, r, candidate_behind)
            np.matmul(all_behind, recurrent, work)
            np.multiply(dh, z, before)
            np.add(before, work, before)

        return back

    def _reset_before(self, arrays: BackwardArrays, number: int, dh: Array, before: Array) -> StepGradient:
        """A step where the reset gate multiplies the state."""
        hidden = arrays.sizes.hidden
        of_gates, of_candidate = arrays.x(2)[number][: 2 * hidden], arrays.x(2)[number][2 * hidden :]
        gates, sums = arrays.saved(0)[:, :, number], arrays.sums[:, :, number]
        parts = [
            (
                *(total[:, gate * hidden : (gate + 1) * hidden] for gate in range(3)),
                total[:, : 2 * hidden],
                gate[:, :hidden],
                gate[:, hidden : 2 * hidden],
            )
            for total, gate in zip(sums, gates, strict=True)
        ]
        work = arrays.scratch(dh.shape)

        def back(step: int) -> None:
            of_z, of_r, of_n, opened, z, r = parts[step]
            np.multiply(of_z, dh, of_z)
            np.multiply(of_n, dh, of_n)
            np.matmul(of_n, of_candidate, work)
            np.multiply(of_r, work, of_r)
            np.multiply(work, r, work)
            np.multiply(dh, z, before)
            np.add(before, work, before)
            np.matmul(opened, of_gates, work)
            np.add(before, work, before)

        return back

    @staticmethod
    def _recurrent_gradient(arrays: BackwardArrays, number: int, earlier: Array, behind: Array | None) -> list[Step]:
        """The steps for dR of one direction, where it is wanted."""
        sizes, target = arrays.sizes, arrays.wanted(2)
        if target is None:
            return []
        states = earlier.reshape(sizes.rows, sizes.hidden)  # steps * batch, hidden
        if behind is not None:
            return [partial(np.matmul, behind.reshape(sizes.rows, sizes.width).T, states, out=target[number])]
        sums = arrays.sums.reshape(sizes.rows, sizes.directions, sizes.width)[:, number]
        # steps * batch, gates: update and reset; candidate
        opened, candidate = sums[:, : 2 * sizes.hidden], sums[:, 2 * sizes.hidden :]
        reset = arrays.scratch(earlier.shape)
        return [
            partial(np.copyto, reset, arrays.saved(1)[:, number]),
            *arrays.zeros_where_ended(reset),
            partial(np.matmul, opened.T, states, out=target[number, : 2 * sizes.hidden]),
            partial(np.matmul, candidate.T, reset.reshape(states.shape), out=target[number, 2 * sizes.hidden :]),
        ]

    @staticmethod
    def _bias_gradient(arrays: BackwardArrays, number: int, behind: Array | None) -> list[Step]:
        """The steps for dB of one direction, where it is wanted."""
        sizes = arrays.sizes
        target = None if sizes.bias is None else arrays.wanted(sizes.bias)
        if target is None:
            return []
        of_input, of_state = target[number].reshape(2, sizes.width)  # biases of W, of R
        sums = arrays.sums.reshape(sizes.rows, sizes.directions, sizes.width)[:, number]
        steps = [arrays.bias_gradient(sums, of_input)]
        if behind is None:
            return [*steps, partial(np.copyto, of_state, of_input)]
        return [*steps, arrays.bias_gradient(behind.reshape(sizes.rows, sizes.width), of_state)]
