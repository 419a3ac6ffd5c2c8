"""quantized-operators: what lies between DequantizeLinear and QuantizeLinear is computed on the integers themselves.

A model with these two around its operators says in which precision each value is (the QDQ form of ONNX). Here

- the quantization of a concatenation is one of each tensor that is concatenated;
- operators that only move elements, maxima, and Relu are done on integers, and the dequantization comes after them;
- a quantization that undoes a dequantization goes away;
- a convolution or product with a quantized input and quantized weights becomes QuantConv or QuantFC, with the
  activation, the sum and the quantization that follow it; a sum of two quantized tensors becomes QuantAdd.

Integers move and compare as the numbers they stand for; a fused operator rounds once where the model rounds twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

import numpy as np

from dagexec.compiler.passes.draft import Array, Draft
from dagexec.compiler.passes.linear_quantization import (
    DEQUANTIZE,
    QUANTIZE,
    Linear,
    Weights,
    dequantized,
    dequantized_weights,
    linear_of,
)
from dagexec.compiler.passes.operator_traits import moved_inputs, of_type
from dagexec.compiler.passes.post_operations import is_sum, unary_links
from dagexec.compiler.passes.rewriting import Pass
from dagexec.compiler.passes.types import BlobType
from dagexec.core.arguments import NOTHING, ArgumentValue, Values
from dagexec.core.dtypes import FLOAT32
from dagexec.core.node import Node, new_node
from dagexec.core.registry import schema_of
from dagexec.core.traits import LayerKind
from dagexec.ops.families.activation.post_ops import as_post_ops
from dagexec.ops.families.conv.convolution import COMPUTE_ARGS
from dagexec.platform.records import dataclass

_ON_INTEGERS = ("relu", "leaky_relu", "clip")  # post-ops

Types = Mapping[str, BlobType]


def edit(draft: Draft) -> None:
    """Bring integers as far as they reach, then fuse."""
    types = draft.types()
    for number, definition in draft.operators():
        if not draft.is_free(number):
            continue
        _skip_copy(draft, number)
        if number in draft and schema_of(definition.type).joined is not None:
            _quantize_parts(draft, number)
        if number not in draft:
            continue
        if definition.type == QUANTIZE:
            _cancel(draft, number)
        elif moved_inputs(definition):
            _move_integers(draft, number)
        elif definition.type == "Relu":
            _cut_integers(draft, number)
    for number, definition in draft.operators():
        if number not in draft or not draft.is_free(number):
            continue
        if schema_of(definition.type).layer is LayerKind.CONVOLUTION:
            _fuse_convolution(draft, number, types)
        elif schema_of(definition.type).has_weights:
            _fuse_product(draft, number, types)
    for number, definition in draft.operators():
        if number in draft and draft.is_free(number) and is_sum(definition):
            _fuse_sum(draft, number, types)
    _drop_unread(draft)


def _cancel(draft: Draft, number: int) -> None:
    """A quantization of what was dequantized with the same scale gives the integers that were there."""
    definition = draft[number]
    before, here = dequantized(draft, definition.input[0]), linear_of(draft, number, QUANTIZE)
    if before is None or before[1] != here or not draft.is_inner(definition.output[0]):
        return
    draft.redirect(definition.output[0], before[0])
    draft.changed(f"{draft.label(number)}: the integers are there already")
    draft.remove(number)


def _skip_copy(draft: Draft, number: int) -> None:
    """Readers of a copy of dequantized values read these; exporters write equal biases once, and copy them."""
    definition = draft[number]
    if as_post_ops(definition) != () or len(definition.output) > 1:
        return
    writer, [name] = draft.producer(definition.input[0]), definition.output
    if writer is not None and draft[writer].type == DEQUANTIZE and name not in draft.outputs:
        draft.redirect(name, definition.input[0])
        draft.changed(f"{draft.label(number)}: its input is read")
        draft.remove(number)


def _quantize_parts(draft: Draft, number: int) -> None:
    """What is joined from dequantized tensors and then quantized is joined from quantized ones."""
    definition = draft[number]
    reader = draft.only_reader(definition.output[0])
    result = linear_of(draft, reader, QUANTIZE)
    sources = [dequantized(draft, name) for name in definition.input]
    known = [source for source in sources if source is not None]
    if reader is None or result is None or len(known) != len(sources) or len(definition.output) > 1:
        return
    [target], constants = draft[reader].output, draft[reader].input[1:]
    before: list[Node] = []
    inputs: list[str] = []
    for name, (integers, linear) in zip(definition.input, known, strict=True):
        if linear != result:
            integers = draft.fresh(f"{name}/as_{target}")
            before.append(new_node(QUANTIZE, [name, *constants], [integers]))
        inputs.append(integers)
    draft.changed(f"{draft.label(number)}: its inputs are quantized")
    draft.remove(number)
    joined = Node(definition.type, inputs, [target], definition.values, name=definition.name)
    draft.replace(reader, *before, joined)


def _move_integers(draft: Draft, number: int) -> None:
    """The operator on integers, with the dequantization after it."""
    definition = draft[number]
    moved = moved_inputs(definition) or []
    sources = [dequantized(draft, name) for name in moved]
    known = [source for source in sources if source is not None]
    if len(known) != len(sources) or len({linear for _, linear in known}) != 1:
        return
    writer = draft.producer(moved[0])
    assert writer is not None
    constants = list(draft[writer].input[1:])
    inputs = [*(name for name, _ in known), *definition.input[len(known) :]]
    results = [draft.fresh(f"{name}/integers") for name in definition.output]
    after = [
        new_node(DEQUANTIZE, [integers, *constants], [name])
        for integers, name in zip(results, definition.output, strict=True)
    ]
    label = draft.label(number)
    draft.replace(number, definition.changed(inputs=inputs, outputs=results), *after)
    draft.changed(f"{label}: on integers")


def _cut_integers(draft: Draft, number: int) -> None:
    """Relu of integers: none is less than the zero point."""
    definition = draft[number]
    source = dequantized(draft, definition.input[0])
    writer = draft.producer(definition.input[0])
    if source is None or writer is None:
        return
    integers, linear = source
    name = definition.output[0]
    label, cut = draft.label(number), draft.fresh(f"{name}/integers")
    after = new_node(DEQUANTIZE, [cut, *draft[writer].input[1:]], [name])
    draft.replace(number, new_node("Clip", [integers], [cut], name=definition.name, min=linear.zero_point), after)
    draft.changed(f"{label}: on integers")


@dataclass
class _Chain:
    """A product on integers and what follows it, as far as one operator computes it.

    Attributes:
        numbers: of the operators that go into it; the last one's place is that of the result.
        output: the blob it has written so far.
        post_ops: entries of the argument, with `{addend}` for the number of the addend.
        addend, addend_linear: the blob that is added, and its scale when it has integers.
        result: the scale of the output, when that is quantized.
    """

    numbers: list[int]
    output: str
    post_ops: list[str] = field(default_factory=list)
    addend: str | None = None
    addend_linear: Linear | None = None
    result: Linear | None = None

    def arguments(self, first_extra: int) -> dict[str, ArgumentValue]:
        """Those of Quant operators for what is in the chain."""
        found: dict[str, ArgumentValue] = {}
        if self.post_ops:
            found["post_ops"] = [text.format(addend=first_extra) for text in self.post_ops]
        if self.addend_linear is not None:
            found |= {
                "add_scale": float(self.addend_linear.scale),
                "add_zero_point": self.addend_linear.zero_point,
            }
        if self.result is not None:
            found |= {
                "to": self.result.meta.name,
                "y_scale": float(self.result.scale),
                "y_zero_point": self.result.zero_point,
            }
        return found


def _extend(draft: Draft, chain: _Chain, types: Types) -> None:
    """Take in what follows `chain`, up to a quantization."""
    while chain.result is None:
        reader = draft.only_reader(chain.output)
        if reader is None:
            return
        activation = activation_post_op(draft, reader)
        quantization = linear_of(draft, reader, QUANTIZE)
        if activation is not None:
            chain.post_ops.append(activation)
        elif quantization is not None and quantization.is_bytes:
            chain.result = quantization
        elif not _take_addend(draft, chain, reader, types):
            return
        chain.numbers.append(reader)
        chain.output = draft[reader].output[0]


def activation_post_op(draft: Draft, number: int) -> str | None:
    """An activation as a post-op for integers; None when it is not one."""
    post_ops = [link.post_op for link in unary_links(draft[number], FLOAT32)]
    return str(post_ops[0]) if len(post_ops) == 1 and post_ops[0].kind in _ON_INTEGERS else None


def _take_addend(draft: Draft, chain: _Chain, number: int, types: Types) -> bool:
    """Take in a sum with another tensor of the same shape."""
    definition = draft[number]
    if not is_sum(definition) or len(definition.input) != 2 or chain.addend is not None:
        return False
    [other] = [name for name in definition.input if name != chain.output]
    if draft.constant(other) is not None or not _same_types(types, other, chain.output):
        return False
    source = dequantized(draft, other)
    if source is not None and source[1].is_bytes:
        chain.addend, chain.addend_linear = source
    else:
        chain.addend = other
    chain.post_ops.append("add:{addend}")
    return True


def _same_types(types: Types, *names: str) -> bool:
    found = [types.get(name) for name in names]
    return found[0] is not None and found[0].meta is FLOAT32 and all(kind == found[0] for kind in found)


def _input_and_weights(draft: Draft, number: int) -> tuple[str, Linear, Weights] | None:
    definition = draft[number]
    source, weights = dequantized(draft, definition.input[0]), dequantized_weights(draft, definition.input[1])
    if source is None or weights is None or not source[1].is_bytes:
        return None
    return (*source, weights)


def _bias(draft: Draft, name: str, x: Linear, scales: Array, units: int) -> Array | None:
    """A constant bias in units of the sums, as int32; None when it is not constant or not one entry a unit."""
    unit = (np.float64(x.scale) * scales.astype(np.float64)).reshape(-1)
    number = draft.producer(name)
    if number is not None and draft[number].type == DEQUANTIZE:
        integers, given = (draft.constant(draft[number].input[index]) for index in (0, 1))
        if integers is None or given is None or integers.shape != (units,) or len(draft[number].input) > 2:
            values = None if integers is None or given is None else _without_zero_point(draft, number)
            return None if values is None or values.shape != (units,) else _rounded(values, unit)
        if integers.dtype == np.int32 and np.allclose(given.reshape(-1), unit, rtol=1e-5, atol=0):
            return integers
        return _rounded(integers * given.astype(np.float64).reshape(-1), unit)
    values = draft.constant(name)
    return None if values is None or values.size != units else _rounded(values.astype(np.float64).reshape(-1), unit)


def _without_zero_point(draft: Draft, number: int) -> Array | None:
    found = [draft.constant(name) for name in draft[number].input]
    integers, scale, zero = found
    if integers is None or scale is None or zero is None or zero.size not in (1, integers.size):
        return None
    return (integers.astype(np.float64) - zero.astype(np.float64).reshape(-1)) * scale.astype(np.float64).reshape(-1)


def _rounded(values: Array, unit: Array) -> Array | None:
    """`values` in whole units; None when they do not fit 32 bits."""
    integers = np.rint(values / unit)
    fits = np.isfinite(integers).all() and np.abs(integers).max(initial=0) < 2**31
    return integers.astype(np.int32) if fits else None


def _put(
    draft: Draft,
    chain: _Chain,
    op_type: str,
    inputs: list[str],
    arguments: dict[str, ArgumentValue],
    kept: Values = NOTHING,
) -> None:
    """The fused operator in the place of the chain's last one; it keeps these arguments of the first."""
    first = draft.label(chain.numbers[0])
    arguments |= chain.arguments(len(inputs))
    if chain.addend is not None:
        inputs = [*inputs, chain.addend]
    name = draft[chain.numbers[0]].name
    *before, last = chain.numbers
    for number in before:
        draft.remove(number)
    definition = Node(op_type, inputs, [chain.output], kept, name=name)
    draft.replace(last, definition.changed(arguments=arguments))
    fused = f" with {len(before)} new_node(s) after it" if before else ""
    draft.changed(f"{first}: {op_type}{fused}")


