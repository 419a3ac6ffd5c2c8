"""Caffe2's int8 nets for phones: their operators in terms of those that are here, before anything else sees them.

A blob of such a net is bytes with a scale and a zero point. These follow from arguments of the operator that makes it
(`Y_scale`, `Y_zero_point`), or from those of its input, so they are known before the net runs: here a blob is its bytes
alone, and each operator that computes with numbers is given scales and zero points as arguments. Images are N, height,
width, channels. What must be scaled is scaled in fixed point (`ops.families.quantized.fixed_point`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np
import numpy.typing as npt

from dagexec.core.arguments import Arguments, ArgumentValue
from dagexec.core.dtypes import FLOAT64, INT32
from dagexec.core.node import node_of
from dagexec.core.operator_def import op
from dagexec.core.proto import NetDef, OperatorDef
from dagexec.errors import ModelFormatError
from dagexec.platform.records import dataclass

Array = npt.NDArray[np.float64]

_ORDER = "NHWC"


@dataclass(frozen=True)
class _Scale:
    """How the numbers of a blob follow from its integers: (integer - zero_point) * scale."""

    scale: float
    zero_point: int


Int8Scales = dict[str, _Scale]
"""The scales of blobs, by name."""


def without_int8(init: NetDef | None, predict: NetDef) -> tuple[NetDef | None, NetDef]:
    """Both nets with other operators in place of those called Int8...; as they are, if there are none.

    Raises ModelFormatError for an operator of that family that is not here, and for a blob whose scale nothing says.
    """
    if not any(definition.type in OPERATORS for net in (init, predict) if net for definition in net.op):
        return init, predict
    scales: Int8Scales = {}
    return (None if init is None else lowered(init, scales)), lowered(predict, scales)


def lowered(net: NetDef, scales: Int8Scales) -> NetDef:
    """A net with other operators in place of those called Int8...; itself, where there are none.

    `scales` are those of blobs that nets before have made, and get those of its own blobs. Raises as `without_int8`.
    """
    if not any(definition.type in OPERATORS for definition in net.op):
        return net
    made = NetDef()
    made.CopyFrom(net)
    del made.op[:]
    for index, definition in enumerate(net.op):
        if definition.type not in OPERATORS:
            made.op.append(definition)
            continue
        one = _Int8(definition, f"{definition.type} (operator {index}) of net {net.name!r}", scales)
        for part in OPERATORS[definition.type](one):
            if definition.HasField("device_option"):
                part.device_option.CopyFrom(definition.device_option)
            made.op.append(part)
        if one.result is not None:
            scales[definition.output[0]] = one.result
    return made


class _Int8:
    """An operator of the family.

    Attributes:
        type, inputs, outputs, arguments: its own.
        label: what messages call it.
        result: the scale of its output, None for floats.
    """

    def __init__(self, definition: OperatorDef, label: str, scales: Mapping[str, _Scale]) -> None:
        self.type = definition.type
        self.inputs, self.outputs = list(definition.input), list(definition.output)
        self.arguments = Arguments(node_of(definition).values, label)
        self.result: _Scale | None = None
        self._kept = {argument.name: argument for argument in definition.arg}
        self.label = label
        self._scales = scales

    def scale(self, index: int) -> _Scale:
        """That of an input. Raises ModelFormatError when nothing says it."""
        if index >= len(self.inputs) or self.inputs[index] not in self._scales:
            raise ModelFormatError(
                f"{self.label}: input {index} must be made by an operator of the int8 family in these nets, as its "
                "scale follows from it"
            )
        return self._scales[self.inputs[index]]

    def output_scale(self) -> _Scale:
        """What the arguments say, as the scale of the output."""
        self.result = _Scale(self.arguments.float("Y_scale", 1.0), self.arguments.int("Y_zero_point", 0))
        if not 0 <= self.result.zero_point <= 255 or not self.result.scale > 0:
            raise ModelFormatError(f"{self.label}: a scale must be above 0 and a zero point of a byte: {self.result}")
        return self.result

    def y_arguments(self) -> dict[str, ArgumentValue]:
        """The zero point of the output, and the least it may be."""
        zero_point = self.output_scale().zero_point
        return {"y_zero_point": zero_point, "low": zero_point if self.type.endswith("Relu") else 0}

    def blob(self, suffix: str) -> str:
        """The name of a blob in between."""
        return f"{self.outputs[0]}/{suffix}"

    def constant(self, suffix: str, value: float, kind: str = "UInt8") -> OperatorDef:
        """A scalar, by the filler of a type."""
        return op(f"GivenTensor{kind}Fill", [], [self.blob(suffix)], shape=[1], values=[value])

    def as_it_is(self, op_type: str, **arguments: ArgumentValue | None) -> OperatorDef:
        """The same by another type, with these arguments and its own, but for those that are None."""
        made = op(op_type, self.inputs, self.outputs, arg=arguments)
        made.arg.extend(
            argument for name, argument in self._kept.items() if name not in arguments and not name.startswith("Y_")
        )
        return made


def _moved(op_type: str, **arguments: ArgumentValue) -> Callable[[_Int8], Iterator[OperatorDef]]:
    """An operator whose output has the scale of its input."""

    def rewrite(one: _Int8) -> Iterator[OperatorDef]:
        one.result = one.scale(0)
        yield one.as_it_is(op_type, **arguments)

    return rewrite


def _concat(one: _Int8) -> Iterator[OperatorDef]:
    """All must have the same scale, as in Caffe2."""
    one.result = one.scale(0)
    if any(one.scale(index) != one.result for index in range(len(one.inputs))):
        raise ModelFormatError(f"{one.label}: its inputs must have one scale and zero point")
    if len(one.outputs) == 1:
        one.outputs.append(one.blob("split"))
    yield one.as_it_is("Concat", axis=one.arguments.int("axis", 3))


def _fill(kind: str) -> Callable[[_Int8], Iterator[OperatorDef]]:
    def rewrite(one: _Int8) -> Iterator[OperatorDef]:
        one.result = _Scale(one.arguments.float("Y_scale", 1.0), one.arguments.int("Y_zero_point", 0))
        yield one.as_it_is(kind)

    return rewrite


def _quantize(one: _Int8) -> Iterator[OperatorDef]:
    what = one.output_scale()
    yield one.constant("scale", what.scale, "")
    yield one.constant("zero_point", what.zero_point)
    yield op("QuantizeLinear", [*one.inputs[:1], one.blob("scale"), one.blob("zero_point")], one.outputs)


def _dequantize(one: _Int8) -> Iterator[OperatorDef]:
    what = one.scale(0)
    yield one.constant("scale", what.scale, "")
    yield one.constant("zero_point", what.zero_point)
    yield op("DequantizeLinear", [*one.inputs, one.blob("scale"), one.blob("zero_point")], one.outputs)


def _requantized(one: _Int8, sums: str) -> OperatorDef:
    arguments = one.y_arguments()
    assert one.result is not None
    multiplier = np.float32(one.scale(0).scale) * np.float32(one.scale(1).scale) / np.float32(one.result.scale)
    bias = one.inputs[2:3]
    return op("RequantizeFixedPoint", [sums, *bias], one.outputs, multiplier=float(multiplier), arg=arguments)


def _conv(one: _Int8) -> Iterator[OperatorDef]:
    yield one.constant("x_zero_point", one.scale(0).zero_point)
    yield one.constant("w_zero_point", one.scale(1).zero_point)
    names = [*one.inputs[:2], one.blob("x_zero_point"), one.blob("w_zero_point")]
    sums = one.as_it_is("ConvInteger", order=_ORDER)
    del sums.input[:], sums.output[:]
    sums.input.extend(names)
    sums.output.append(one.blob("sums"))
    yield sums
    yield _requantized(one, one.blob("sums"))


def _conv_transpose(one: _Int8) -> Iterator[OperatorDef]:
    """Sums in float64, which are exact."""
    for index, name in enumerate("xw"):
        yield op("Cast", one.inputs[index : index + 1], [one.blob(name)], to=FLOAT64.number)
        yield one.constant(f"{name}_zero_point", one.scale(index).zero_point, "Double")
        yield op("Sub", [one.blob(name), one.blob(f"{name}_zero_point")], [one.blob(f"{name}_centered")])
    sums = one.as_it_is("ConvTranspose", order=_ORDER)
    sums.input[:] = [one.blob("x_centered"), one.blob("w_centered")]
    sums.output[:] = [one.blob("real_sums")]
    yield sums
    yield op("Cast", [one.blob("real_sums")], [one.blob("sums")], to=INT32.number)
    yield _requantized(one, one.blob("sums"))


def _roi_align(one: _Int8) -> Iterator[OperatorDef]:
    x, y = one.scale(0), one.output_scale()
    if one.arguments.string("order", _ORDER) != _ORDER:
        raise ModelFormatError(f"{one.label}: the order must be {_ORDER}")
    arguments = {"x_scale": x.scale, "x_zero_point": x.zero_point, "y_scale": y.scale, "y_zero_point": y.zero_point}
    yield one.as_it_is("RoIAlignFixedPoint", order=None, **arguments)


def _fully_connected(one: _Int8) -> Iterator[OperatorDef]:
    yield one.constant("x_zero_point", one.scale(0).zero_point)
    yield one.constant("w_zero_point", one.scale(1).zero_point)
    yield op("Flatten", one.inputs[:1], [one.blob("rows")], axis=one.arguments.int("axis", 1))
    yield op("Transpose", one.inputs[1:2], [one.blob("columns")], axes=[1, 0])
    names = ["rows", "columns", "x_zero_point", "w_zero_point"]
    yield op("MatMulInteger", [one.blob(name) for name in names], [one.blob("sums")])
    yield _requantized(one, one.blob("sums"))


def _add(one: _Int8) -> Iterator[OperatorDef]:
    arguments = one.y_arguments()
    assert one.result is not None
    for name, what in (("a", one.scale(0)), ("b", one.scale(1))):
        arguments |= {f"{name}_scale": what.scale, f"{name}_zero_point": what.zero_point}
    yield op("AddFixedPoint", one.inputs[:2], one.outputs, y_scale=one.result.scale, arg=arguments)


def _average_pool(one: _Int8) -> Iterator[OperatorDef]:
    arguments, x = one.y_arguments(), one.scale(0)
    assert one.result is not None
    arguments |= {"y_scale": one.result.scale, "x_scale": x.scale, "x_zero_point": x.zero_point}
    yield one.as_it_is("AveragePoolFixedPoint", order=_ORDER, **arguments)


def _softmax(one: _Int8) -> Iterator[OperatorDef]:
    what = one.output_scale()
    if (what.scale, what.zero_point) != (1 / 256, 0):
        raise ModelFormatError(f"{one.label}: Y must have the scale 1/256 and the zero point 0")
    axis = one.arguments.int("axis", 1)
    yield op("SoftmaxOfBytes", one.inputs, one.outputs, x_scale=one.scale(0).scale, axis=axis)


def _table(function: Callable[[_Int8, Array], Array]) -> Callable[[_Int8], Iterator[OperatorDef]]:
    """An operator of one byte each, by a table of all 256 results, rounded to the nearest integer, ties to even."""

    def rewrite(one: _Int8) -> Iterator[OperatorDef]:
        x, y = one.scale(0), one.output_scale()
        numbers = (np.arange(256) - x.zero_point) * np.float64(x.scale)
        results = np.clip(np.rint(function(one, numbers) / y.scale) + y.zero_point, 0, 255)
        values = [int(value) for value in results]
        yield op("GivenTensorUInt8Fill", [], [one.blob("table")], shape=[256], values=values)
        yield op("Cast", one.inputs, [one.blob("places")], to=INT32.number)
        yield op("Gather", [one.blob("table"), one.blob("places")], one.outputs)

    return rewrite


def _relu(one: _Int8) -> Iterator[OperatorDef]:
    """Not below the zero point."""
    one.result = one.scale(0)
    yield one.constant("zero_point", one.result.zero_point)
    yield op("Max", [*one.inputs, one.blob("zero_point")], one.outputs)


OPERATORS: Mapping[str, Callable[[_Int8], Iterator[OperatorDef]]] = {
    "Int8Add": _add,
    "Int8AddRelu": _add,
    "Int8AveragePool": _average_pool,
    "Int8AveragePoolRelu": _average_pool,
    "Int8ChannelShuffle": _moved("ChannelShuffle", order=_ORDER),
    "Int8Concat": _concat,
    "Int8Conv": _conv,
    "Int8ConvRelu": _conv,
    "Int8ConvTranspose": _conv_transpose,
    "Int8Dequantize": _dequantize,
    "Int8FC": _fully_connected,
    "Int8Flatten": _moved("Flatten"),
    "Int8GivenIntTensorFill": _fill("GivenTensorIntFill"),
    "Int8GivenTensorFill": _fill("GivenTensorByteStringToUInt8Fill"),
    "Int8LeakyRelu": _table(lambda one, x: np.where(x < 0, x * one.arguments.float("alpha", 0.01), x)),
    "Int8MaxPool": _moved("MaxPool", order=_ORDER),
    "Int8Quantize": _quantize,
    "Int8Relu": _relu,
    "Int8Reshape": _moved("Reshape"),
    "Int8ResizeNearest": _moved("ResizeNearest", order=_ORDER),
    "Int8RoIAlign": _roi_align,
    "Int8Sigmoid": _table(lambda _one, x: 1 / (1 + np.exp(-x))),
    "Int8Slice": _moved("Slice"),
    "Int8Softmax": _softmax,
    "Int8Sum": _add,
    "Int8SumRelu": _add,
    "Int8Transpose": _moved("Transpose"),
}
"""What each operator of the family is made into."""
