"""The Conv operators: schema, shape and cost inference; and ConvOperator, what all of the family share."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar

import numpy as np

from dagexec.core.dtypes import FLOAT_TYPES
from dagexec.core.node import Node
from dagexec.core.operator import Step, in_sequence, nothing_to_do
from dagexec.core.registry import operator
from dagexec.core.schema import Cost, OperatorCall, OpSchema, TensorType
from dagexec.core.shared_buffer import find_shared_buffer, shared_buffer_forced, shared_step
from dagexec.core.traits import ImageRole, LayerKind
from dagexec.core.workspace import Workspace
from dagexec.errors import ArgumentError
from dagexec.ops.base.blocks import compute_dtype
from dagexec.ops.base.geometry import WINDOW_ARGS, Axis, Window, output_sizes, read_window
from dagexec.ops.base.layout import ImageOperator, channels_last, image_order, image_shape, require_image, spatial_sizes
from dagexec.ops.families.conv.choice import ENGINES, named_algorithm
from dagexec.ops.families.conv.gradient_outputs import GROUP_ARGS
from dagexec.ops.families.conv.images import image_by_image
from dagexec.ops.families.conv.problem import DEFAULT_LIMIT, Algorithm, Allocate, Array, ConvProblem, add_bias
from dagexec.ops.families.conv.search import searched_algorithm

SPATIAL_AXES = {"": (1, 2, 3), "1D": (1,), "2D": (2,), "3D": (3,)}
"""How many spatial axes the operators have whose names end so."""

COMPUTE_ARGS = {
    "shared_buffer": "1: working memory is the workspace's shared buffer, one operator at a time (default 0); "
    "create_shared_buffer makes it",
    "ws_nbytes_limit": f"the most bytes of working memory an algorithm may take (default {DEFAULT_LIMIT})",
    "float16_compute": "1: float16 data is multiplied and summed in float16, every result rounded (default 0: float32)",
    "exhaustive_search": "1: measure the algorithms once for this geometry and take the fastest (default 0)",
    "deterministic": "1: measure nothing; of exhaustive_search only choices loaded from a file are used (default 0)",
    "allow_tf32": "engine CUDNN, 1: float32 data may be rounded to tf32 for the matrix units (default 0)",
    "cudnn_state": "engine CUDNN: the library state of the device, 0 to 3, that it takes turns at (default on CUDA: "
    "none, elsewhere 0)",
    "cudnn_inline": "engine CUDNN on CUDA, 1: on the operator's own stream (default: unless there is a cudnn_state)",
}
CONV_ARGS = WINDOW_ARGS | GROUP_ARGS | COMPUTE_ARGS


class ConvOperator(ImageOperator):
    """What convolutions, transposed convolutions and their gradients share: the working memory and the algorithm.

    Attributes:
        engine: the engine that the class is registered for; "" for the default one.
    """

    engine: ClassVar[str] = ""

    def __init__(self, definition: Node, workspace: Workspace, *, index: int = -1, net: str = "") -> None:
        """See `Operator`; it looks up the shared buffer that it is to use."""
        super().__init__(definition, workspace, index=index, net=net)
        if self.arguments.bool("shared_buffer") or shared_buffer_forced():
            self.shared_buffer = find_shared_buffer(workspace, self.runtime.device)

    @property
    def channels_last(self) -> bool:
        """True for order NHWC."""
        return channels_last(self.call())

    def problem(self, x: Array, weights: Array, bias: Array | None, y: Array, axes: tuple[Axis, ...]) -> ConvProblem:
        """The arrays of a convolution with this operator's arguments; input 1 must be the filter."""
        half = self.arguments.bool("float16_compute") and x.dtype == np.float16
        return ConvProblem(
            x=x,
            weights=weights,
            bias=bias,
            y=y,
            axes=axes,
            group=self.arguments.int("group", 1),
            channels_last=self.channels_last,
            work=x.dtype if half else compute_dtype(x.dtype),
            limit=self.arguments.int("ws_nbytes_limit", DEFAULT_LIMIT),
            constant=self.input(1).constant,
        )

    def algorithm(self, problem: ConvProblem) -> Algorithm:
        """The algorithm that computes `problem` forward."""
        if self.arguments.bool("exhaustive_search") and not self.engine:
            return searched_algorithm(problem, self.label, may_measure=not self.arguments.bool("deterministic"))
        return named_algorithm(problem, self.engine, self.label)

    def forward(self, problem: ConvProblem, *, apart: bool = False) -> Step:
        """The step that computes y with the algorithm that fits: each image `apart`, or all together."""
        algorithm = self.algorithm(problem.image(0) if apart else problem)
        steps = image_by_image(algorithm.steps) if apart and not algorithm.keeps_apart(problem) else algorithm.steps
        if algorithm.own_memory:
            return in_sequence(steps(problem, self.scratch))
        return self.with_memory(lambda allocate: in_sequence(steps(problem, allocate)))

    def with_memory(self, build: Callable[[Allocate], Step]) -> Step:
        """The step that `build` makes over working memory: the shared buffer's, or this operator's own."""
        if self.shared_buffer is None:
            return build(self.scratch)
        return shared_step(self.shared_buffer, build, self.label)


def check_compute_args(call: OperatorCall) -> None:
    """Raises ArgumentError for invalid values of COMPUTE_ARGS."""
    call.arguments.once(check_compute_args, partial(_check_compute_args, call))


