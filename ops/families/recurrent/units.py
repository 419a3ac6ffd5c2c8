"""LSTMUnit and GRUUnit: one step of a recurrent layer on sums that other operators computed, as in Caffe2.

The operators `LSTM` and `GRU` are for whole sequences, and much faster. The order of an LSTMUnit's gates is input,
forget, output, cell; that of a GRUUnit's is reset, update, output.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import ClassVar

import numpy as np

from dagexec.core.dtypes import FLOAT_TYPES, INT32, INT64
from dagexec.core.gradient import GradientOperators, GradientRequest, gradient_of
from dagexec.core.operator import Operator, Step, in_sequence, nothing_to_do
from dagexec.core.registry import new_operator
from dagexec.core.schema import OperatorCall, TensorType
from dagexec.ops.base.blocks import Array
from dagexec.ops.base.passes import scalar_pass, sigmoid_passes
from dagexec.ops.families.recurrent.layer import WorkArrays

UNIT_ARGS = {
    "sequence_lengths": "1: the input before timestep is the steps of each sequence, int32 or int64 (default 1)",
    "drop_states": "1: the state of a sequence that has ended is 0, not the one before (default 0)",
}
LSTM_UNIT_ARGS = UNIT_ARGS | {"forget_bias": "added to the sums of the forget gate (default 0)"}
LSTM_STATES, GRU_STATES = 2, 1


def infer_unit(call: OperatorCall, states: int, gates: int, *, gradient: bool = False) -> list[TensorType]:
    """The new states, or the gradients of states and gates.

    Raises ShapeError unless states are 1 x batch x hidden, and the gates 1 x batch x gates of hidden.
    """
    call.arguments.float("forget_bias", 0.0)
    call.arguments.bool("drop_states")
    lengths = call.arguments.bool("sequence_lengths", True)
    timestep = states + 1 + lengths
    behind = 2 * states if gradient else 0
    if len(call.inputs) != timestep + 1 + behind:
        expected = timestep + 1 + behind
        raise call.fail(f"with sequence_lengths={lengths:d} expected {expected} inputs, found {len(call.inputs)}")
    _, batch, hidden = state = call.require_rank(0, 3)
    call.require_shape(0, (1, batch, hidden), "1, batch, the state")
    for index in (*range(1, states), *range(timestep + 1, len(call.inputs))):
        call.require_shape(index, state, "that of the hidden state")
    call.require_shape(states, (1, batch, gates * hidden), f"1, batch, {gates} gates of the state")
    if lengths:
        call.require_types(states + 1, INT32, INT64)
        call.require_shape(states + 1, (batch,), "a number of steps for each sequence of the batch")
    call.require_types(timestep, INT32, INT64)
    if call.inputs[timestep].elements != 1:
        call.require_shape(timestep, (1,), "the number of the step")
    call.require_types(0, *FLOAT_TYPES)
    call.require_same_type(*range(states + 1), *range(timestep + 1, len(call.inputs)))
    return [*call.inputs[:states], *([call.inputs[states]] if gradient else [])]


def _inputs(states: Sequence[str]) -> tuple[str, ...]:
    return (*states, "gates", "seq_lengths, with sequence_lengths=1", "timestep")


class Unit(Operator):
    """Base of the units.

    Attributes:
        states: how many inputs, the first ones, are the state.
        gates: how many sums a state element has.
    """

    states: ClassVar[int]
    gates: ClassVar[int]

    def sums(self, arrays: WorkArrays) -> tuple[Array, list[Array], Step]:
        """Memory for the gates, batch x gates of the state; each gate of it; and the step that copies the input."""
        source = arrays.x(self.states)[0]
        stage = arrays.scratch(source.shape)
        hidden = self.x(0).shape[2]
        parts = [stage[:, gate * hidden : (gate + 1) * hidden] for gate in range(self.gates)]
        return stage, parts, partial(np.copyto, stage, source)

    def for_ended(self, replacements: Sequence[tuple[Array, Array | None]]) -> Step:
        """The step that sets each array to its replacement (None: 0) where a sequence has ended."""
        if not self.arguments.bool("sequence_lengths", True):
            return nothing_to_do
        lengths, timestep = self.x(self.states + 1), self.x(self.states + 2).reshape(1)
        ended = self.scratch((lengths.size, 1), np.bool_)
        column = lengths.reshape(-1, 1)

        def replace() -> None:
            np.less_equal(column, timestep, ended)
            for target, source in replacements:
                np.copyto(target, 0 if source is None else source, where=ended)

        return replace

    def kept(self, state: Array) -> Array | None:
        """What stands in the place of a state, or of its gradient, behind the end of a sequence."""
        return None if self.arguments.bool("drop_states") else state


@new_operator(
    "LSTMUnit",
    inputs=(4, 5),
    infer=partial(infer_unit, states=LSTM_STATES, gates=4),
    doc="C = sigmoid(f + forget_bias) C_prev + sigmoid(i) tanh(g); H = sigmoid(o) tanh(C), for gates i, f, o, g "
    "side by side: 1 x batch x 4 hidden. From the step on that its length says, a sequence keeps its state.",
    input_names=_inputs(("hidden_prev", "cell_prev")),
    output_names=("hidden", "cell"),
    args=LSTM_UNIT_ARGS,
)
class LSTMUnit(Unit):
    """One step of long short-term memory."""

    states, gates = LSTM_STATES, 4

    def prepare(self) -> Step:
        """The gates, the cell, the hidden state, and what replaces them."""
        arrays = WorkArrays(self)
        before, (i, f, o, g) = lstm_gates(self, arrays)
        h_prev, c_prev, h, c = arrays.x(0)[0], arrays.x(1)[0], arrays.y(0)[0], arrays.y(1)[0]
        steps: list[Step] = [
            partial(np.multiply, f, c_prev, c),
            partial(np.multiply, i, g, g),
            partial(np.add, c, g, c),
            partial(np.tanh, c, g),
            partial(np.multiply, o, g, h),
            self.for_ended([(h, self.kept(h_prev)), (c, self.kept(c_prev))]),
        ]
        return in_sequence([*arrays.before, *before, *steps, *arrays.after])


def lstm_gates(unit: Unit, arrays: WorkArrays) -> tuple[list[Step], list[Array]]:
    """The passes that compute the gates of an LSTMUnit, and the gates: i, f, o, g."""
    stage, parts, copy = unit.sums(arrays)
    opened, (_, f, _, g) = stage[:, : 3 * parts[0].shape[1]], parts
    bias = unit.arguments.float("forget_bias", 0.0)
    biased = [] if bias == 0 else [scalar_pass(np.add, f, bias, f)]
    return [copy, *biased, *sigmoid_passes(opened, opened), partial(np.tanh, g, g)], parts


@gradient_of("LSTMUnit")
def lstm_unit_gradient(request: GradientRequest) -> GradientOperators:
    """LSTMUnitGradient of all inputs and outputs, for hidden_prev, cell_prev and gates."""
    inputs = [*request.definition.input, request.y(0), request.y(1), request.dy(0), request.dy(1)]
    return request.single("LSTMUnitGradient", inputs, [0, 1, 2])


@new_operator(
    "LSTMUnitGradient",
    inputs=(8, 9),
    infer=partial(infer_unit, states=LSTM_STATES, gates=4, gradient=True),
    doc="Gradient of LSTMUnit. Of a running sequence that of hidden_prev is 0: its part is in the gates.",
    input_names=(*_inputs(("hidden_prev", "cell_prev")), "hidden", "cell", "d_hidden", "d_cell"),
    output_names=("d_hidden_prev", "d_cell_prev", "d_gates"),
    args=LSTM_UNIT_ARGS,
)
class LSTMUnitGradient(Unit):
    """Gradient of one step of long short-term memory."""

    states, gates = LSTM_STATES, 4

    def prepare(self) -> Step:
        """The gates once more, then back through the cell."""
        arrays = WorkArrays(self)
        before, (i, f, o, g) = lstm_gates(self, arrays)
        c_prev = arrays.x(1)[0]
        _, c, dh, dc = (arrays.x(len(self.input_blobs) - 4 + place)[0] for place in range(4))
        dh_prev, dc_prev, dgates = (arrays.y(index)[0] for index in range(3))
        hidden = dh.shape[1]
        of_i, of_f, of_o, of_g = (dgates[:, gate * hidden : (gate + 1) * hidden] for gate in range(4))
        work = arrays.scratch(dh.shape)
        one = np.asarray(1, arrays.dtype)
        steps: list[Step] = [
            partial(np.tanh, c, work),
            partial(np.multiply, dh, work, of_o),
            *_through_sigmoid(o, of_o, dh_prev),
            partial(np.square, work, work),
            partial(np.subtract, one, work, work),
            partial(np.multiply, work, o, work),
            partial(np.multiply, work, dh, work),
            partial(np.add, work, dc, work),
            partial(np.multiply, work, f, dc_prev),
            partial(np.multiply, work, c_prev, of_f),
            *_through_sigmoid(f, of_f, dh_prev),
            partial(np.multiply, work, g, of_i),
            *_through_sigmoid(i, of_i, dh_prev),
            partial(np.multiply, work, i, of_g),
            *_through_tanh(g, of_g, dh_prev),
            partial(dh_prev.fill, 0),
            self.for_ended([(dh_prev, self.kept(dh)), (dc_prev, self.kept(dc)), (dgates, None)]),
        ]
        return in_sequence([*arrays.before, *before, *steps, *arrays.after])


def _through_sigmoid(y: Array, gradient: Array, work: Array) -> list[Step]:
    """The passes that multiply `gradient` by y (1 - y)."""
    return [
        partial(np.subtract, np.asarray(1, y.dtype), y, work),
        partial(np.multiply, work, y, work),
        partial(np.multiply, gradient, work, gradient),
    ]


def _through_tanh(y: Array, gradient: Array, work: Array) -> list[Step]:
    """The passes that multiply `gradient` by 1 - y^2."""
    return [
        partial(np.square, y, work),
        partial(np.subtract, np.asarray(1, y.dtype), work, work),
        partial(np.multiply, gradient, work, gradient),
    ]


@new_operator(
    "GRUUnit",
    inputs=(3, 4),
    infer=partial(infer_unit, states=GRU_STATES, gates=3),
    doc="H = sigmoid(update) H_prev + (1 - sigmoid(update)) tanh(output), for gates reset, update, output side by "
    "side: 1 x batch x 3 hidden. The reset gate is not read: it is applied where the sums are computed. From the "
    "step on that its length says, a sequence keeps its state.",
    input_names=_inputs(("hidden_prev",)),
    output_names=("hidden",),
    args=UNIT_ARGS,
    unread_args=("forget_bias",),
)
class GRUUnit(Unit):
    """One step of gated recurrent units."""

    states, gates = GRU_STATES, 3

    def prepare(self) -> Step:
        """The update gate and the output, mixed, and what replaces them."""
        arrays = WorkArrays(self)
        before, update, output = gru_gates(self, arrays)
        h_prev, h = arrays.x(0)[0], arrays.y(0)[0]
        steps: list[Step] = [
            partial(np.subtract, h_prev, output, h),
            partial(np.multiply, h, update, h),
            partial(np.add, h, output, h),
            self.for_ended([(h, self.kept(h_prev))]),
        ]
        return in_sequence([*arrays.before, *before, *steps, *arrays.after])


def gru_gates(unit: Unit, arrays: WorkArrays) -> tuple[list[Step], Array, Array]:
    """The passes that compute the gates of a GRUUnit; the update gate and the output."""
    _, (_, update, output), copy = unit.sums(arrays)
    return [copy, *sigmoid_passes(update, update), partial(np.tanh, output, output)], update, output


@gradient_of("GRUUnit")
def gru_unit_gradient(request: GradientRequest) -> GradientOperators:
    """GRUUnitGradient of all inputs and the output, for hidden_prev and gates."""
    inputs = [*request.definition.input, request.y(0), request.dy(0)]
    return request.single("GRUUnitGradient", inputs, [0, 1])


@new_operator(
    "GRUUnitGradient",
    inputs=(5, 6),
    infer=partial(infer_unit, states=GRU_STATES, gates=3, gradient=True),
    doc="Gradient of GRUUnit; that of the reset gate is 0.",
    input_names=(*_inputs(("hidden_prev",)), "hidden", "d_hidden"),
    output_names=("d_hidden_prev", "d_gates"),
    args=UNIT_ARGS,
    unread_args=("forget_bias",),
)
class GRUUnitGradient(Unit):
    """Gradient of one step of gated recurrent units."""

    states, gates = GRU_STATES, 3

    def prepare(self) -> Step:
        """The gates once more, then back through the mix."""
        arrays = WorkArrays(self)
        before, update, output = gru_gates(self, arrays)
        h_prev, dh = arrays.x(0)[0], arrays.x(len(self.input_blobs) - 1)[0]
        dh_prev, dgates = arrays.y(0)[0], arrays.y(1)[0]
        hidden = dh.shape[1]
        of_reset, of_update, of_output = (dgates[:, gate * hidden : (gate + 1) * hidden] for gate in range(3))
        steps: list[Step] = [
            partial(np.subtract, h_prev, output, of_update),
            partial(np.multiply, of_update, dh, of_update),
            *_through_sigmoid(update, of_update, dh_prev),
            partial(np.subtract, np.asarray(1, arrays.dtype), update, of_output),
            partial(np.multiply, of_output, dh, of_output),
            *_through_tanh(output, of_output, dh_prev),
            partial(of_reset.fill, 0),
            partial(np.multiply, dh, update, dh_prev),
            self.for_ended([(dh_prev, self.kept(dh)), (dgates, None)]),
        ]
        return in_sequence([*arrays.before, *before, *steps, *arrays.after])
