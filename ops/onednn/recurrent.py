"""LSTM by oneDNN, in one or both directions."""

from __future__ import annotations

from functools import partial

import numpy as np

from dagexec.core.dtypes import FLOAT32
from dagexec.core.operator import Step, in_sequence, nothing_to_do
from dagexec.core.registry import operator
from dagexec.errors import UnsupportedFeatureError
from dagexec.ops.base.layout import NCHW
from dagexec.ops.onednn.operator import OneDNNOperator
from dagexec.ops.onednn.primitive import (
    BIAS,
    DST,
    DST_1,
    DST_2,
    FORWARD_INFERENCE,
    SRC,
    SRC_1,
    SRC_2,
    WEIGHTS,
    WEIGHTS_1,
    WEIGHTS_MD,
    Array,
    Descriptor,
)
from dagexec.ops.recurrent import lstm
from dagexec.ops.recurrent.layer import Recurrence, read_recurrence
from dagexec.ops.recurrent.lstm import LSTM_KIND

GATES = LSTM_KIND.gates
_FORWARD, _REVERSE, _BOTH = 1, 2, 3
_GATE_ORDER = (0, 2, 3, 1)
"""oneDNN's gates are input, forget, cell, output: these of ONNX's."""


@operator(lstm.LSTM.schema, engine="ONEDNN")
class LSTM(OneDNNOperator, lstm.LSTM):
    """One primitive for all steps and directions; constant weights are turned and packed once."""

    metas = (FLOAT32,)

    def prepare_primitive(self) -> Step:
        """The primitive; of two directions, whose results oneDNN puts side by side, a copy into Y's order."""
        sizes = read_recurrence(self.call(), LSTM_KIND)
        if 0 in (sizes.steps, sizes.batch, sizes.features, sizes.hidden):
            raise UnsupportedFeatureError(f"{self.label}: there is nothing to compute")
        if len(self.output_blobs) > LSTM_KIND.results or sizes.lengths is not None:
            raise UnsupportedFeatureError(
                f"{self.label}: not supported for training or for sequences of different lengths"
            )
        directions, hidden = sizes.directions, sizes.hidden
        x, y = self.x(0), self.y(0)
        side_by_side = (sizes.steps, sizes.batch, directions * hidden)
        joined = y.reshape(side_by_side)
        if directions == 2:
            joined = self.working_memory(y.nbytes).view(y.dtype).reshape(side_by_side)
        source, target = self.packed(x), self.packed(joined)
        state = self._layout((1, directions, sizes.batch, hidden))
        bias_layout = self._layout((1, directions, GATES, hidden))
        wanted = [
            Descriptor.any_layout(self.onednn, (1, directions, size, GATES, hidden), FLOAT32)
            for size in (sizes.features, hidden)
        ]
        attributes, null = self.attributes(), self.onednn.ffi.NULL
        given = state.handle if sizes.state is not None else null
        kept = state.handle if len(self.output_blobs) > 1 else null
        direction = _BOTH if directions == 2 else _REVERSE if sizes.reversed[0] else _FORWARD
        found = self.describe_fast(
            "lstm_forward",
            self.onednn.engine,
            FORWARD_INFERENCE,
            direction,
            source.handle,
            given,
            given,
            *(layout.handle for layout in wanted),
            null,
            null,
            bias_layout.handle,
            target.handle,
            kept,
            kept,
            0,
            attributes.handle,
        )
        arguments: dict[int, tuple[Descriptor, Array]] = {SRC: (source, x), DST: (target, joined)}
        steps: list[Step] = []
        for index, number in ((1, WEIGHTS), (2, WEIGHTS_1)):
            gates, turn = self._gates(index, sizes)
            layout = found.descriptor(WEIGHTS_MD, index - 1)
            memory, pack = self.parameter(index, gates, self.packed(gates), layout)
            arguments[number] = (layout, memory)
            steps += [turn, pack]
        bias, add = self._bias(sizes)
        arguments[BIAS] = (bias_layout, bias)
        if sizes.state is not None:
            arguments[SRC_1] = (state, self.x(sizes.state))
            arguments[SRC_2] = (state, self.x(sizes.state + 1))
        if len(self.output_blobs) > 1:
            arguments[DST_1] = (state, self.y(1))
            last = self.y(2) if len(self.output_blobs) > 2 else self.scratch(self.y(1).shape, y.dtype)
            arguments[DST_2] = (state, last)
        bound = self.bound(found, arguments)
        step = in_sequence([*steps, add, bound.step, self._separated(sizes, joined)])
        return self.rebindable(step, bound, {0: SRC}, {0: DST} if directions == 1 else {})

    def _layout(self, shape: tuple[int, ...]) -> Descriptor:
        return Descriptor.of_order(self.onednn, shape, FLOAT32, NCHW)

    def _gates(self, index: int, sizes: Recurrence) -> tuple[Array, Step]:
        """Input `index`, W or R, as 1, directions, inputs, gates, hidden in oneDNN's order; and what fills it."""
        weights = self.x(index).reshape(sizes.directions, GATES, sizes.hidden, -1)
        constant = self.input(index).constant
        if constant is not None:
            turned: Array = constant.derived("onednn gates", lambda: weights[:, list(_GATE_ORDER)])
            return turned.transpose(0, 3, 1, 2)[None], nothing_to_do
        turned = self.scratch(weights.shape, weights.dtype)
        copies = [partial(np.copyto, turned[:, place], weights[:, gate]) for place, gate in enumerate(_GATE_ORDER)]
        return turned.transpose(0, 3, 1, 2)[None], in_sequence(copies)

    def _bias(self, sizes: Recurrence) -> tuple[Array, Step]:
        """The biases of W and R added, as directions, gates, hidden; and the step that adds them."""
        shape = (sizes.directions, GATES, sizes.hidden)
        if sizes.bias is None:
            return np.zeros(shape, np.float32), nothing_to_do
        both = self.x(sizes.bias).reshape(sizes.directions, 2, GATES, sizes.hidden)
        total = self.scratch(shape, np.float32)
        steps = [
            partial(np.add, both[:, 0, gate], both[:, 1, gate], out=total[:, place])
            for place, gate in enumerate(_GATE_ORDER)
        ]
        if self.input(sizes.bias).constant is not None:
            in_sequence(steps)()
            return total, nothing_to_do
        return total, in_sequence(steps)

    def _separated(self, sizes: Recurrence, joined: Array) -> Step:
        """The copy of the two directions side by side into Y: steps, directions, batch, hidden."""
        if sizes.directions == 1:
            return nothing_to_do
        parts = joined.reshape(sizes.steps, sizes.batch, sizes.directions, sizes.hidden).swapaxes(1, 2)
        return partial(np.copyto, self.y(0), parts)
