"""Quantization by calibration: a model of floats gets QuantizeLinear and DequantizeLinear around its products.

Convolutions and fully connected layers with constant weights are what gains. Their inputs are quantized to uint8 by
the range that sample inputs have there, their weights to int8 with a scale for each output channel. Values that only
move between them (pooled maxima, concatenations, reshaped) share one scale, so that they stay integers on the way; and
so do the results of such layers that are added to others. A layer that loses too much by itself stays in float32.
`quantized-operators` then makes integer operators of it all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from dagexec.compiler.passes.calibration import (
    Array,
    ValueRange,
    by_onednn,
    calibrate,
    fake_quantized,
    fake_quantized_weights,
    quantized_weights,
    run_each,
)
from dagexec.compiler.passes.draft import Draft, Rewritten
from dagexec.compiler.passes.linear_quantization import DEQUANTIZE, dequantize, quantize
from dagexec.compiler.passes.operator_traits import moved_inputs
from dagexec.compiler.passes.post_operations import is_sum
from dagexec.compiler.passes.quantized_operators import Types, activation_post_op
from dagexec.core.dtypes import BFLOAT16, FLOAT32
from dagexec.core.evaluation import evaluated
from dagexec.core.feeds import Feeds
from dagexec.core.model import Model
from dagexec.core.node import Node, new_node
from dagexec.core.registry import schema_of
from dagexec.core.traits import LayerKind
from dagexec.platform.records import dataclass

LARGEST_ERROR = 0.1
"""Relative root-mean-square error of a layer's result by its own quantization, above which it stays in float32."""


@dataclass(frozen=True, slots=True)
class LayerError:
    """What the result of one operator loses when that operator alone is computed in fewer bits.

    Attributes:
        operator: its label.
        output: the blob it writes.
        error: root mean square of the difference over that of the result, over all sample inputs.
    """

    operator: str
    output: str
    error: float


def with_quantization(model: Model, feeds: Sequence[Feeds]) -> Rewritten:
    """`model`, in QDQ form, by the ranges found over `feeds`. Raises what `calibrate` raises."""
    draft = Draft(model)
    types = draft.types()
    layers = [number for number in draft.numbers() if _is_layer(draft, number, types)]
    if not layers:
        return Rewritten(model)
    ranges = calibrate(model, feeds, _Groups(draft, layers, types).names())
    kept = []
    for number, found in zip(layers, layer_errors(draft, layers, feeds, in_8_bits(ranges)), strict=True):
        if found.error <= LARGEST_ERROR:
            kept.append(number)
        else:
            draft.changed(f"{found.operator}: stays in float32, 8 bits alone lose {found.error:.1%} of its result")
    groups = _Groups(draft, kept, types).by_scale()
    for number in kept:
        _quantize_weights(draft, number)
    for names in groups:
        _quantize_values(draft, names, ranges)
    changes = draft.settle()
    return Rewritten(draft.model, changes)


def _is_layer(draft: Draft, number: int, types: Types) -> bool:
    definition = draft[number]
    layer = schema_of(definition.type).layer
    if layer not in (LayerKind.CONVOLUTION, LayerKind.FULLY_CONNECTED):
        return False
    weights = draft.constant(definition.input[1])
    kind = types.get(definition.input[0])
    if weights is None or weights.dtype != np.float32 or not weights.size or kind is None or kind.meta is not FLOAT32:
        return False
    constants = [draft.constant(name) is not None for name in definition.input[2:]]
    is_matrix = weights.ndim == 2 and draft.arguments(number).int("axis_w", 1) == 1
    plain = layer is LayerKind.CONVOLUTION or is_matrix
    return plain and all(constants) and draft.is_free(number) and draft.is_single(definition.input[0])


Rounding = Callable[[Node, Sequence[Array]], Sequence[Array]]
"""The inputs of a layer as few bits leave them, in float32."""


