"""Recurrent layers on machine code of our own; without it an LSTM is a primitive of oneDNN's."""

from __future__ import annotations

import math
from abc import abstractmethod
from functools import partial
from hashlib import sha256
from typing import ClassVar

import numpy as np

from dagexec.core.dtypes import FLOAT32
from dagexec.core.operator import Step, in_sequence, nothing_to_do
from dagexec.core.registry import operator
from dagexec.errors import UnsupportedFeatureError
from dagexec.ops.base.layout import NCHW
from dagexec.ops.engines.onednn.descriptors import (
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
    Array,
    Descriptor,
)
from dagexec.ops.engines.onednn.operator import OneDNNOperator
from dagexec.ops.engines.onednn.packing import Making, offer_unpacking, packed_form
from dagexec.ops.engines.onednn.primitive import WEIGHTS_MD
from dagexec.ops.engines.onednn.recurrent_layer import (
    GRU_FORM,
    LINEAR_GRU_FORM,
    LSTM_FORM,
    RNN_FORM,
    Arrays,
    Form,
    Layer,
    Variation,
)
from dagexec.ops.engines.onednn.recurrent_tables import Tables
from dagexec.ops.families.recurrent import gru, lstm, variants
from dagexec.ops.families.recurrent.layer import Recurrence, RecurrentKind, read_recurrence, shortest_length
from dagexec.ops.families.recurrent.lstm import LSTM_KIND
from dagexec.ops.families.recurrent.variants import read_activations
from dagexec.ops.kernels.gate_kernels import FUNCTIONS
from dagexec.ops.kernels.tables import in_phases
from dagexec.platform.addresses import address_of

GATES = LSTM_KIND.gates
_FORWARD, _REVERSE, _BOTH = 1, 2, 3
_GATE_ORDER = (0, 2, 3, 1)
"""oneDNN's gates are input, forget, cell, output: these of ONNX's."""


class RecurrentLayer(OneDNNOperator):
    """Base: a layer on kernels of our own, where they serve.

    Attributes:
        kind: what kind of layer it is.
    """

    metas = (FLOAT32,)
    kind: ClassVar[RecurrentKind]

    @abstractmethod
    def form(self) -> Form:
        """How the kind is computed."""

    def prepare_primitive(self) -> Step:
        """The kernels. Raises UnsupportedFeatureError where they do not serve."""
        peepholes = self.arguments.bool("peepholes")
        sizes = read_recurrence(self.call(), self.kind, behind=int(peepholes))
        if 0 in (sizes.steps, sizes.batch, sizes.features, sizes.hidden):
            raise UnsupportedFeatureError(f"{self.label}: there is nothing to compute")
        variation = self._variation(sizes)
        machine = self.onednn.machine
        if not machine.can_run or any(name not in FUNCTIONS for names in variation.functions for name, *_ in names):
            raise UnsupportedFeatureError(f"{self.label}: there are no kernels for it")
        self.answer(lambda: True)
        layer = Layer(sizes, self.form(), variation, machine.lanes)
        packed, pack = self._packed(layer)
        arrays, read = self._arrays(layer)
        tables = Tables(layer, arrays, packed)
        step = in_phases(tables.phases(), (tables, arrays, packed), self.label)
        return in_sequence([read, pack, step, *self._saved(layer, arrays)])

    def _variation(self, sizes: Recurrence) -> Variation:
        functions = read_activations(self.call(), self.kind.functions, sizes.directions)
        return Variation(
            tuple(tuple(of_direction) for of_direction in functions),
            self.arguments.float("clip", 0.0),
            self.arguments.bool("input_forget"),
            self.arguments.bool("peepholes"),
            sizes.lengths is not None,
            len(self.output_blobs) > self.kind.results,
        )

    def _packed(self, layer: Layer) -> tuple[list[Array], Step]:
        """The weights of the products, and the step that packs those that are fed."""
        sizes = layer.sizes
        w, r, bias = self.x(1), self.x(2), None if sizes.bias is None else self.x(sizes.bias)
        numbers = [1, 2] if sizes.bias is None else [1, 2, sizes.bias]
        weights = [w, *[r] * len(layer.products)]
        if any(self.input(number).constant is None for number in numbers):
            packed = [self.scratch(shape, np.float32) for shape in layer.packed_shapes]
            packs = list[Step]()
            for number, (one, target) in enumerate(zip(weights, packed, strict=True)):
                target.fill(0)
                packs.append(partial(layer.pack, number, one, bias, target))
            return packed, in_sequence(packs)
        form = layer.packing if bias is None else f"{layer.packing}, biases {sha256(bias.tobytes()).hexdigest()}"
        packed = [self._packed_once(layer, number, one, bias, form) for number, one in enumerate(weights)]
        offer_unpacking(self.input(1), w, partial(layer.unpack_input, packed), self.label)
        offer_unpacking(self.input(2), r, partial(layer.unpack_state, packed), self.label)
        return packed, nothing_to_do

    def _packed_once(self, layer: Layer, number: int, weights: Array, bias: Array | None, form: str) -> Array:
        """What product `number` reads of constants."""
        shape, constant = layer.packed_shapes[number], self.input(2 if number else 1).constant
        assert constant is not None, "all weights are constant"

        def fill(packed: Array) -> None:
            packed.fill(0)
            layer.pack(number, weights, bias, packed.view(np.float32).reshape(shape))

        making = Making(f"recurrent product {number}", math.prod(shape) * FLOAT32.itemsize, fill)
        return packed_form(constant, form, making).view(np.float32).reshape(shape)

    def _arrays(self, layer: Layer) -> tuple[Arrays, Step]:
        """What the layer reads and writes, and the step that reads the lengths of sequences."""
        sizes = layer.sizes
        state = (sizes.directions, sizes.batch, sizes.hidden)
        states, outputs = len(self.kind.states), len(self.output_blobs)
        first = [self.x(sizes.state + index) for index in range(states)] if sizes.state is not None else []
        if not first:
            first = [self.scratch(state, np.float32)] * states
            first[0].fill(0)
        saves = layer.variation.saves
        running, read = self._running(sizes)
        arrays = Arrays(
            self.x(0),
            self.y(0),
            self._sums(layer),
            first,
            [self.y(1 + index) if 1 + index < outputs else None for index in range(states)],
            self._work((3, *state)),
            running,
            self.x(sizes.inputs) if layer.variation.peepholes else None,
            self.y(outputs - 1) if saves and states > 1 else None,
            self.y(outputs - 1) if saves and layer.form is GRU_FORM else None,
        )
        return arrays, read

    def _sums(self, layer: Layer) -> Array:
        """Memory for the sums: the output that the gates are saved in, where a row of these is one of sums."""
        count = math.prod(layer.sums_shape)
        saved = self.y(self.kind.results) if layer.variation.saves else None
        return (
            saved.reshape(layer.sums_shape)
            if saved is not None and saved.size == count
            else self._work(layer.sums_shape)
        )

    def _work(self, shape: tuple[int, ...]) -> Array:
        return self.working_memory(math.prod(shape) * np.dtype(np.float32).itemsize).view(np.float32).reshape(shape)

    def _running(self, sizes: Recurrence) -> tuple[Array | None, Step]:
        """By step and sequence 1, or 0 behind its end; and the step that finds out. None without lengths."""
        if sizes.lengths is None:
            return None, nothing_to_do
        running = self.scratch((sizes.steps, sizes.batch), np.float32)
        lengths, numbers, label = self.x(sizes.lengths), np.arange(sizes.steps).reshape(-1, 1), self.label

        def read() -> None:
            shortest_length(lengths, sizes.steps, label)
            np.less(numbers, lengths, out=running, casting="unsafe")

        return running, read

    def _saved(self, layer: Layer, arrays: Arrays) -> list[Step]:
        """The copies of what the gradient reads."""
        if not layer.variation.saves:
            return []
        sizes, sums = layer.sizes, arrays.sums
        gates = self.y(self.kind.results).reshape(*sums.shape[:3], self.kind.gates, sizes.hidden)
        steps: list[Step] = []
        if address_of(gates) != address_of(sums):
            steps.append(partial(np.copyto, gates, sums[:, :, :, : self.kind.gates, : sizes.hidden]))
        if arrays.cells is not None:
            last = [0 if is_reversed else sizes.steps - 1 for is_reversed in sizes.reversed]
            steps += [
                partial(np.copyto, self.y(2)[number], arrays.cells[place, number]) for number, place in enumerate(last)
            ]
        elif arrays.resets is None:
            steps.append(partial(np.copyto, self.y(3), sums[:, :, :, -1, : sizes.hidden].swapaxes(1, 2)))
        return steps


