"""The gradients of convolutions by oneDNN: backward data for the input, backward weights for the filter.

The gradient of the bias comes with that of the filter, or is a sum by NumPy where that is not wanted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from dagexec.core.operator import Step, in_sequence
from dagexec.core.registry import operator, schema_of
from dagexec.errors import UnsupportedFeatureError
from dagexec.ops.base.geometry import Axis
from dagexec.ops.base.layout import BLOCKS, NHWC
from dagexec.ops.engines.onednn.convolution_computation import (
    CONVOLUTION,
    Computation,
    geometry,
    grouped,
    require_window,
)
from dagexec.ops.engines.onednn.convolution_family import ConvolutionFamily
from dagexec.ops.engines.onednn.descriptors import (
    DIFF_BIAS,
    DIFF_DST,
    DIFF_SRC,
    DIFF_WEIGHTS,
    SRC,
    WEIGHTS,
    Array,
    Descriptor,
)
from dagexec.ops.engines.onednn.pieces import Part
from dagexec.ops.families.conv.convolution import SPATIAL_AXES, conv_window
from dagexec.ops.families.conv.gradient import ConvolutionGradient, bias_gradient
from dagexec.ops.families.conv.gradient_outputs import BIAS as BIAS_GRADIENT
from dagexec.ops.families.conv.gradient_outputs import FILTER, INPUT, wanted_gradients


class GradientFamily(ConvolutionFamily):
    """What the gradients of convolutions and of transposed convolutions share."""

    def data_gradient(self, axes: Sequence[Axis], group: int, order: str, gradient: Array, result: Array) -> Step:
        """The step that computes `result`, the gradient of a convolution's input, from that of its output, input 2."""
        weights = grouped(self.x(1), group, order == NHWC)
        none, attributes = self.onednn.ffi.NULL, self.attributes()

        def request(algorithm: str, layouts: Mapping[int, Descriptor]) -> Sequence[object]:
            tensors = (layouts[DIFF_SRC], layouts[WEIGHTS], layouts[DIFF_DST])
            return [CONVOLUTION[algorithm], *tensors, *geometry(axes), none, attributes]

        def computation(part: Part) -> Computation:
            images = {DIFF_DST: (part.result(gradient), order), DIFF_SRC: (part.source(result, axes), order)}
            inputs = {DIFF_DST: 2, WEIGHTS: 1}
            return Computation("convolution_backward_data", request, axes, images, {WEIGHTS: weights}, inputs, DIFF_SRC)

        return in_sequence(self.convolution(computation).steps)

    def filter_gradient(
        self,
        axes: Sequence[Axis],
        group: int,
        order: str,
        x: tuple[int, Array],
        gradient: tuple[int, Array],
        result: Array,
        bias: Array | None = None,
    ) -> Step:
        """The step that computes `result`, the gradient of a convolution's filter, and of its bias if there is one.

        `x` and `gradient` are the convolution's input and the gradient of its output, with their input numbers.
        """
        none, attributes = self.onednn.ffi.NULL, self.attributes()
        results = {DIFF_WEIGHTS: result} | ({} if bias is None else {DIFF_BIAS: bias})

        def request(algorithm: str, layouts: Mapping[int, Descriptor]) -> Sequence[object]:
            sums = none if bias is None else layouts[DIFF_BIAS]
            tensors = (layouts[SRC], layouts[DIFF_WEIGHTS], sums, layouts[DIFF_DST])
            return [CONVOLUTION[algorithm], *tensors, *geometry(axes), none, attributes]

        def computation(part: Part, sums: Mapping[int, Array]) -> Computation:
            images = {SRC: (part.source(x[1], axes), order), DIFF_DST: (part.result(gradient[1]), order)}
            parameters = {**sums, DIFF_WEIGHTS: grouped(sums[DIFF_WEIGHTS], group, order == NHWC)}
            inputs = {SRC: x[0], DIFF_DST: gradient[0]}
            return Computation("convolution_backward_weights", request, axes, images, parameters, inputs, DIFF_WEIGHTS)

        return in_sequence(self.filter_sums(computation, len(x[1]), results))

    def bias_gradient(self, order: str, gradient: Array, result: Array) -> Step:
        """The step that sums a gradient over images and pixels."""
        if order not in BLOCKS:
            return bias_gradient(self, gradient, result, order == NHWC)  # type: ignore[arg-type]
        blocks = gradient.reshape(*gradient.shape[:2], -1, BLOCKS[order])
        wide = self.scratch((gradient.shape[1], BLOCKS[order]), np.float32)
        total = partial(np.add.reduce, blocks, axis=(0, 2), dtype=np.float32, out=wide)
        return in_sequence([total, partial(np.copyto, result, wide.reshape(result.shape), casting="same_kind")])

    def require_work(self, axes: Sequence[Axis]) -> None:
        """Raise UnsupportedFeatureError for what oneDNN does not compute: an empty tensor, or a window."""
        require_window(axes, self.label)
        self.require_wide_sums()
        if any(not self.x(index).size for index in range(3)):
            raise UnsupportedFeatureError(f"{self.label}: there is nothing to sum")


class OnednnConvolutionGradient(GradientFamily, ConvolutionGradient):
    """The gradients of a convolution."""

    def prepare_primitive(self) -> Step:
        """A primitive for the input, and one for filter and bias."""
        call = self.call()
        window, axes = conv_window(call)
        self.require_work(axes)
        wanted, group = wanted_gradients(call), call.arguments.int("group", 1)
        results = {name: self.y(index) for index, name in enumerate(wanted)}
        steps: list[Step] = []
        if FILTER in results:
            images = (0, self.x(0)), (2, self.x(2))
            bias = results.get(BIAS_GRADIENT)
            steps.append(self.filter_gradient(axes, group, window.order, *images, results[FILTER], bias))
        elif BIAS_GRADIENT in results:
            steps.append(self.bias_gradient(window.order, self.x(2), results[BIAS_GRADIENT]))
        if INPUT in results:
            steps.append(self.data_gradient(axes, group, window.order, self.x(2), results[INPUT]))
        return in_sequence(steps)


for _suffix in SPATIAL_AXES:
    operator(schema_of(f"Conv{_suffix}Gradient"), engine="ONEDNN")(
        type(f"Conv{_suffix}GradientOnednn", (OnednnConvolutionGradient,), {"__doc__": "The gradients of Conv."})
    )
