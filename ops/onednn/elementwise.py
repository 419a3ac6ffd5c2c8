"""Element-wise operators by oneDNN: chains of functions of one tensor and of operands that broadcast to it.

A chain is one primitive: an eltwise one for a single function, otherwise a binary one (with a first operand, or times
1) whose post-ops are the other links; of more than 32 links it takes several. Small chains cost little more than their
first link: of 64 elements on one core, 0.8 us for one function and 1.9 us for 31, where NumPy takes 0.4 us a link and
more. A lone sum of two tensors of one shape costs 0.9 us and NumPy's 0.4, but 0.5 in a row of native calls
(`dagexec.ops.onednn.native`), which a step by NumPy would interrupt; from some thousands of elements on they are even.

oneDNN's max, min, clip, relu and the like may give a number for NaN; see `keeping_nan`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dagexec.core.operator import Operator, Step, in_sequence
from dagexec.core.registry import operator
from dagexec.errors import UnsupportedFeatureError
from dagexec.ops.activation import functions as activation
from dagexec.ops.activation.post_ops import SUM, PostOp, read_post_ops
from dagexec.ops.base.broadcasting import operand_views
from dagexec.ops.base.layout import BLOCKS, NCHW
from dagexec.ops.elementwise import arithmetic as elementwise
from dagexec.ops.elementwise import fused as fused_elementwise
from dagexec.ops.elementwise import unary
from dagexec.ops.onednn.accuracy import require_accurate
from dagexec.ops.onednn.operator import OneDNNOperator
from dagexec.ops.onednn.post_ops import BINARY, ELTWISE, append_post_ops, drops_nan, operand_descriptor
from dagexec.ops.onednn.primitive import (
    DST,
    FORWARD_INFERENCE,
    SRC,
    SRC_1,
    Array,
    BoundPrimitive,
    Descriptor,
    PrimitiveDescriptor,
)

MAX_POST_OPS = 32
"""What one primitive takes."""

Operands = Mapping[int, Array]


@dataclass(frozen=True)
class ChainLayout:
    """How the tensors of a chain are shown to oneDNN.

    Attributes:
        shape: of the result's array, with axes merged that all operands stretch or fill alike.
        order: NCHW for a packed tensor of that shape, or one in blocks.
        operands: arrays of as many axes as `shape`, 1 where they are stretched.
    """

    shape: tuple[int, ...]
    order: str
    operands: Operands


def merged(shape: tuple[int, ...], operands: Operands) -> ChainLayout:
    """A packed tensor and operands that broadcast to it, in as few axes as say the same."""
    padded = {index: (1,) * (len(shape) - array.ndim) + array.shape for index, array in operands.items()}
    axes: list[int] = []
    kept: dict[int, list[int]] = {index: [] for index in operands}
    for axis, size in enumerate(shape):
        if size == 1:
            continue
        own = {index: view[axis] for index, view in padded.items()}
        if axes and all((own[index] == 1) == (kept[index][-1] == 1) for index in operands):
            axes[-1] *= size
            for index, view in kept.items():
                view[-1] *= own[index]
        else:
            axes.append(size)
            for index, view in kept.items():
                view.append(own[index])
    views = {index: operands[index].reshape(view or (1,)) for index, view in kept.items()}
    return ChainLayout(tuple(axes) or (1,), NCHW, views)


def layouts(shape: tuple[int, ...], operands: Operands) -> Iterator[ChainLayout]:
    """Ways to show the tensors to oneDNN, which has fast code for operands that vary along axis 1 alone."""
    least = merged(shape, operands)
    yield least
    leading = {index: array[None] for index, array in least.operands.items()}
    if len(least.shape) > 1:
        yield ChainLayout((1, *least.shape), NCHW, leading)
    for order, block in BLOCKS.items():
        if least.shape[-1] == block and len(least.shape) == 3:
            yield ChainLayout((1, *least.shape), order, leading)
        if least.shape[-1] == block and len(least.shape) == 4:
            yield replace(least, order=order)


class Chain(OneDNNOperator):
    """Base: input 0, or another that is no operand, with post-ops applied."""

    @abstractmethod
    def links(self) -> tuple[Array, list[PostOp], Operands]:
        """What the chain starts from, of the output's shape, its links, and the operands that they name."""

    def drops_nan(self) -> bool:
        """See `post_ops.DROPS_NAN`."""
        return drops_nan(self.links()[1])

    def prepare_primitive(self) -> Step:
        """As many primitives as the links need, in place after the first."""
        x, links, operands = self.links()
        require_accurate(self.onednn, links, self.label)
        y = self.y(0)
        if x.shape != y.shape:
            raise UnsupportedFeatureError(f"{self.label}: oneDNN does not stretch the first operand {x.shape}")
        if not links:
            links = [PostOp("linear", 1.0, 0.0)]
        groups = _groups(links)
        if len(groups) > 1 and any(np.shares_memory(y, operand) for operand in operands.values()):
            raise UnsupportedFeatureError(f"{self.label}: an operand is overwritten before the last link reads it")
        adds = next((number for number, group in enumerate(groups) if any(link.kind == SUM for link in group)), 0)
        source, bounds = x, []
        for number, group in enumerate(groups):
            target = y
            if number < adds:  # the output is still to be added
                target = self.scratch(y.shape, y.dtype) if number == 0 else source
            bounds.append(self._link(source, target, group, {i: operands[i] for i in _inputs(group)}))
            source = target
        step = in_sequence([bound.step for bound in bounds])
        if len(bounds) > 1 or any(link.kind == SUM for link in links):
            return step
        return self.rebindable(step, bounds[0], {} if self._reads_input_twice() else {0: SRC}, {0: DST})

    def _reads_input_twice(self) -> bool:
        return self.definition.input[0] in self.definition.input[1:]

    def _link(self, x: Array, y: Array, group: Sequence[PostOp], operands: Operands) -> BoundPrimitive:
        first = group[0]
        if len(group) == 1 and first.input < 0:
            layout = self.packed(x.reshape(-1))
            function = (*ELTWISE[first.kind](first.a, first.b),)
            found = self.describe(
                "eltwise_forward",
                self.onednn.engine,
                FORWARD_INFERENCE,
                function[0],
                layout,
                layout,
                *function[1:],
                self.attributes(),
            )
            return self.bound(found, {SRC: (layout, x), DST: (layout, y)})
        for way in layouts(y.shape, operands):
            for other in _others(group[0], way, y.dtype):
                try:
                    found, arguments = self._binary(way, x, other, y, group)
                except UnsupportedFeatureError:
                    continue
                if not found.is_reference:
                    return self.bound(found, arguments)
        shapes = ", ".join(str(array.shape) for array in operands.values())
        raise UnsupportedFeatureError(f"{self.label}: oneDNN is slow with operands of {shapes} for {y.shape}")

    def _binary(
        self, way: ChainLayout, x: Array, other: Array, y: Array, group: Sequence[PostOp]
    ) -> tuple[PrimitiveDescriptor, dict[int, tuple[Descriptor, Array]]]:
        """The binary primitive of a group of links, and its arguments; `other` is its second operand."""
        first, rank = group[0], len(way.shape)
        layout = operand_descriptor(self.onednn, y.reshape(way.shape), rank, way.order, self.label)
        algorithm, rest = (BINARY[first.kind], group[1:]) if first.kind in BINARY else (BINARY["mul"], group)
        beside = operand_descriptor(self.onednn, other, rank, way.order, self.label)
        attributes = self.attributes()
        further = append_post_ops(attributes, self.onednn, rest, way.operands, (rank, way.order), self.label)
        found = self.describe("binary", self.onednn.engine, algorithm, layout, beside, layout, attributes)
        return found, {SRC: (layout, x), SRC_1: (beside, other), DST: (layout, y), **further}


