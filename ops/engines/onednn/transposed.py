"""Transposed convolutions by oneDNN, which calls them deconvolutions, and their gradients.

The gradients are those of the convolution that is transposed, with its input and output exchanged: the gradient of the
input is that convolution of dY.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain

from dagexec.core.dtypes import FLOAT32
from dagexec.core.operator import Step, in_sequence
from dagexec.core.registry import operator, schema_of
from dagexec.errors import UnsupportedFeatureError
from dagexec.ops.base.geometry import Axis
from dagexec.ops.base.layout import NCHW, NHWC, channel_count
from dagexec.ops.engines.onednn import lattices
from dagexec.ops.engines.onednn.convolution_computation import (
    CONVOLUTION,
    Composed,
    Computation,
    geometry,
    grouped,
    require_window,
)
from dagexec.ops.engines.onednn.convolution_family import ConvolutionFamily
from dagexec.ops.engines.onednn.descriptors import BIAS, DST, FORWARD_INFERENCE, SRC, WEIGHTS, Array, Descriptor
from dagexec.ops.engines.onednn.gradient import GradientFamily
from dagexec.ops.engines.onednn.pieces import Part
from dagexec.ops.engines.onednn.problem import DIRECT
from dagexec.ops.engines.onednn.transposed_product import Layer, candidates, is_side_by_side
from dagexec.ops.families.conv.convolution import SPATIAL_AXES
from dagexec.ops.families.conv.gradient_outputs import BIAS as BIAS_GRADIENT
from dagexec.ops.families.conv.gradient_outputs import FILTER, INPUT, wanted_gradients
from dagexec.ops.families.conv.transposed import TransposedConvolution, TransposedConvolutionGradient, transposed_window

_DECONVOLUTION_DIRECT = 0xA


class DeconvolutionOperator(ConvolutionFamily, TransposedConvolution):
    """Y = the transposed convolution of X, + bias."""

    def prepare_primitive(self) -> Step:
        call = self.call()
        window, axes = transposed_window(call)
        require_window(axes, self.label)
        self.require_wide_sums()
        if not (self.x(0).size and self.x(1).size):
            raise UnsupportedFeatureError(f"{self.label}: there is nothing to sum")
        x, y, order = self.x(0), self.y(0), window.order
        filters = grouped(self.x(1), call.arguments.int("group", 1), window.channels_last)
        parameters = {WEIGHTS: filters.swapaxes(-len(axes) - 2, -len(axes) - 1)}
        inputs = {SRC: 0, WEIGHTS: 1}
        if len(call.inputs) == 3:
            parameters[BIAS], inputs[BIAS] = self.x(2), 2
        none, attributes = self.onednn.ffi.NULL, self.attributes()

        def request(_algorithm: str, layouts: Mapping[int, Descriptor]) -> Sequence[object]:
            tensors = (layouts[SRC], layouts[WEIGHTS], layouts.get(BIAS, none), layouts[DST])
            return [FORWARD_INFERENCE, _DECONVOLUTION_DIRECT, *tensors, *geometry(axes), attributes]

        def computation(part: Part) -> Computation:
            result = part.result(y)
            images = {SRC: (part.source(x, axes), order), DST: (result, order)}
            asked = ("deconvolution_forward", request, axes, images, parameters, inputs, DST)
            return Computation(*asked, algorithms=(DIRECT,), composed=self._composed(axes, order, result.shape))

        assembled = self.convolution(computation)
        return self.offered(in_sequence(assembled.steps), assembled, inputs, {DST: 0})

    def _composed(self, axes: Sequence[Axis], order: str, shape: tuple[int, ...]) -> Composed | None:
        """The candidates of `lattices` and `transposed_product` for a result of `shape`; None where there are none."""
        found = [self._by_lattices(axes, order, shape), self._side_by_side(axes, order, shape)]
        offered = [one for one in found if one is not None]
        return (lambda: chain.from_iterable(one() for one in offered)) if offered else None

    def _by_lattices(self, axes: Sequence[Axis], order: str, shape: tuple[int, ...]) -> Composed | None:
        """Those of `lattices`, likewise."""
        if order not in (NCHW, NHWC) or self.input(0).meta is not FLOAT32:
            return None
        sizes = shape[0], channel_count(order, self.x(0).shape), channel_count(order, shape)
        groups, has_bias = self.arguments.int("group", 1), len(self.call().inputs) == 3
        layer = lattices.transposed_layer(axes, sizes, groups, order, has_bias)
        return partial(lattices.candidates, self.onednn, layer)

    def _side_by_side(self, axes: Sequence[Axis], order: str, shape: tuple[int, ...]) -> Composed | None:
        """Those of `transposed_product`, likewise."""
        has_bias = len(self.call().inputs) == 3
        parameters = (1, 2) if has_bias else (1,)
        constant = all(self.is_constant(number) for number in parameters)
        if not constant or order != NHWC or self.input(0).meta is not FLOAT32 or not is_side_by_side(axes):
            return None
        if self.call().arguments.int("group", 1) > 1:
            return None
        (height, width), (rows, columns) = (axis.out for axis in axes), (axis.kernel for axis in axes)
        layer = Layer(shape[0], height, width, self.x(0).shape[-1], shape[-1], rows, columns, has_bias)
        return partial(candidates, self.onednn, layer)


class OnednnTransposedConvolutionGradient(GradientFamily, TransposedConvolutionGradient):
    """The gradients of a transposed convolution: of the convolution whose input is dY and whose output is X."""

    def prepare_primitive(self) -> Step:
        """A primitive for the input, one for the filter, and a sum for the bias."""
        call = self.call()
        window, axes = transposed_window(call)
        self.require_work(axes)
        group, order = call.arguments.int("group", 1), window.order
        steps: list[Step] = []
        for index, name in enumerate(wanted_gradients(call)):
            result = self.y(index)
            if name == FILTER:
                steps.append(self.filter_gradient(axes, group, order, (2, self.x(2)), (0, self.x(0)), result))
            elif name == INPUT:
                steps.append(self._input_gradient(axes, group, order, result))
            elif name == BIAS_GRADIENT:
                steps.append(self.bias_gradient(order, self.x(2), result))
        return in_sequence(steps)

    def _input_gradient(self, axes: Sequence[Axis], group: int, order: str, result: Array) -> Step:
        """The convolution of dY."""
        weights = grouped(self.x(1), group, order == NHWC)
        none, attributes = self.onednn.ffi.NULL, self.attributes()

        def request(algorithm: str, layouts: Mapping[int, Descriptor]) -> Sequence[object]:
            tensors = (layouts[SRC], layouts[WEIGHTS], none, layouts[DST])
            return [FORWARD_INFERENCE, CONVOLUTION[algorithm], *tensors, *geometry(axes), attributes]

        x = self.x(2)

        def computation(part: Part) -> Computation:
            images = {SRC: (part.source(x, axes), order), DST: (part.result(result), order)}
            inputs = {SRC: 2, WEIGHTS: 1}
            return Computation("convolution_forward", request, axes, images, {WEIGHTS: weights}, inputs, DST)

        return in_sequence(self.convolution(computation).steps)


for _suffix in SPATIAL_AXES:
    for _gradient, _class in (("", DeconvolutionOperator), ("Gradient", OnednnTransposedConvolutionGradient)):
        _name = f"ConvTranspose{_suffix}{_gradient}"
        operator(schema_of(_name), engine="ONEDNN")(type(f"{_name}Onednn", (_class,), {"__doc__": _class.__doc__}))
