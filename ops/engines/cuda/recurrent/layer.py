"""LSTM and GRU over whole sequences on CUDA, and their gradients.

One product gives the sums of X for all steps and directions; then every step is a product for the state and a kernel
for all gates. Backward, a step is a kernel and a product, and what X, W, R and B get is one product each, over all
steps. 16-bit floats are computed in float32. Sequence lengths are read by the device: a negative one counts as 0, one
beyond the steps as all of them, and the run ends with the host's error.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from dagexec.core.operator import Operator, Step, in_sequence
from dagexec.core.registry import operator
from dagexec.errors import ShapeError
from dagexec.ops.base.blocks import compute_dtype
from dagexec.ops.engines.cuda.base.expression import converted, zeroed
from dagexec.ops.engines.cuda.base.faults import CheckedOperator
from dagexec.ops.engines.cuda.base.matrices import c_type_of_work, product_of, sums_of
from dagexec.ops.engines.cuda.base.operator import Array, CudaOperator, c_type_of
from dagexec.ops.engines.cuda.recurrent.kernels import GRU as GRU_SOURCE
from dagexec.ops.engines.cuda.recurrent.kernels import LSTM as LSTM_SOURCE
from dagexec.ops.engines.cuda.recurrent.kernels import SEQUENCES
from dagexec.ops.families.recurrent.gru import GRU, GRU_KIND
from dagexec.ops.families.recurrent.gru_gradient import GRUGradient
from dagexec.ops.families.recurrent.layer import Recurrence, read_recurrence, shortest_length
from dagexec.ops.families.recurrent.layer_gradient import GradientInputs, read_gradient
from dagexec.ops.families.recurrent.lstm import LSTM, LSTM_KIND
from dagexec.ops.families.recurrent.lstm_gradient import LSTMGradient


class RecurrentOperator(CheckedOperator):
    """What layers and their gradients share."""

    @property
    def inputs_checked(self) -> Sequence[int]:
        return (3 + self.arguments.bool("bias"),) if self.arguments.bool("sequence_lengths") else ()

    def lengths_check(self, lengths: Array, steps: int) -> Step:
        """A step that checks that sequence lengths are in [0, steps]."""
        wrong = ShapeError(f"{self.label}: a sequence length was not in [0, {steps}]")
        fault = self.fault_word(partial(self._check_lengths, lengths, steps), wrong)
        return self.values_check(lengths, 0, steps + 1, fault)

    def _check_lengths(self, lengths: Array, steps: int) -> None:
        shortest_length(self.fetched(lengths), steps, self.label)


class Work:
    """The arrays of a layer or its gradient in the type that is computed in, the kernels, and the steps so far."""

    def __init__(self, owner: RecurrentOperator, sizes: Recurrence, source: str) -> None:
        self.owner = owner
        self.sizes = sizes
        self.steps: list[Step] = []
        self.dtype = compute_dtype(owner.x(0).dtype)
        self.lengths = None if sizes.lengths is None else owner.x(sizes.lengths)
        if self.lengths is not None and self.lengths.size:
            self.steps.append(owner.lengths_check(self.lengths, sizes.steps))
        self._source = source
        self._wide: dict[int, Array] = {}
        self._types = {
            "T": c_type_of_work(owner.x(0)),
            "S": c_type_of(owner.x(0)),
            "L": "int" if self.lengths is None else c_type_of(self.lengths),
        }

    def x(self, index: int) -> Array:
        """Input `index`, widened in every run if it is of a 16-bit type."""
        array = self.owner.x(index)
        if array.dtype == self.dtype:
            return array
        if index not in self._wide:
            self._wide[index] = self.scratch(array.shape)
            self.steps.append(converted(self.owner, array, self._wide[index]))
        return self._wide[index]

    def scratch(self, shape: Sequence[int]) -> Array:
        """Memory of the step."""
        return self.owner.scratch(shape, self.dtype)

    def multiply(self, a: Array, b: Array, c: Array, *, added: bool = False) -> None:
        """C = A B, or C + A B; through memory of its own where C is of a 16-bit type."""
        if c.dtype == self.dtype:
            self.steps.append(product_of(self.owner, a, b, c, beta=float(added)))
            return
        wide = self.scratch(c.shape)
        self.steps += [product_of(self.owner, a, b, wide), converted(self.owner, wide, c)]

    def launch(self, name: str, arguments: Sequence[Any], step: int, elements: int) -> None:
        """A kernel of the layer on one step; `elements` are those of a state."""
        sizes = self.sizes
        place = np.array([step, max(1, sizes.hidden), sizes.directions * sizes.width], np.int64)
        self._launch(name, self._source, [*arguments, place, np.int64(elements)], elements)

    def over_sequences(self, name: str, arguments: Sequence[Any], source: Array, target: Array, shift: int = 0) -> None:
        """A kernel over all steps of `source`, steps x batch x size with packed rows, into the packed `target`."""
        steps, batch, size = target.shape
        strides = [stride // source.itemsize for stride in source.strides]
        place = np.array([max(1, batch), max(1, size), strides[0], strides[1], shift, steps - 1], np.int64)
        types = {"S": c_type_of(source)}
        self._launch(name, SEQUENCES, [*arguments, self.lengths, place, np.int64(target.size)], target.size, types)

    def _launch(
        self, name: str, source: str, arguments: list[Any], elements: int, types: dict[str, str] | None = None
    ) -> None:
        found = {**self._types, **(types or {})}
        self.steps.append(self.owner.launch(name, source, arguments, elements=elements, **found))  # type: ignore[arg-type]

    def first_state(self, place: int, number: int) -> Array:
        """A copy of state `place` (0: h) of direction `number` before its first step."""
        state = self.scratch((self.sizes.batch, self.sizes.hidden))
        if self.sizes.state is None:
            self.steps.append(zeroed(self.owner, state))
        else:
            self.steps.append(converted(self.owner, self.owner.x(self.sizes.state + place)[number], state))
        return state

    def bias(self, number: int) -> Array | None:
        """B of a direction: the biases of W, then those of R."""
        return None if self.sizes.bias is None else self.owner.x(self.sizes.bias)[number]

    def input_sums(self, gates: Array) -> None:
        """The sums of X for all steps and directions, without biases."""
        sizes, columns = self.sizes, self.sizes.directions * self.sizes.width
        x, weights = self.owner.x(0), self.owner.x(1).reshape(columns, sizes.features)
        rows = gates.reshape(sizes.rows, columns)
        self.steps.append(product_of(self.owner, x.reshape(sizes.rows, sizes.features), weights.swapaxes(0, 1), rows))


class CudaLSTM(RecurrentOperator, LSTM):
    """Long short-term memory."""

    def prepare(self) -> Step:
        """One product for X, then step after step; directions one after the other."""
        sizes = read_recurrence(self.call(), LSTM_KIND)
        work = Work(self, sizes, LSTM_SOURCE)
        saves = len(self.output_blobs) > LSTM_KIND.results
        gates = self.y(3) if saves else work.scratch((sizes.steps, sizes.batch, sizes.directions, sizes.width))
        work.input_sums(gates)
        recurrent, y = work.x(2), self.y(0)
        cells = None if saves else work.scratch((2, sizes.batch, sizes.hidden))
        for number in range(sizes.directions):
            h, before = work.first_state(0, number), work.first_state(1, number)
            for step in sizes.order(number):
                cell = self.y(4)[step, number] if cells is None else cells[step % 2]
                sums = gates[step, :, number]
                work.multiply(h, recurrent[number].swapaxes(0, 1), sums, added=True)
                arguments = [sums, work.bias(number), before, cell, h, y[step, number], work.lengths]
                work.launch("lstm_cell", arguments, step, sizes.batch * sizes.hidden)
                before = cell
            for index, state in ((1, h), (2, before)):
                if index < len(self.output_blobs):
                    work.steps.append(converted(self, state, self.y(index)[number]))
        return in_sequence(work.steps)


class CudaGRU(RecurrentOperator, GRU):
    """Gated recurrent units."""

    def prepare(self) -> Step:
        """One product for X, then step after step; directions one after the other."""
        sizes = read_recurrence(self.call(), GRU_KIND)
        work = Work(self, sizes, GRU_SOURCE)
        saves = len(self.output_blobs) > GRU_KIND.results
        gates = self.y(2) if saves else work.scratch((sizes.steps, sizes.batch, sizes.directions, sizes.width))
        work.input_sums(gates)
        kept = None if saves else work.scratch((sizes.batch, sizes.hidden))
        stage = work.scratch((sizes.batch, sizes.width)) if self.arguments.bool("linear_before_reset") else None
        for number in range(sizes.directions):
            h = work.first_state(0, number)
            for step in sizes.order(number):
                reset = self.y(3)[step, number] if kept is None else kept
                self._step(work, number, step, gates[step, :, number], reset, h, stage)
            if len(self.output_blobs) > 1:
                work.steps.append(converted(self, h, self.y(1)[number]))
        return in_sequence(work.steps)

    def _step(
        self, work: Work, number: int, step: int, sums: Array, reset: Array, h: Array, stage: Array | None
    ) -> None:
        sizes, bias, y = work.sizes, work.bias(number), self.y(0)[step, number]
        weights, opened = work.x(2)[number].swapaxes(0, 1), 2 * sizes.hidden
        elements = sizes.batch * sizes.hidden
        if stage is not None:
            work.multiply(h, weights, stage)
            arguments = [sums, stage, bias, reset, h, y, work.lengths]
            work.launch("gru_cell_linear", arguments, step, elements)
            return
        work.multiply(h, weights[:, :opened], sums[:, :opened], added=True)
        work.launch("gru_open", [sums, bias, reset, h], step, elements)
        work.multiply(reset, weights[:, opened:], sums[:, opened:], added=True)
        work.launch("gru_close", [sums, bias, h, y, work.lengths], step, elements)


class BackwardWork(Work):
    """The arrays of a gradient operator.

    Attributes:
        inputs: where they are.
        sums: the gradients of the sums of all steps: steps x batch x directions x gates of the state.
    """

    def __init__(self, owner: RecurrentOperator, inputs: GradientInputs, source: str) -> None:
        super().__init__(owner, inputs.sizes, source)
        self.inputs = inputs
        sizes = inputs.sizes
        self.sums = self.scratch((sizes.steps, sizes.batch, sizes.directions, sizes.width))

    def saved(self, place: int) -> Array:
        """What the layer saved for its gradient, counted from 0."""
        return self.owner.x(self.inputs.y + 1 + place)

    def wanted(self, index: int | None) -> Array | None:
        """The array for the gradient of input `index` of the layer; None where nobody asks for it."""
        return self.owner.y(self.inputs.wanted[index]) if index in self.inputs.wanted else None

    def sequence_gradient(self, number: int, step: int) -> Array | None:
        """That of Y at a step; None when nothing depends on Y."""
        index = self.inputs.given.get(0)
        return None if index is None else self.owner.x(index)[step, number]

    def state_gradients(self, number: int) -> list[Array]:
        """Memory for the gradients of direction `number`'s state, set to those behind the last step."""
        found = []
        for place in range(len(self.sizes.kind.states)):
            state = self.scratch((self.sizes.batch, self.sizes.hidden))
            index = self.inputs.given.get(1 + place)
            given = None if index is None else self.owner.x(index)[number]
            self.steps.append(zeroed(self.owner, state) if given is None else converted(self.owner, given, state))
            found.append(state)
        return found

    def keep_states(self, number: int, states: Sequence[Array]) -> None:
        """Set the gradients of direction `number`'s initial state, as far as they are wanted."""
        for index, state in zip(self.inputs.state_inputs, states, strict=False):
            target = self.wanted(index)
            if target is not None:
                self.steps.append(converted(self.owner, state, target[number]))

    def earlier_states(self, number: int, target: Array) -> None:
        """Fill `target`, steps x batch x hidden, with the hidden state before each step."""
        first, y = self.first_state(0, number), self.owner.x(self.inputs.y)[:, number]
        shift = -1 if self.sizes.reversed[number] else 1
        self.over_sequences("earlier_states", [y, first, target], y, target, shift)

    def without_padding(self, array: Array) -> Array:
        """Steps x batch x size in memory of its own, with 0 behind the ends of sequences."""
        target = self.scratch(array.shape)
        self.over_sequences("running_part", [array, target], array, target)
        return target

    def rows(self, number: int) -> Array:
        """The gradients of a direction's sums, a row a step and batch element."""
        sizes = self.sizes
        return self.sums.reshape(sizes.rows, sizes.directions, sizes.width)[:, number]

    def input_gradients(self) -> None:
        """The gradients of X and W, as far as wanted, from those of the sums."""
        sizes, columns = self.sizes, self.sizes.directions * self.sizes.width
        sums, dx, dw = self.sums.reshape(sizes.rows, columns), self.wanted(0), self.wanted(1)
        if dx is not None:
            weights = self.x(1).reshape(columns, sizes.features)
            self.multiply(sums, weights, dx.reshape(sizes.rows, sizes.features))
        if dw is not None:
            x = self.x(0) if self.lengths is None else self.without_padding(self.owner.x(0))
            rows = x.reshape(sizes.rows, sizes.features)
            self.multiply(sums.swapaxes(0, 1), rows, dw.reshape(columns, sizes.features))

    def bias_gradients(self, number: int, behind: Array | None = None) -> None:
        """The gradient of B, if wanted: of W's part from the sums, of R's from `behind`, by default the same."""
        target = self.wanted(self.sizes.bias)
        if target is None:
            return
        halves = target[number].reshape(2, self.sizes.width)
        for half, rows in zip(
            halves, (self.rows(number), self.rows(number) if behind is None else behind), strict=True
        ):
            self.steps.append(sums_of(self.owner, rows.reshape(*rows.shape, 1), half))