def _others(first: PostOp, way: ChainLayout, dtype: np.dtype[Any]) -> list[Array]:
    """What may be the second operand of the binary primitive: that of the first link, or else ones.

    A few implementations that take operands a channel as post-ops take no scalar beside them.
    """
    if first.kind in BINARY:
        return [way.operands[first.input]]
    alike = [np.ones_like(operand) for operand in way.operands.values() if operand.shape != way.shape]
    return [np.ones((1,) * len(way.shape), dtype), *alike[:1]]


def _groups(links: Sequence[PostOp]) -> list[list[PostOp]]:
    """The links of each primitive: post-ops, and before them one that is the primitive itself, if it has an operand."""
    groups: list[list[PostOp]] = []
    for link in links:
        most = MAX_POST_OPS + (1 if groups and groups[-1][0].kind in BINARY else 0)
        if not groups or len(groups[-1]) == most:
            groups.append([])
        groups[-1].append(link)
    return groups


def _inputs(group: Sequence[PostOp]) -> set[int]:
    return {link.input for link in group if link.kind in BINARY}


@operator(fused_elementwise.FusedElementwise.schema, engine="ONEDNN")
class FusedElementwise(Chain, fused_elementwise.FusedElementwise):
    """A chain as the definition says it."""

    def links(self) -> tuple[Array, list[PostOp], Operands]:
        """Argument `post_ops`."""
        links = list(read_post_ops(self.call()))
        return self.x(0), links, {index: self.x(index) for index in _inputs(links)}