def _check_compute_args(call: OperatorCall) -> None:
    args = call.arguments
    flags = ("shared_buffer", "float16_compute", "exhaustive_search", "deterministic", "allow_tf32", "cudnn_inline")
    for name in flags:
        if name in args:
            args.bool(name)
    limit = args.int("ws_nbytes_limit", DEFAULT_LIMIT)
    if limit < 1:
        raise ArgumentError(f"{call.label}: argument 'ws_nbytes_limit' must be at least 1 byte, found {limit}")


def conv_window(call: OperatorCall) -> tuple[Window, tuple[Axis, ...]]:
    """The window of a convolution or its gradient, and its axes over the input's size.

    Raises ArgumentError or ShapeError.
    """
    return call.once(_find_window)


def _find_window(call: OperatorCall) -> tuple[Window, tuple[Axis, ...]]:
    suffix = call.definition.type.removeprefix("Fused").removeprefix("Conv").removesuffix("Gradient")
    shape = require_image(call, 0, SPATIAL_AXES[suffix])
    window = read_window(call, len(spatial_sizes(image_order(call), shape)), blocked=True)
    if window.global_pooling or window.ceil_mode:
        raise ArgumentError(f"{call.label}: global_pooling and ceil_mode only apply to pooling")
    return window, window.over(window.spatial(shape))


def conv_output(call: OperatorCall, order: str = "") -> TensorType:
    """The type of Y = N, M, out, from the types of X and the filter, which are checked against each other.

    Y is in `order`, by default that of X. Inputs beyond the first three are others' to check.
    """
    call.require_types(0, *FLOAT_TYPES)
    meta = call.require_same_type(*range(min(3, len(call.inputs))))
    check_compute_args(call)
    window, axes = conv_window(call)
    shape = call.inputs[0].shape
    channels, group = window.channels(shape), call.arguments.int("group", 1)
    if group < 1 or channels % group:
        raise ArgumentError(f"{call.label}: group must divide the {channels} input channels, found {group}")
    filters = call.require_rank(1, len(axes) + 2)[0]
    if filters % group:
        raise ArgumentError(f"{call.label}: group {group} must divide the {filters} filters")
    expected = window.filter_shape(filters, channels // group)
    layout = "M, kernel, C/group" if window.channels_last else "M, C/group, kernel"
    call.require_shape(1, expected, f"{layout} for {channels} channels in {group} group(s) and kernel {window.kernel}")
    return TensorType(image_shape(order or window.order, shape[0], filters, output_sizes(axes), call.label), meta)


def infer_conv(call: OperatorCall) -> list[TensorType]:
    """Y is N, M, out. Checks filter and bias against the input, the kernel and the groups."""
    y = conv_output(call)
    if len(call.inputs) == 3:
        call.require_shape(2, call.inputs[1].shape[:1], "one entry for each filter")
    return [y]


def conv_flops(y: TensorType, weights: TensorType) -> int:
    """Two operations for each tap, input channel of the group and output element; `weights` are M, C/G * kernel."""
    return 2 * y.elements * (weights.elements // max(1, weights.shape[0]))


def _conv_cost(call: OperatorCall, outputs: Sequence[TensorType]) -> Cost:
    """The products and sums, and one operation for each bias."""
    y = outputs[0]
    flops = conv_flops(y, call.inputs[1]) + (y.elements if len(call.inputs) == 3 else 0)
    return Cost(flops, sum(kind.nbytes for kind in call.inputs), y.nbytes)


class Convolution(ConvOperator):
    """Y = X * filter + bias. The geometry fixes the order of summation: results never depend on the values."""

    def prepare(self) -> Step:
        """The steps of the algorithm that fits."""
        call = self.call()
        return self.convolve(call, self.x(2) if len(call.inputs) == 3 else None, self.y(0))

    def convolve(self, call: OperatorCall, bias: Array | None, y: Array) -> Step:
        """The step that computes the convolution and adds the bias, into `y`."""
        x = self.x(0)
        problem = self.problem(x, self.x(1), bias, y, conv_window(call)[1])
        if not y.size:
            return nothing_to_do
        if not x.size:
            return only_bias(y, bias, problem.channels_last)
        return self.forward(problem, apart=self.is_batch_invariant)


def only_bias(y: Array, bias: Array | None, channels_last: bool) -> Step:
    """The step for an output of an input without elements (no channels): zeros, plus the bias."""
    rows = y.reshape(-1, y.shape[-1]) if channels_last else y.reshape(*y.shape[:2], math.prod(y.shape[2:]))
    return in_sequence([lambda: y.fill(0), *add_bias(rows, bias, channels_last)])


def register_engines(schema: OpSchema, base: type[ConvOperator]) -> None:
    """Register `base` as the operator of `schema`, for the default engine and for each that has an algorithm."""
    for engine in ("", *ENGINES):
        members = {"__doc__": base.__doc__, "engine": engine}
        operator(schema, engine=engine)(type(f"{schema.type}{engine.title()}", (base,), members))


for _suffix in SPATIAL_AXES:
    register_engines(
        OpSchema(
            f"Conv{_suffix}",
            inputs=(2, 3),
            infer=infer_conv,
            doc="Convolution (cross-correlation, without flipping the filter) over 1, 2 or 3 spatial axes: X is N, C, "
            "spatial, filter M, C/group, kernel, bias M, Y is N, M, out. With order NHWC channels come last, in the "
            "filter too. Dumoulin and Visin 2016, arXiv:1603.07285.",
            input_names=("X", "filter", "bias"),
            output_names=("Y",),
            args=CONV_ARGS,
            cost=_conv_cost,
            layer=LayerKind.CONVOLUTION,
            fused="FusedConv",
            image_role=ImageRole.CONVOLUTION,
            has_weights=True,
        ),
        Convolution,
    )
