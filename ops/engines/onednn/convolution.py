"""Convolutions by oneDNN: Conv and FusedConv, in all orders, with post-ops in the primitive."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain

import numpy as np

from dagexec.core.dtypes import FLOAT32
from dagexec.core.operator import Prepared, Step, in_sequence
from dagexec.core.registry import operator, schema_of
from dagexec.core.schema import OperatorCall
from dagexec.errors import UnsupportedFeatureError
from dagexec.ops.base.geometry import Axis
from dagexec.ops.base.layout import BLOCKS, NCHW, NHWC, channel_count, image_order
from dagexec.ops.engines.onednn import direct, edges, lattices, pointwise, windows
from dagexec.ops.engines.onednn.accuracy import require_accurate
from dagexec.ops.engines.onednn.convolution_computation import (
    CONVOLUTION,
    Composed,
    Computation,
    all_of,
    geometry,
    grouped,
    padding_of,
    require_window,
)
from dagexec.ops.engines.onednn.convolution_family import ConvolutionFamily
from dagexec.ops.engines.onednn.descriptors import (
    BIAS,
    DST,
    FORWARD_INFERENCE,
    FORWARD_TRAINING,
    POST_OP,
    SRC,
    SRC_1,
    WEIGHTS,
    Array,
    Descriptor,
)
from dagexec.ops.engines.onednn.division import MISREAD
from dagexec.ops.engines.onednn.finishing import finishing_step
from dagexec.ops.engines.onednn.keeping_nan import is_seen, keeping_nan_in_place
from dagexec.ops.engines.onednn.pieces import Part
from dagexec.ops.engines.onednn.post_ops import append_post_ops, drops_nan
from dagexec.ops.engines.onednn.problem import DIRECT, WINOGRAD
from dagexec.ops.engines.onednn.winograd import candidates, finish
from dagexec.ops.engines.onednn.winograd_tiling import TAPS, Layer
from dagexec.ops.families.activation.post_ops import SUM, PostOp, read_post_ops
from dagexec.ops.families.conv.convolution import SPATIAL_AXES, Convolution, conv_window
from dagexec.ops.families.conv.fused import FUSED_CONV, FusedConvolution, first_operand, output_order
from dagexec.ops.kernels.copies import copy_step
from dagexec.ops.kernels.winograd_kernels import LANES


class ForwardConvolution(ConvolutionFamily):
    """Y = post_ops(X * filter + bias)."""

    def prepare_primitive(self) -> Step:
        """The primitive, and copies around it where the implementation has a layout of its own."""
        call = self.call()
        window, axes = conv_window(call)
        require_window(axes, self.label)
        self.require_wide_sums()
        x, y, order = self.x(0), self.y(0), self.result_order(call)
        if not x.size:
            raise UnsupportedFeatureError(f"{self.label}: there is nothing to sum")
        post_ops, later = self.split_post_ops(self.post_ops(call))
        require_accurate(self.onednn, post_ops, self.label)
        parameters = {WEIGHTS: grouped(self.x(1), call.arguments.int("group", 1), window.channels_last)}
        inputs = {SRC: 0, WEIGHTS: 1}
        if self.has_bias(call):
            parameters[BIAS], inputs[BIAS] = self.x(2), 2
        operands = {one.input: self.x(one.input) for one in post_ops if one.input >= 0 and one.kind != SUM}
        read, before = window.order, list[Step]()
        if (read, order) == (NCHW, NHWC) and not self._reads_plain(axes, post_ops, operands, y.shape):
            x, copied = self._turned(x)
            read = NHWC
            before.append(copied)
            del inputs[SRC]
        none, rows = self.onednn.ffi.NULL, read == order == NHWC
        block = BLOCKS.get(order, 0) if call.arguments.int("group", 1) == 1 else 0
        # For training oneDNN's Winograd takes the filter as it is and transforms it by generated code; for inference a
        # copy does that beforehand, ten times as slowly. Other algorithms offer less for training.
        kinds = {DIRECT: FORWARD_INFERENCE, WINOGRAD: FORWARD_INFERENCE if self.is_constant(1) else FORWARD_TRAINING}

        def computation(part: Part) -> Computation:
            attributes, inner, result = self.attributes(), part.axes(axes), part.result(y)
            source = part.source(x, axes)
            given = {number: part.operand(operand, y) for number, operand in operands.items()}
            appended = append_post_ops(attributes, self.onednn, post_ops, given, (y.ndim, order), self.label)

            def request(windows: Sequence[Axis], algorithm: str, layouts: Mapping[int, Descriptor]) -> Sequence[object]:
                tensors = (layouts[SRC], layouts[WEIGHTS], layouts.get(BIAS, none), layouts[DST])
                return [kinds[algorithm], CONVOLUTION[algorithm], *tensors, *geometry(windows), attributes]

            whole = Computation(
                "convolution_forward",
                partial(request, inner),
                inner,
                {SRC: (source, read), DST: (result, order)},
                {number: part.parameter(array) for number, array in parameters.items()},
                inputs,
                DST,
                operands=appended,
                key="post-ops " + " ".join(f"{one.kind}{list(given[one.input].shape)}" if one.input in given
                                           else one.kind for one in post_ops),
                attributes=post_ops,
                own_layouts=not any(one.kind == SUM for one in post_ops),
                composed=self.composed(inner, (read, order), post_ops, given, result.shape),
                rows=rows,
                block=block,
            )  # fmt: skip
            if not rows or padding_of("convolution_forward", inner[-1]) < MISREAD:
                return whole
            edged = edges.with_edges(inner)
            shape = (*source.shape[:-2], edged[-1].size, source.shape[-1])
            wide_image = np.broadcast_to(np.zeros((), x.dtype), shape)
            images = {**whole.images, SRC: (wide_image, order)}
            wide = replace(whole, request=partial(request, edged), axes=edged, images=images, composed=None)
            asked, pixel = partial(self.asked_of_library, wide), source.shape[-1] * source.itemsize
            offered = partial(edges.candidates, asked, inner[-1].head, inner[-1].size, pixel)
            return replace(whole, composed=all_of(whole.composed, offered))

        places = enumerate(post_ops)
        further = {POST_OP * (place + 1) | SRC_1: one.input for place, one in places if one.input in operands}

        def arrays_of(part: Part) -> dict[int, Array]:
            found = {SRC: part.source(x, axes), DST: part.result(y)}
            found |= {number: part.parameter(array) for number, array in parameters.items()}
            return found | {number: part.operand(operands[index], y) for number, index in further.items()}

        assembled = self.convolution(computation, arrays_of)
        inputs |= further
        operands_later = {one.input: self.x(one.input) for one in later if one.input >= 0}
        step = in_sequence([*before, *assembled.steps, finishing_step(self, later, y, operands_later)])
        return self.offered(step, assembled, inputs, {} if later else {DST: 0})

    def _reads_plain(
        self, axes: Sequence[Axis], post_ops: Sequence[PostOp], operands: Mapping[int, Array], shape: tuple[int, ...]
    ) -> bool:
        """True where images in NCHW are read as they are, for a result in NHWC."""
        found = self.composed(axes, (NCHW, NHWC), post_ops, operands, shape)
        return found is not None and any(True for _ in found())

    def _turned(self, x: Array) -> tuple[Array, Step]:
        """Memory for images of NCHW in NHWC, and the step that copies them there."""
        source = np.moveaxis(x, 1, -1)
        target: Array = self.working_memory(x.nbytes).view(x.dtype).reshape(source.shape)
        return target, copy_step(self.onednn.machine, [(source, target)], self.label) or partial(
            np.copyto, target, source
        )

    def split_post_ops(self, post_ops: Sequence[PostOp]) -> tuple[Sequence[PostOp], Sequence[PostOp]]:
        """As in the base; without oneDNN those that kernels of convolutions have, and what comes behind them."""
        first, later = super().split_post_ops(post_ops)
        if self.onednn.has_primitives or any(one.kind == SUM for one in post_ops[1:]):
            return first, later
        operands = {one.input: self.x(one.input) for one in post_ops if one.input >= 0}
        shape, counts = self.y(0).shape, range(len(first), -1, -1)
        count = next(n for n in counts if pointwise.finish(post_ops[:n], operands, shape) is not None)
        return post_ops[:count], post_ops[count:]

    def drops_nan(self) -> bool:
        """Where post-ops of the primitive do."""
        return drops_nan(self.split_post_ops(self.post_ops(self.call()))[0])

    @property
    def sees_nan(self) -> bool:
        """Also where it adds in place, but for Winograd's algorithms, by which a NaN reaches results beside it."""
        return super().sees_nan or (self._summand is not None and is_seen(self.onednn))

    @property
    def _summand(self) -> int | None:
        """The number of the input to which the result is added in place; None where it may not be forgotten."""
        call = self.call()
        found = [one.input for one in self.post_ops(call) if one.kind == SUM]
        plain = all((axis.kernel, axis.stride, axis.dilation) == (TAPS, 1, 1) for axis in conv_window(call)[1])
        return found[0] if len(found) == 1 and not plain else None

    def kept(self, prepared: Prepared) -> Prepared:
        """As in the base, or in place."""
        summand = self._summand
        if summand is None or self.keeps_nan_itself:
            return super().kept(prepared)
        return keeping_nan_in_place(self, prepared, self.onednn.machine, summand)

    def composed(
        self,
        axes: Sequence[Axis],
        orders: tuple[str, str],
        post_ops: Sequence[PostOp],
        operands: Mapping[int, Array],
        shape: tuple[int, ...],
    ) -> Composed | None:
        """The candidates of `direct`, `pointwise`, `windows`, `winograd` and `lattices`; None where there are none.

        `operands` are what post-ops read, by input number, for a result of `shape`.
        """
        if self.input(0).meta is not FLOAT32:
            return None
        found = [self._by_lattices(axes, orders, post_ops, operands, shape)]
        if self.is_constant(1):
            found.append(self._by_sums(axes, orders, post_ops, operands, shape))
        if self.is_constant(1) and orders == (NHWC, NHWC):
            found += [
                way(axes, post_ops, operands, shape) for way in (self._by_product, self._by_windows, self._by_winograd)
            ]
        offered = [one for one in found if one is not None]
        return (lambda: chain.from_iterable(one() for one in offered)) if offered else None

    def _by_sums(
        self,
        axes: Sequence[Axis],
        orders: tuple[str, str],
        post_ops: Sequence[PostOp],
        operands: Mapping[int, Array],
        shape: tuple[int, ...],
    ) -> Composed | None:
        """Those of `direct`, as in `composed`."""
        found, groups = direct.finish(post_ops, operands, shape), self.arguments.int("group", 1)
        if found is None or len(axes) > 2:
            return None
        *above, columns = axes
        rows = above[0] if above else Axis(1, 1, 1, 1, 0, 0, 1)
        channels = self._channels, channel_count(orders[1], shape)
        layer = direct.Layer(shape[0], *channels, groups, rows, columns, self.has_bias(self.call()), *found, orders)
        return partial(direct.candidates, self.onednn, layer)

    def _by_lattices(
        self,
        axes: Sequence[Axis],
        orders: tuple[str, str],
        post_ops: Sequence[PostOp],
        operands: Mapping[int, Array],
        shape: tuple[int, ...],
    ) -> Composed | None:
        """Those of `lattices`, as in `composed`."""
        found = pointwise.finish(post_ops, operands, shape)
        if found is None or not {NCHW, NHWC}.issuperset(orders) or orders == (NCHW, NHWC):  # which is turned before
            return None
        sizes = shape[0], self._channels, channel_count(orders[1], shape), self.arguments.int("group", 1)
        ends = self.has_bias(self.call()), *found
        layer = lattices.Layer(tuple(map(lattices.lines, axes)), *sizes, orders, *ends)
        return partial(lattices.candidates, self.onednn, layer)

    def _by_product(
        self, axes: Sequence[Axis], post_ops: Sequence[PostOp], operands: Mapping[int, Array], shape: tuple[int, ...]
    ) -> Composed | None:
        """Those of `pointwise`, as in `composed`."""
        found = pointwise.finish(post_ops, operands, shape)
        plain = all((axis.kernel, axis.stride, axis.out) == (1, 1, axis.size) and not axis.head for axis in axes)
        if found is None or not plain or self.arguments.int("group", 1) > 1:
            return None
        ends = self.has_bias(self.call()), self.weights_are_cold, *found
        layer = pointwise.Layer(math.prod(shape[:-1]), self._channels, shape[-1], *ends)
        return partial(pointwise.candidates, self.onednn, layer)

    def _by_windows(
        self, axes: Sequence[Axis], post_ops: Sequence[PostOp], operands: Mapping[int, Array], shape: tuple[int, ...]
    ) -> Composed | None:
        """Those of `windows`, as in `composed`."""
        found = pointwise.finish(post_ops, operands, shape)
        if found is None or len(axes) > 2 or self.arguments.int("group", 1) > 1:
            return None
        *above, columns = axes
        rows = above[0] if above else Axis(1, 1, 1, 1, 0, 0, 1)
        ends = self.has_bias(self.call()), self.weights_are_cold, *found
        layer = windows.Layer(shape[0], self._channels, shape[-1], rows, columns, *ends)
        return partial(windows.candidates, self.onednn, layer)

    def _by_winograd(
        self, axes: Sequence[Axis], post_ops: Sequence[PostOp], operands: Mapping[int, Array], shape: tuple[int, ...]
    ) -> Composed | None:
        """Those of `winograd`, as in `composed`."""
        filters, channels = self.y(0).shape[-1], self._channels
        plain = all((axis.kernel, axis.stride, axis.dilation) == (TAPS, 1, 1) for axis in axes) and len(axes) == 2
        if not plain:
            return None
        found = finish(post_ops, operands, shape, has_bias=self.has_bias(self.call()))
        groups = self.arguments.int("group", 1)
        if found is None or filters // groups % LANES or channels // groups % LANES:
            return None
        (height, width), heads = (axis.size for axis in axes), (axes[0].head, axes[1].head)
        result = axes[0].out, axes[1].out
        layer = Layer(
            shape[0], height, width, channels, filters, groups, heads, result, *found, self.onednn.machine.lanes
        )
        return partial(candidates, self.onednn, layer, self.scratchpad_limit, self.weights_are_cold)

    @property
    def _channels(self) -> int:
        """Channels that are read."""
        return channel_count(image_order(self.call()), self.x(0).shape)

    def post_ops(self, call: OperatorCall) -> tuple[PostOp, ...]:
        """What is done to the result."""
        return ()

    def has_bias(self, call: OperatorCall) -> bool:
        """True when input 2 is the bias."""
        return len(call.inputs) == 3

    def result_order(self, call: OperatorCall) -> str:
        """The order of Y."""
        return image_order(call)


class FusedForwardConvolution(ForwardConvolution, FusedConvolution):
    """FusedConv."""

    def post_ops(self, call: OperatorCall) -> tuple[PostOp, ...]:
        return read_post_ops(call)

    def has_bias(self, call: OperatorCall) -> bool:
        return first_operand(call) == 3

    def result_order(self, call: OperatorCall) -> str:
        return output_order(call)


operator(FUSED_CONV, engine="ONEDNN")(FusedForwardConvolution)
for _suffix in SPATIAL_AXES:
    operator(schema_of(f"Conv{_suffix}"), engine="ONEDNN")(
        type(f"Conv{_suffix}Onednn", (ForwardConvolution, Convolution), {"__doc__": "Conv."})
    )