def in_8_bits(ranges: Mapping[str, ValueRange]) -> Rounding:
    """Inputs of those ranges as uint8, weights as int8, biases as they are."""

    def rounded(definition: Node, inputs: Sequence[Array]) -> Sequence[Array]:
        x, weights, *others = inputs
        return [fake_quantized(x, ranges[definition.input[0]]), fake_quantized_weights(weights), *others]

    return rounded


def in_bfloat16(_definition: Node, inputs: Sequence[Array]) -> Sequence[Array]:
    """Everything rounded to bfloat16."""
    return [array.astype(BFLOAT16.numpy).astype(np.float32) for array in inputs]


def layer_errors(draft: Draft, layers: Sequence[int], feeds: Sequence[Feeds], rounded: Rounding) -> list[LayerError]:
    """What each layer loses alone: its input and weights in fewer bits, everything before it in float32."""
    indices = {index: number for index, number in enumerate(draft.numbers()) if number in set(layers)}
    squares = {number: [0.0, 0.0] for number in layers}

    def visit(index: int, definition: Node, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
        if index not in indices:
            return
        found = computed(definition, rounded(definition, inputs))
        sums = squares[indices[index]]
        sums[0] += float(np.square(found - outputs[0], dtype=np.float64).sum())
        sums[1] += float(np.square(outputs[0], dtype=np.float64).sum())

    run_each(draft.model, feeds, visit)
    return [LayerError(draft.label(number), draft[number].output[0], relative(*squares[number])) for number in layers]


def errors_by_layer(model: Model, dtype: str, feeds: Sequence[Feeds], calibration: Sequence[Feeds]) -> list[LayerError]:
    """The layers of `model` that `dtype` ("bfloat16" or "int8") may change, with what each loses alone over `feeds`.

    Parameters must be arrays already. For int8 `calibration` gives the ranges. Raises what `calibrate` raises.
    """
    draft = Draft(model)
    types = draft.types()
    layers = [number for number in draft.numbers() if _is_layer(draft, number, types)]
    if dtype == "bfloat16":
        return layer_errors(draft, layers, feeds, in_bfloat16)
    ranges = calibrate(model, calibration, {draft[number].input[0] for number in layers})
    return layer_errors(draft, layers, feeds, in_8_bits(ranges))


def relative(difference: float, whole: float) -> float:
    """The root of a quotient of squares; 0 when both are 0."""
    if difference == 0:
        return 0.0
    return float(np.sqrt(difference / whole)) if whole > 0 else float("inf")


def computed(definition: Node, inputs: Sequence[Array]) -> Array:
    """Output 0 of an operator on other inputs."""
    names = [f"in{index}" for index in range(len(inputs))]
    outputs = [f"out{index}" for index in range(len(definition.output))]
    values = {name: np.ascontiguousarray(array) for name, array in zip(names, inputs, strict=True)}
    return evaluated(by_onednn(definition).changed(inputs=names, outputs=outputs), values)[0]


class _Groups:
    """The blobs to quantize, in groups that share a scale (union-find, Tarjan 1975)."""

    def __init__(self, draft: Draft, layers: Iterable[int], types: Types) -> None:
        self._draft = draft
        self._parents: dict[str, str] = {}
        self._layers = set(layers)
        waiting = list(dict.fromkeys(draft[number].input[0] for number in sorted(self._layers)))
        waiting += self._addends(types)
        while waiting:
            name = waiting.pop()
            if name in self._parents:
                continue
            self._parents[name] = name
            waiting += self._moved_with(name, types)
        for name in list(self._parents):
            for other in self._moved_with(name, types):
                self._parents[self._root(other)] = self._root(name)

    def _moved_with(self, name: str, types: Types) -> list[str]:
        """What the operator that writes `name` moves and writes, when it does nothing else: all of one scale.

        Relu behind such an operator counts, too; behind a layer it belongs to that.
        """
        draft = self._draft
        writer = draft.producer(name)
        if writer is None:
            return []
        moved = moved_inputs(draft[writer])
        if draft[writer].type == "Relu":
            before = draft.producer(draft[writer].input[0])
            follows = before is not None and moved_inputs(draft[before]) is not None
            moved = [draft[writer].input[0]] if follows else None
        return [*moved, *draft[writer].output] if moved is not None and self._are_floats(moved, types) else []

    def _are_floats(self, names: Iterable[str], types: Types) -> bool:
        """True for blobs of float32 that have one value and are no constants."""
        return all(
            self._draft.is_single(name) and self._draft.constant(name) is None
            and (kind := types.get(name)) is not None and kind.meta is FLOAT32
            for name in names
        )  # fmt: skip

    def _addends(self, types: Types) -> list[str]:
        """Of each sum that a quantized layer can take in, the other tensor, when a quantized layer makes that too."""
        found = []
        for number, definition in self._draft.operators():
            if not is_sum(definition) or len(definition.input) != 2 or not self._draft.is_free(number):
                continue
            if not self._are_floats(definition.input, types) or len(set(definition.input)) != 2:
                continue
            makers = [self._layer_behind(name) for name in definition.input]
            if makers[0] is not None and makers[1] is not None:
                # the later layer takes the sum in
                found.append(definition.input[0 if makers[0] < makers[1] else 1])
        return found

    def _layer_behind(self, name: str) -> int | None:
        """The quantized layer that makes `name` for one reader, activations looked through."""
        number = self._draft.producer(name)
        while number is not None and activation_post_op(self._draft, number) is not None:
            number = self._draft.producer(self._draft[number].input[0])
        return number if number in self._layers else None

    def _root(self, name: str) -> str:
        while self._parents[name] != name:
            name = self._parents[name]
        return name

    def names(self) -> set[str]:
        """All of them."""
        return set(self._parents)

    def by_scale(self) -> list[list[str]]:
        groups: dict[str, list[str]] = {}
        for name in self._parents:
            groups.setdefault(self._root(name), []).append(name)
        return list(groups.values())


def _quantize_weights(draft: Draft, number: int) -> None:
    """Weights through int8: a DequantizeLinear of constants before the layer."""
    definition = draft[number]
    name = definition.input[1]
    weights = draft.constant(name)
    assert weights is not None
    integers, scales = quantized_weights(weights)
    inputs = [draft.add_parameter(f"{name}/integers", integers), draft.add_parameter(f"{name}/scales", scales)]
    rounded = draft.fresh(f"{name}/dequantized")
    layer = definition.changed(inputs=[definition.input[0], rounded, *definition.input[2:]])
    draft.changed(f"{draft.label(number)}: weights in 8 bits")
    draft.replace(number, new_node(DEQUANTIZE, inputs, [rounded], axis=0), layer)


def _quantize_values(draft: Draft, names: Sequence[str], ranges: Mapping[str, ValueRange]) -> None:
    """Blobs through uint8 of one scale; whoever reads them reads what is left of them."""
    span = ranges[names[0]]
    for name in names[1:]:
        span = span.union(ranges[name])
    scale, zero = span.parameters()
    constants = (
        draft.add_parameter(f"{names[0]}/scale", np.array(scale)),
        draft.add_parameter(f"{names[0]}/zero_point", np.array(zero)),
    )
    for name in names:
        integers, rounded = draft.fresh(f"{name}/uint8"), draft.fresh(f"{name}/dequantized")
        draft.redirect(name, rounded)
        pair = (quantize(name, integers, *constants), dequantize(integers, rounded, *constants))
        writers = draft.writers(name)
        if writers:
            draft.replace(writers[0], draft[writers[0]], *pair)
        else:
            first = draft.numbers()[0]
            draft.replace(first, *pair, draft[first])
        draft.changed(f"{name!r} in 8 bits, {span.low:.4g} to {span.high:.4g}")