class CudaLSTMGradient(RecurrentOperator, LSTMGradient):
    """Gradient of long short-term memory."""

    def prepare(self) -> Step:
        """Each direction backwards, step by step; then one product over all steps for each of dX, dW, dR."""
        inputs = read_gradient(self.call(), LSTM_KIND)
        work, sizes = BackwardWork(self, inputs, LSTM_SOURCE), inputs.sizes
        gates, cells, recurrent = work.saved(0), work.saved(1), work.x(2)
        target = work.wanted(2)
        earlier = None if target is None else work.scratch((sizes.steps, sizes.batch, sizes.hidden))
        for number in range(sizes.directions):
            dh, dc = work.state_gradients(number)
            first, order = work.first_state(1, number), sizes.order(number)
            for place in reversed(range(len(order))):
                step = order[place]
                before = cells[order[place - 1], number] if place else first
                sums = work.sums[step, :, number]
                arguments = [gates[step, :, number], before, cells[step, number]]
                arguments += [work.sequence_gradient(number, step), dh, dc, sums, work.lengths]
                work.launch("lstm_cell_gradient", arguments, step, sizes.batch * sizes.hidden)
                work.multiply(sums, recurrent[number], dh, added=True)
            work.keep_states(number, [dh, dc])
            if target is not None and earlier is not None:
                work.earlier_states(number, earlier)
                states = earlier.reshape(sizes.rows, sizes.hidden)
                work.multiply(work.rows(number).swapaxes(0, 1), states, target[number])
            work.bias_gradients(number)
        work.input_gradients()
        return in_sequence(work.steps)