FUNCTIONS: Mapping[type[Operator], Callable[[Operator], list[PostOp]]] = {
    activation.Relu: lambda op: [PostOp("relu")],
    activation.ReluN: lambda op: [PostOp("clip", 0.0, op.arguments.float("n", 6.0))],
    activation.Clip: lambda op: [PostOp("clip", *activation.clip_limits(op.arguments, op.label, op.input(0).meta))],
    activation.LeakyRelu: lambda op: [PostOp("leaky_relu", op.arguments.float("alpha", 0.01))],
    activation.Elu: lambda op: [PostOp("elu", op.arguments.float("alpha", 1.0))],
    activation.Selu: lambda op: [
        PostOp("elu", op.arguments.float("alpha", activation.Selu.constants["alpha"])),
        PostOp("linear", op.arguments.float("scale", activation.Selu.constants["scale"]), 0.0),
    ],
    activation.Sigmoid: lambda op: [PostOp("sigmoid")],
    activation.Tanh: lambda op: [PostOp("tanh")],
    activation.Swish: lambda op: [PostOp("swish", 1.0)],
    activation.Softplus: lambda op: [PostOp("softplus")],
    activation.HardSigmoid: lambda op: [
        PostOp("hardsigmoid", op.arguments.float("alpha", 0.2), op.arguments.float("beta", 0.5))
    ],
    activation.HardSwish: lambda op: [PostOp("hardswish")],
    activation.Gelu: lambda op: [PostOp("gelu_tanh" if op.arguments.bool("fast_gelu") else "gelu_erf")],
    unary.Abs: lambda op: [PostOp("abs")],
    unary.Sqrt: lambda op: [PostOp("sqrt")],
    unary.Sqr: lambda op: [PostOp("square")],
    unary.Negative: lambda op: [PostOp("linear", -1.0, 0.0)],
    unary.Exp: lambda op: [PostOp("exp")],
    unary.Log: lambda op: [PostOp("log")],
}
"""What operators of one tensor are, as links of a chain."""


class FunctionOperator(Chain):
    """A function of one tensor."""

    def links(self) -> tuple[Array, list[PostOp], Operands]:
        """See FUNCTIONS."""
        kind = next(cls for cls in type(self).__mro__ if cls in FUNCTIONS)
        return self.x(0), FUNCTIONS[kind](self), {}


BINARY_OPERATORS: Mapping[type[Operator], str] = {
    elementwise.Add: "add",
    elementwise.Sub: "sub",
    elementwise.Mul: "mul",
    elementwise.Div: "div",
}


class BinaryOperator(Chain):
    """Two tensors, of which one is stretched to the other."""

    def links(self) -> tuple[Array, list[PostOp], Operands]:
        """One link; a sum or a product may start from either tensor."""
        kind = next(BINARY_OPERATORS[cls] for cls in type(self).__mro__ if cls in BINARY_OPERATORS)
        a, b, y = self.x(0), self.x(1).reshape(operand_views(self.call())[1]), self.y(0)
        if a.shape != y.shape and kind in ("add", "mul"):
            a, b = b, a
        return a, [PostOp(kind, input=1)], {1: b}


VARIADIC_OPERATORS: Mapping[type[Operator], str] = {
    elementwise.Sum: "add",
    elementwise.Mean: "add",
    elementwise.Max: "max",
    elementwise.Min: "min",
}


class VariadicOperator(Chain):
    """Any number of tensors, that are stretched to the first."""

    def links(self) -> tuple[Array, list[PostOp], Operands]:
        """A link for each tensor after the first, and the division of a mean."""
        kind = next(VARIADIC_OPERATORS[cls] for cls in type(self).__mro__ if cls in VARIADIC_OPERATORS)
        count = len(self.input_blobs)
        links = [PostOp(kind, input=index) for index in range(1, count)]
        if isinstance(self, elementwise.Mean):
            links.append(PostOp("linear", 1 / count, 0.0))
        return self.x(0), links, {index: self.x(index) for index in range(1, count)}


def _register(base: type[Chain], default: type[Operator]) -> None:
    members = {"__doc__": default.__doc__, "__module__": __name__}
    operator(default.schema, engine="ONEDNN")(type(default.__name__, (base, default), members))


for _default in FUNCTIONS:
    _register(FunctionOperator, _default)
for _default in BINARY_OPERATORS:
    _register(BinaryOperator, _default)
for _default in VARIADIC_OPERATORS:
    _register(VariadicOperator, _default)