def _fuse_convolution(draft: Draft, number: int, types: Types) -> None:
    found = _input_and_weights(draft, number)
    if found is None:
        return
    definition = draft[number]
    x, linear, weights = found
    filters = len(weights.integers)
    if weights.scales.size > 1 and weights.axis != 0:
        return
    bias = None
    if len(definition.input) > 2:
        bias = _bias(draft, definition.input[2], linear, weights.scales, filters)
        if bias is None:
            return
    chain = _Chain([number], definition.output[0])
    _extend(draft, chain, types)
    kept = definition.values.changed(dict.fromkeys(COMPUTE_ARGS))
    inputs = [x, *_constants(draft, definition.input[1], weights.integers, weights.scales)]
    arguments: dict[str, ArgumentValue] = {"x_scale": float(linear.scale), "x_zero_point": linear.zero_point}
    if bias is not None:
        inputs.append(draft.add_parameter(f"{definition.output[0]}/bias", bias))
        arguments["bias"] = 1
    _put(draft, chain, "QuantConv", inputs, arguments, kept)


def _constants(draft: Draft, name: str, integers: Array, scales: Array) -> list[str]:
    """Parameters for weights and their scales."""
    return [draft.add_parameter(f"{name}/int8", integers), draft.add_parameter(f"{name}/scale", scales)]