class CudaGRUGradient(RecurrentOperator, GRUGradient):
    """Gradient of gated recurrent units."""

    def prepare(self) -> Step:
        """Each direction backwards, step by step; then one product over all steps for each of dX, dW, dR."""
        inputs = read_gradient(self.call(), GRU_KIND)
        work, sizes = BackwardWork(self, inputs, GRU_SOURCE), inputs.sizes
        linear = self.arguments.bool("linear_before_reset")
        earlier = work.scratch((sizes.steps, sizes.batch, sizes.hidden))
        behind = work.scratch((sizes.steps, sizes.batch, sizes.width)) if linear else None
        of_reset = work.scratch((sizes.batch, sizes.hidden))
        for number in range(sizes.directions):
            work.earlier_states(number, earlier)
            (dh,) = work.state_gradients(number)
            for step in reversed(sizes.order(number)):
                self._step(work, number, step, earlier[step], None if behind is None else behind[step], dh, of_reset)
            work.keep_states(number, [dh])
            rows = None if behind is None else behind.reshape(sizes.rows, sizes.width)
            self._state_gradient(work, number, earlier.reshape(sizes.rows, sizes.hidden), rows)
            work.bias_gradients(number, rows)
        work.input_gradients()
        return in_sequence(work.steps)

    @staticmethod
    def _step(
        work: BackwardWork, number: int, step: int, earlier: Array, behind: Array | None, dh: Array, of_reset: Array
    ) -> None:
        sizes, recurrent = work.sizes, work.x(2)[number]
        gates, sums, opened = work.saved(0)[step, :, number], work.sums[step, :, number], 2 * work.sizes.hidden
        elements, reset = sizes.batch * sizes.hidden, work.saved(1)[step, number]
        arguments = [gates, reset, earlier, work.sequence_gradient(number, step), dh, sums, behind, work.lengths]
        work.launch("gru_cell_gradient", arguments, step, elements)
        if behind is not None:
            work.multiply(behind, recurrent, dh, added=True)
            return
        work.multiply(sums[:, opened:], recurrent[opened:], of_reset)
        work.launch("gru_reset_gradient", [gates, of_reset, earlier, dh, sums, work.lengths], step, elements)
        work.multiply(sums[:, :opened], recurrent[:opened], dh, added=True)

    @staticmethod
    def _state_gradient(work: BackwardWork, number: int, states: Array, behind: Array | None) -> None:
        """dR of one direction, where it is wanted."""
        sizes, target, opened = work.sizes, work.wanted(2), 2 * work.sizes.hidden
        if target is None:
            return
        if behind is not None:
            work.multiply(behind.swapaxes(0, 1), states, target[number])
            return
        rows, resets = work.rows(number), work.without_padding(work.saved(1)[:, number])
        work.multiply(rows[:, :opened].swapaxes(0, 1), states, target[number, :opened])
        resets = resets.reshape(sizes.rows, sizes.hidden)
        work.multiply(rows[:, opened:].swapaxes(0, 1), resets, target[number, opened:])


_CLASSES: dict[type[Operator], type[CudaOperator]] = {
    LSTM: CudaLSTM,
    GRU: CudaGRU,
    LSTMGradient: CudaLSTMGradient,
    GRUGradient: CudaGRUGradient,
}
for _kind, _class in _CLASSES.items():
    operator(_kind.schema, device="cuda")(_class)