@operator(gru.GRU.schema, engine="ONEDNN")
class GRU(RecurrentLayer, gru.GRU):
    """Gated recurrent units."""

    kind = gru.GRU_KIND

    def form(self) -> Form:
        """By where the reset gate is."""
        return LINEAR_GRU_FORM if self.arguments.bool("linear_before_reset") else GRU_FORM


@operator(variants.GeneralGRU.schema, engine="ONEDNN")
class GeneralGRU(RecurrentLayer, variants.GeneralGRU):
    """Gated recurrent units with other functions."""

    def form(self) -> Form:
        """By where the reset gate is."""
        return LINEAR_GRU_FORM if self.arguments.bool("linear_before_reset") else GRU_FORM


@operator(variants.RNN.schema, engine="ONEDNN")
class RNN(RecurrentLayer, variants.RNN):
    """A simple recurrent layer."""

    def form(self) -> Form:
        """The only one."""
        return RNN_FORM


@operator(variants.GeneralLSTM.schema, engine="ONEDNN")
class GeneralLSTM(RecurrentLayer, variants.GeneralLSTM):
    """Long short-term memory with other functions, peepholes or coupled gates."""

    def form(self) -> Form:
        """The only one."""
        return LSTM_FORM


@operator(lstm.LSTM.schema, engine="ONEDNN")
class LSTM(RecurrentLayer, lstm.LSTM):
    """Long short-term memory."""

    kind = LSTM_KIND

    def form(self) -> Form:
        """The only one."""
        return LSTM_FORM

    def prepare_primitive(self) -> Step:
        """The kernels, or where they do not run the library's primitive."""
        if self.onednn.machine.can_run:
            return super().prepare_primitive()
        return self.library_primitive()

    def library_primitive(self) -> Step:
        """One primitive for all steps and directions; of two, which it puts side by side, a copy into Y's order.

        Constant weights are turned and packed once.
        """
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