def _fuse_product(draft: Draft, number: int, types: Types) -> None:
    found = _input_and_weights(draft, number)
    if found is None:
        return
    definition = draft[number]
    x, linear, weights = found
    rows = _rows_are_units(draft, number)
    kind = types.get(definition.input[0])
    if rows is None or weights.integers.ndim != 2 or kind is None:
        return
    unit_axis = 0 if rows else 1
    if weights.scales.size > 1 and weights.axis != unit_axis:
        return
    integers = np.ascontiguousarray(weights.integers if rows else weights.integers.T)
    units = len(integers)
    axis = draft.arguments(number).int("axis", 1)
    if definition.type == "BatchMatMul":
        axis = kind.rank - 1
    bias = None
    if len(definition.input) > 2 and definition.type != "MatMul":  # whose third input is a shape
        bias = _bias(draft, definition.input[2], linear, weights.scales, units)
        if bias is None:
            return
    chain = _Chain([number], definition.output[0])
    if bias is None:
        bias = _bias_after(draft, chain, linear, weights.scales, units)
    _extend(draft, chain, types)
    inputs = [x, *_constants(draft, definition.input[1], integers, weights.scales)]
    arguments: dict[str, ArgumentValue] = {"x_scale": float(linear.scale), "x_zero_point": linear.zero_point}
    arguments["axis"] = axis
    if bias is not None:
        inputs.append(draft.add_parameter(f"{definition.output[0]}/bias", bias))
        arguments["bias"] = 1
    _put(draft, chain, "QuantFC", inputs, arguments)


