"""Convolutions by oneDNN: Conv and FusedConv, in all orders, with post-ops in the primitive.

Weights that never change are packed once and shared by all operators that read them; others are copied into the layout
of the implementation in every run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from dagexec.core.dtypes import FLOAT16, from_numpy
from dagexec.core.errors import UnsupportedFeatureError
from dagexec.core.operator import Step, in_sequence, nothing_to_do
from dagexec.core.registry import operator, schema_of
from dagexec.core.schema import OperatorCall
from dagexec.ops.conv.convolution import SPATIAL_AXES, Convolution, conv_window
from dagexec.ops.conv.fused import FUSED_CONV, FusedConvolution, first_operand, output_order
from dagexec.ops.conv.problem import DEFAULT_LIMIT
from dagexec.ops.geometry import Axis, tap_count
from dagexec.ops.layout import NCHW, NCHW16C, NHWC, image_order, logical_shape
from dagexec.ops.onednn.accuracy import require_accurate
from dagexec.ops.onednn.implementation import choose_implementation
from dagexec.ops.onednn.operator import OneDNNOperator, PackedForms
from dagexec.ops.onednn.post_ops import append_post_ops
from dagexec.ops.onednn.primitive import (
    BIAS,
    DST,
    FORWARD_INFERENCE,
    POST_OP,
    SRC,
    SRC_1,
    WEIGHTS,
    Array,
    Descriptor,
    PrimitiveDescriptor,
    aligned_empty,
    describe,
)
from dagexec.ops.onednn.problem import DIRECT, WINOGRAD, Assembled, Candidate, Problem, assemble
from dagexec.ops.post_ops import SUM, PostOp, read_post_ops

CONVOLUTION = {DIRECT: 1, WINOGRAD: 2}
"""dnnl_alg_kind_t of convolutions, by algorithm."""

_IMAGE_RANKS = (3, 4, 5)


def tail_of(axis: Axis) -> int:
    """Padding at the end that the last window needs; negative where the windows do not reach the end."""
    return axis.covered - axis.head - axis.size


def require_window(axes: Sequence[Axis], label: str) -> None:
    """Raise UnsupportedFeatureError for a window that starts behind the first pixel (SAME with a wide stride)."""
    for axis in axes:
        if axis.head < 0 or not axis.out:
            raise UnsupportedFeatureError(f"{label}: oneDNN has no convolution with padding {axis.head}")


def grouped(weights: Array, group: int, channels_last: bool) -> Array:
    """A view of the filter as M, C/G, kernel, or with groups as G, M/G, C/G, kernel."""
    logical = np.moveaxis(weights, -1, 1) if channels_last else weights
    return logical if group == 1 else logical.reshape(group, len(weights) // group, *logical.shape[1:])


class ConvolutionFamily(OneDNNOperator):
    """What all convolutions by oneDNN share: the choice of an implementation and the steps around it."""

    def prepares_half(self) -> bool:
        """True when float16 is to be rounded at every operation, which oneDNN does not do."""
        return self.arguments.bool("float16_compute") and self.input(0).meta is FLOAT16

    def geometry(self, axes: Sequence[Axis]) -> tuple[object, ...]:
        """Strides, dilations less 1, heads and tails, as oneDNN takes them."""
        dims = self.onednn.dims
        return (
            dims(axis.stride for axis in axes),
            dims(axis.dilation - 1 for axis in axes),
            dims(axis.head for axis in axes),
            dims(tail_of(axis) for axis in axes),
        )

    def window_key(self, axes: Sequence[Axis]) -> str:
        """The window, as text for the key of a choice."""
        return ";".join(f"{axis.kernel},{axis.stride},{axis.dilation},{axis.head},{tail_of(axis)}" for axis in axes)

    def is_constant(self, index: int) -> bool:
        """True when input `index` never changes."""
        return self.input(index).constant is not None

    @property
    def scratchpad_limit(self) -> int:
        """The most bytes of working memory that an implementation may take."""
        return self.arguments.int("ws_nbytes_limit", DEFAULT_LIMIT)

    @property
    def weights_are_cold(self) -> bool:
        """False when the weights of the net stay in a cache from one run to the next: argument `cold_weights`=0."""
        return self.arguments.bool("cold_weights", True)

    def implementation(self, problem: Problem) -> Candidate:
        """The implementation that computes `problem`, as `exhaustive_search` and `deterministic` have it chosen."""
        search = self.arguments.bool("exhaustive_search")
        return choose_implementation(
            problem,
            reference=self.needs_onednn(),
            search=search and not self.arguments.bool("deterministic"),
            given_only=self.arguments.bool("deterministic"),
        )

    def parameter(self, index: int, array: Array, source: Descriptor, target: Descriptor) -> tuple[Array, Step]:
        """As in the base; a layout that the library cannot reach from `source` is reached from a packed copy."""
        try:
            return super().parameter(index, array, source, target)
        except UnsupportedFeatureError:
            pass
        constant = self.input(index).constant
        memory = self.working_memory if constant is None else aligned_empty
        plain = memory(array.nbytes).view(array.dtype).reshape(array.shape)
        copied = partial(np.copyto, plain, array)
        if constant is None:
            packed, step = super().parameter(index, plain, self.packed(plain), target)
            return packed, in_sequence([copied, step])
        copied()
        forms = constant.derived("onednn", PackedForms)
        return forms.get(source, target, lambda: self._reordered(self.packed(plain), target, plain)), nothing_to_do

    def assembled(self, problem: Problem, arrays: Mapping[int, Array], inputs: Mapping[int, int]) -> Assembled:
        """The steps of the implementation chosen for `problem`; `inputs` gives the input number of an argument."""
        chosen = self.implementation(problem)
        return assemble(
            problem,
            chosen.description,
            arrays,
            self.working_memory,
            lambda number, array, source, target: self.parameter(inputs[number], array, source, target),
        )


class ForwardConvolution(ConvolutionFamily):
    """Y = post_ops(X * filter + bias)."""

    def prepare_primitive(self) -> Step:
        """The primitive, and copies around it where the implementation has a layout of its own."""
        call = self.call()
        window, axes = conv_window(call)
        require_window(axes, self.label)
        if self.prepares_half():
            raise UnsupportedFeatureError(f"{self.label}: float16_compute asks for sums rounded to float16")
        x, y, group = self.x(0), self.y(0), call.arguments.int("group", 1)
        if not x.size:
            raise UnsupportedFeatureError(f"{self.label}: there is nothing to sum")
        post_ops = self.post_ops(call)
        require_accurate(self.onednn, post_ops, self.label)
        weights = grouped(self.x(1), group, window.channels_last)
        arrays = {SRC: x, WEIGHTS: weights, DST: y}
        inputs = {SRC: 0, WEIGHTS: 1}
        if self.has_bias(call):
            arrays[BIAS], inputs[BIAS] = self.x(2), 2
        problem, operands = self._problem(call, axes, arrays, post_ops)
        for number, array in operands.items():
            arrays[number] = array
        inputs |= {
            POST_OP * (place + 1) | SRC_1: one.input
            for place, one in enumerate(post_ops)
            if one.input >= 0 and one.kind != SUM
        }
        assembled = self.assembled(problem, arrays, inputs)
        self._offer(assembled, inputs)
        return in_sequence(assembled.steps) if assembled.steps else nothing_to_do

    def post_ops(self, call: OperatorCall) -> tuple[PostOp, ...]:
        """What is done to the result."""
        return ()

    def has_bias(self, call: OperatorCall) -> bool:
        """True when input 2 is the bias."""
        return len(call.inputs) == 3

    def result_order(self, call: OperatorCall) -> str:
        """The order of Y."""
        return image_order(call)

    def _problem(
        self, call: OperatorCall, axes: Sequence[Axis], arrays: Mapping[int, Array], post_ops: Sequence[PostOp]
    ) -> tuple[Problem, dict[int, Array]]:
        """The problem, and by argument number the operands of post-ops."""
        library, order, result_order = self.onednn, image_order(call), self.result_order(call)
        x, weights, y = arrays[SRC], arrays[WEIGHTS], arrays[DST]
        meta = from_numpy(x.dtype)
        bias = arrays.get(BIAS)
        tensors = {
            SRC: (self.image(x, order), meta),
            WEIGHTS: (self.packed(weights), meta),
            DST: (self.image(y, result_order), meta),
        }
        if bias is not None:
            tensors[BIAS] = (self.packed(bias), meta)
        attributes = self.attributes()
        given = {one.input: self.x(one.input) for one in post_ops if one.input >= 0 and one.kind != SUM}
        operands = append_post_ops(attributes, library, post_ops, given, (y.ndim, result_order), self.label)
        tensors |= {number: (descriptor, meta) for number, (descriptor, _) in operands.items()}
        wanted = Descriptor.any_layout(library, weights.shape, meta)
        free = {
            SRC: Descriptor.any_layout(library, logical_shape(order, x.shape), meta),
            DST: Descriptor.any_layout(library, logical_shape(result_order, y.shape), meta),
        }
        geometry = self.geometry(axes)

        def ask(algorithm: str, threads: int, own_layouts: bool) -> PrimitiveDescriptor:
            source, target = (free[number] if own_layouts else tensors[number][0] for number in (SRC, DST))
            if own_layouts and algorithm == DIRECT and NHWC in (order, result_order):
                raise UnsupportedFeatureError(f"{self.label}: direct implementations read NHWC as it is")
            return describe(
                library, threads, self.label, "convolution_forward", library.engine, FORWARD_INFERENCE,
                CONVOLUTION[algorithm], source.handle, wanted.handle,
                library.ffi.NULL if bias is None else tensors[BIAS][0].handle, target.handle, *geometry,
                attributes.handle,
            )  # fmt: skip

        parameters = {WEIGHTS: 1, BIAS: 2}
        constant = {number for number in parameters if number in tensors and self.is_constant(parameters[number])}
        sums = any(one.kind == SUM for one in post_ops)
        problem = Problem(
            library=library,
            label=self.label,
            threads=self.threads,
            key=self._key(call, axes, arrays, post_ops, constant),
            ask=ask,
            tensors=tensors,
            result=DST,
            plain={WEIGHTS: Descriptor.of_order(library, weights.shape, meta, NCHW)},
            packed=frozenset({WEIGHTS, BIAS}),
            constant=frozenset(constant),
            taps=tap_count(axes),
            fan_in=weights[0].size if weights.ndim == len(axes) + 2 else weights[0, 0].size,
            own_layouts=not sums and NCHW16C not in (order, result_order),
            limit=self.scratchpad_limit,
            cold=self.weights_are_cold,
        )
        return problem, {number: array for number, (_, array) in operands.items()}

    def _key(
        self,
        call: OperatorCall,
        axes: Sequence[Axis],
        arrays: Mapping[int, Array],
        post_ops: Sequence[PostOp],
        constant: set[int],
    ) -> str:
        order, result_order = image_order(call), self.result_order(call)
        operands = [f"{one.kind}{list(self.x(one.input).shape)}" if one.input >= 0 else one.kind for one in post_ops]
        parts = [
            f"convolution {from_numpy(arrays[SRC].dtype)}",
            f"x {list(logical_shape(order, arrays[SRC].shape))} {order}",
            f"filter {list(arrays[WEIGHTS].shape)} {'constant' if WEIGHTS in constant else 'fed'}",
            f"window {self.window_key(axes)}",
            f"to {result_order}",
            "bias" if BIAS in arrays else "no bias",
            f"post-ops {' '.join(operands)}",
        ]
        return " | ".join(parts)

    def _offer(self, assembled: Assembled, inputs: Mapping[int, int]) -> None:
        """Offer moves of the tensors that the primitive itself reads or writes, and nothing else does."""
        names = list(self.definition.input)
        free = {
            index: number
            for number, index in inputs.items()
            if number in assembled.direct and names.count(names[index]) == 1 and not self.is_constant(index)
        }
        self.offer_moves(assembled.bound, free, {0: DST} if DST in assembled.direct else {})


class FusedForwardConvolution(ForwardConvolution, FusedConvolution):
    """FusedConv."""

    def post_ops(self, call: OperatorCall) -> tuple[PostOp, ...]:
        """Argument `post_ops`."""
        return read_post_ops(call)

    def has_bias(self, call: OperatorCall) -> bool:
        """Argument `bias`."""
        return first_operand(call) == 3

    def result_order(self, call: OperatorCall) -> str:
        """Argument `output_order`."""
        return output_order(call)


operator(FUSED_CONV, engine="ONEDNN")(FusedForwardConvolution)
for _suffix in SPATIAL_AXES:
    operator(schema_of(f"Conv{_suffix}"), engine="ONEDNN")(
        type(f"Conv{_suffix}Onednn", (ForwardConvolution, Convolution), {"__doc__": "Conv."})
    )
