"""DynamicQuantLSTM: an LSTM whose products are of 8-bit integers, X and the state quantized by their ranges in a run.

onnxruntime.quantization makes DynamicQuantizeLSTM of com.microsoft of a model's LSTMs; this is that operator, with the
weights as LSTM has them and their zero points subtracted. The gates stay floats.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from dagexec.core.dtypes import FLOAT32, INT8, UINT8
from dagexec.core.gradient import not_differentiable
from dagexec.core.operator import Operator, Step, in_sequence
from dagexec.core.registry import operator
from dagexec.core.rows import across
from dagexec.core.schema import OperatorCall, OpSchema, TensorType
from dagexec.ops.base.blocks import Array
from dagexec.ops.families.quantized.accumulation import exact_dtype, widened
from dagexec.ops.families.quantized.by_range import ByRange
from dagexec.ops.families.quantized.scales import checked_scales
from dagexec.ops.families.recurrent.layer import (
    LAYER_ARGS,
    Padding,
    Recurrence,
    WorkArrays,
    layer_cost,
    read_recurrence,
)
from dagexec.ops.families.recurrent.lstm import LSTM_KIND, one_direction
from dagexec.platform.records import dataclass

SCALES = 2
"""Inputs behind those of the layer: the scales of W and of R."""


def infer_dynamic_lstm(call: OperatorCall) -> list[TensorType]:
    """Y of all steps, the last hidden state and cell. Raises ArgumentError or ShapeError."""
    sizes = read_recurrence(call, LSTM_KIND, behind=SCALES)
    call.require_types(0, FLOAT32)
    for index in (1, 2):
        call.require_types(index, INT8)
    floats = set(range(3, sizes.inputs + SCALES)) - {sizes.lengths}
    call.require_same_type(0, *sorted(floats))
    for index in range(sizes.inputs, sizes.inputs + SCALES):
        if call.inputs[index].shape not in ((sizes.directions,), (sizes.directions, sizes.width)):
            raise call.fail(
                f"scales {call.definition.input[index]!r} must have one entry a direction ({sizes.directions}), or one "
                f"for each of {sizes.width} gates as well; found shape {call.inputs[index].shape}"
            )
    state = TensorType((sizes.directions, sizes.batch, sizes.hidden), FLOAT32)
    return [TensorType((sizes.steps, *state.shape), FLOAT32), state, state][: len(call.definition.output)]


DYNAMIC_QUANT_LSTM = OpSchema(
    "DynamicQuantLSTM",
    inputs=(5, 9),
    outputs=(1, 3),
    infer=infer_dynamic_lstm,
    doc="LSTM with W and R of int8: X of all steps together, and before each step the states of all sequences "
    "together, are quantized to uint8 by their ranges, as by DynamicQuantizeLinear; the sums of products are exact, "
    "and times the scales in float32. See LSTM for the rest. (dagexec's own, for com.microsoft's DynamicQuantizeLSTM.)",
    input_names=(*LSTM_KIND.input_names(), "W_scale, one a direction or one a gate", "R_scale, likewise"),
    output_names=("Y", "Y_h, the last hidden state", "Y_c, the last cell"),
    args=LAYER_ARGS,
    cost=lambda call, outputs: layer_cost(call, outputs, LSTM_KIND, behind=SCALES),
    is_quantized=True,
    rows=across("takes the scales of X and of the states from the range of all rows"),
)


@dataclass(frozen=True)
class DynamicProduct:
    """Y = (X W^T) * factors + bias, X quantized by its range.

    Attributes:
        x, y: rows x inputs, and rows x units; float32.
        index: the input of the operator that has the weights.
        part: which of them: all, or those of a direction.
        factors: of the units, float32: the scales of the weights.
        bias: of the units, or None.
    """

    x: Array
    y: Array
    index: int
    part: int | None
    factors: Array
    bias: Array | None

    def of_part(self, weights: Array) -> Array:
        """The weights it multiplies with, units x inputs, of all those."""
        found: Array = weights if self.part is None else weights[self.part]
        return found.reshape(-1, weights.shape[-1])


@operator(DYNAMIC_QUANT_LSTM)
class DynamicQuantLSTM(Operator):
    """Long short-term memory with 8-bit products; sums are what 32-bit accumulators hold."""

    def prepare(self) -> Step:
        """The layer with NumPy's products."""
        return self.layer(self.product)

    def layer(self, product: Callable[[DynamicProduct], Step]) -> Step:
        """One product for X of all steps and directions, then step after step; directions one after the other."""
        sizes = read_recurrence(self.call(), LSTM_KIND, behind=SCALES)
        arrays, padding = WorkArrays(self), Padding(self, sizes)
        gates = arrays.scratch((sizes.steps, sizes.batch, sizes.directions, sizes.width))
        scale, factors = self._factors(sizes)
        bias, add = self._bias(sizes)
        x, sums = self.x(0).reshape(sizes.rows, sizes.features), gates.reshape(sizes.rows, -1)
        steps = [*scale, add, product(DynamicProduct(x, sums, 1, None, factors[0].reshape(-1), bias))]
        for number in range(sizes.directions):

            def multiply(h: Array, y: Array, number: int = number) -> Step:
                return product(DynamicProduct(h, y, 2, number, factors[1][number], None))

            two = arrays.scratch((2, sizes.batch, sizes.hidden))
            cells = [two[step % 2] for step in range(sizes.steps)]
            steps.append(one_direction(arrays, sizes, number, padding, gates[:, :, number], cells, multiply))
        return in_sequence([padding.read, *steps])

    def product(self, what: DynamicProduct) -> Step:
        """A product on the floating-point unit, where the integers' sums are exact."""
        terms = what.x.shape[1]
        work = exact_dtype(terms, UINT8, 0, INT8)
        weights, widen = widened(self, what.index, self.x(what.index), work)
        found = ByRange.of(self, what.x)
        values, multiplier = self.scratch(what.x.shape, np.float32), self.scratch(what.factors.shape, np.float32)
        steps: list[Step] = [widen, found.measure, *found.centered_passes(values)]
        sums = what.y
        if work != np.float32:
            wide, sums = self.scratch(values.shape, work), self.scratch(what.y.shape, work)
            steps.append(partial(np.copyto, wide, values))
            values = wide
        steps += [
            partial(np.matmul, values, what.of_part(weights).T, sums),
            partial(np.multiply, what.factors, found.scale, multiplier),
            partial(np.multiply, sums, multiplier, what.y, casting="same_kind"),
        ]
        return in_sequence(steps if what.bias is None else [*steps, partial(np.add, what.y, what.bias, what.y)])

    def _factors(self, sizes: Recurrence) -> tuple[list[Step], list[Array]]:
        """The scales of W and R, directions x gates, halved for gates that go through a sigmoid; the steps for it."""
        steps: list[Step] = []
        found = []
        for index in range(sizes.inputs, sizes.inputs + SCALES):
            factors = self.scratch((sizes.directions, sizes.width), np.float32)
            each = self.x(index).reshape(sizes.directions, -1)
            steps += [*checked_scales(self, index), partial(np.copyto, factors, each), _halved(factors, sizes)]
            found.append(factors)
        return steps, found

    def _bias(self, sizes: Recurrence) -> tuple[Array, Step]:
        """The biases of W and R added, as one vector, halved likewise; and the step that adds them."""
        total = self.scratch((sizes.directions, sizes.width), np.float32)
        if sizes.bias is None:
            return total.reshape(-1), partial(total.fill, 0)
        both = self.x(sizes.bias).reshape(sizes.directions, 2, sizes.width)
        add = partial(np.add, both[:, 0], both[:, 1], out=total)
        return total.reshape(-1), in_sequence([add, _halved(total, sizes)])


def _halved(vectors: Array, sizes: Recurrence) -> Step:
    opened = vectors[:, : LSTM_KIND.sigmoids * sizes.hidden]
    return partial(np.multiply, opened, np.float32(0.5), out=opened)


not_differentiable("its numbers are rounded to integers; train with LSTM", "DynamicQuantLSTM")