def _rows_are_units(draft: Draft, number: int) -> bool | None:
    """Whether the rows of a product's matrix, or its columns, are the units; None for what is no such product."""
    definition, arguments = draft[number], draft.arguments(number)
    if definition.type == "FC":
        return True if arguments.int("axis_w", 1) == 1 else None
    if arguments.int("trans_a", 0):
        return None
    turned = bool(arguments.int("trans_b", 0))
    if definition.type == "Gemm":
        plain = arguments.float("alpha", 1.0) == 1 and arguments.float("beta", 1.0) == 1
    elif definition.type == "MatMul":
        plain = len(definition.input) == 2 and arguments.int("axis_a", 1) == 1 and arguments.int("axis_b", 1) == 1
    else:
        plain = definition.type == "BatchMatMul" and bool(arguments.int("broadcast", 0))
    return turned if plain else None


def _bias_after(draft: Draft, chain: _Chain, x: Linear, scales: Array, units: int) -> Array | None:
    """The constant row that is added to each row of a product next; it is taken into the chain."""
    reader = draft.only_reader(chain.output)
    if reader is None or draft[reader].type != "Add" or draft.arguments(reader).int("broadcast", 0):
        return None
    others = [name for name in draft[reader].input if name != chain.output]
    if len(others) != 1:
        return None
    values = draft.constant(others[0])
    if values is not None and values.shape != (units,):
        return None
    bias = _bias(draft, others[0], x, scales, units)
    if bias is not None:
        chain.numbers.append(reader)
        chain.output = draft[reader].output[0]
    return bias


def _fuse_sum(draft: Draft, number: int, types: Types) -> None:
    """A sum of two quantized tensors of one shape that is quantized again."""
    definition = draft[number]
    if len(definition.input) != 2 or not _same_types(types, *definition.input, definition.output[0]):
        return
    first, second = (dequantized(draft, name) for name in definition.input)
    if first is None or second is None or not (first[1].is_bytes and second[1].is_bytes):
        return
    chain = _Chain([number], definition.output[0], ["add:{addend}"], *second)
    _extend(draft, chain, types)
    if chain.result is None:
        return
    x, linear = first
    _put(draft, chain, "QuantAdd", [x], {"x_scale": float(linear.scale), "x_zero_point": linear.zero_point})


def _drop_unread(draft: Draft) -> None:
    """Quantizations and dequantizations whose result nothing reads any more."""
    for number in reversed(draft.numbers()):
        definition = draft[number]
        if definition.type in (QUANTIZE, DEQUANTIZE) and draft.is_free(number):
            [name] = definition.output
            if not draft.readers(name) and name not in draft.outputs:
                draft.remove(number)


PASS = Pass(
    "quantized-operators",
    "operators between DequantizeLinear and QuantizeLinear compute on 8-bit integers",
    edit,
    needs=(of_type(QUANTIZE, DEQUANTIZE),),
    retypes=True,
)
"""For models that say themselves what is quantized, and after `precision`."""
