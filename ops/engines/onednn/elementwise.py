"""Element-wise operators by oneDNN: chains of functions of one tensor and of operands that broadcast to it.

A chain is one primitive: an eltwise one for a single function, otherwise a binary one (with a first operand, or times
1) whose post-ops are the other links; of more than 32 links it takes several. Small chains cost little more than their
first link: of 64 elements on one core, 0.8 us for one function and 1.9 us for 31, where NumPy takes 0.4 us a link and
more. A lone sum of two tensors of one shape costs 0.9 us and NumPy's 0.4, but 0.5 in a row of native calls
(`dagexec.core.native`), which a step by NumPy would interrupt; from some thousands of elements on they are even.

oneDNN's max, min, clip, relu and the like may give a number for NaN; see `keeping_nan`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from dagexec.core.arguments import NOTHING, Arguments
from dagexec.core.dtypes import FLOAT32
from dagexec.core.operator import Prepared, Step, in_sequence
from dagexec.core.operator_index import completes
from dagexec.core.registry import operator, operator_class, schema_of
from dagexec.errors import UnsupportedFeatureError
from dagexec.ops.base.broadcasting import operand_views
from dagexec.ops.base.layout import BLOCKS, NCHW, channel_axis
from dagexec.ops.engines.onednn.accuracy import is_coarse, require_accurate
from dagexec.ops.engines.onednn.bound import BoundPrimitive
from dagexec.ops.engines.onednn.cutting import Parts
from dagexec.ops.engines.onednn.descriptors import DST, FORWARD_INFERENCE, SRC, SRC_1, Array, Descriptor
from dagexec.ops.engines.onednn.operator import OneDNNOperator
from dagexec.ops.engines.onednn.post_ops import BINARY, ELTWISE, append_post_ops, drops_nan, operand_descriptor
from dagexec.ops.engines.onednn.primitive import PrimitiveDescriptor
from dagexec.ops.families.activation import prelu
from dagexec.ops.families.activation.post_ops import SUM, PostOp, parse_post_op, read_post_ops
from dagexec.ops.families.elementwise import arithmetic
from dagexec.ops.families.elementwise import fused as fused_elementwise
from dagexec.ops.kernels.chains import PRELU, chain_step
from dagexec.ops.kernels.function_kernels import GELU, gelu_step
from dagexec.platform.records import dataclass

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

    repeats = True

    @abstractmethod
    def links(self) -> tuple[Array, list[PostOp], Operands]:
        """What the chain starts from, of the output's shape, its links, and the operands that they name."""

    def drops_nan(self) -> bool:
        return drops_nan(self.links()[1], behind_sums=False)

    def prepare_primitive(self) -> Step | Prepared:
        """One primitive; a kernel of our own where it takes several or oneDNN refuses."""
        try:
            return self._by_primitives()
        except UnsupportedFeatureError:
            step = self._by_kernel()
            if step is None:
                raise
            return step

    def _by_kernel(self) -> Step | None:
        x, links, operands = self.links()
        if any(link.kind == SUM for link in links):
            return None
        order = list(operands)
        chain = [(one.kind, one.a, one.b, order.index(one.input) if one.input >= 0 else -1) for one in links]
        machine, arrays = self.onednn.machine, list(operands.values())
        return chain_step(machine, chain, x, self.y(0), arrays, self.label)

    def _by_primitives(self) -> Step | Prepared:
        """As many primitives as the links need, in place after the first."""
        x, links, operands = self.links()
        y = self.y(0)
        if x.shape != y.shape:
            raise UnsupportedFeatureError(f"{self.label}: oneDNN cannot broadcast the first operand {x.shape}")
        if not links:
            links = [PostOp("linear", 1.0, 0.0)]
        groups = _groups(links, lambda link: is_coarse(self.onednn, link))
        if len(groups) > 1 and any(np.shares_memory(y, operand) for operand in operands.values()):
            raise UnsupportedFeatureError(f"{self.label}: an operand is overwritten before the last post-op reads it")
        adds = next((number for number, group in enumerate(groups) if any(link.kind == SUM for link in group)), 0)
        kernel = self._by_kernel() if len(groups) > 1 else None
        if kernel is not None:
            return kernel
        source, bounds, steps = x, [], []
        for number, group in enumerate(groups):
            target = y
            if number < adds:  # the output is still to be added
                target = self.scratch(y.shape, y.dtype) if number == 0 else source
            if group[0].kind == GELU and is_coarse(self.onednn, group[0]):
                kernel = gelu_step(self.onednn.machine, source, target, self.label)
            else:
                kernel = None
            if kernel is None:
                require_accurate(self.onednn, group, self.label)
                bounds.append(self._link(source, target, group, {i: operands[i] for i in _inputs(group)}))
                kernel = bounds[-1].step
            steps.append(kernel)
            source = target
        step = in_sequence(steps)
        if len(steps) > 1 or not bounds or any(link.kind == SUM for link in links):
            return step
        return self.rebindable(step, bounds[0], {} if self._reads_input_twice() else {0: SRC}, {0: DST})

    def _reads_input_twice(self) -> bool:
        return self.definition.input[0] in self.definition.input[1:]

    def _link(self, x: Array, y: Array, group: Sequence[PostOp], operands: Operands) -> BoundPrimitive | Parts:
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
            return self.in_parts(found, {SRC: (layout, x), DST: (layout, y)})
        for way in layouts(y.shape, operands):
            for other in self._others(group[0], way, y.dtype):
                try:
                    found, arguments = self._binary(way, x, other, y, group)
                except UnsupportedFeatureError:
                    continue
                if not found.is_reference:
                    block = BLOCKS.get(way.order, 1)
                    axes = range(len(way.shape)) if block == 1 else (0, 1)  # pixels lie within blocks of channels
                    return self.in_parts(found, arguments, axes, block)
        shapes = ", ".join(str(array.shape) for array in operands.values())
        raise UnsupportedFeatureError(
            f"{self.label}: oneDNN is slow for operands of {shapes} and a result of {y.shape}"
        )

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

    def _others(self, first: PostOp, way: ChainLayout, dtype: np.dtype[Any]) -> list[Array]:
        """What may be the second operand of the binary primitive: that of the first link, or else ones.

        A few implementations that take operands a channel as post-ops take no scalar beside them.
        """
        if first.kind in BINARY:
            return [way.operands[first.input]]
        alike = [np.ones_like(operand) for operand in way.operands.values() if operand.shape != way.shape]
        return [self.for_all(one) for one in (np.ones((1,) * len(way.shape), dtype), *alike[:1])]


def _groups(links: Sequence[PostOp], is_apart: Callable[[PostOp], bool]) -> list[list[PostOp]]:
    """The links of each primitive: post-ops, and before them one that is the primitive itself, if it has an operand.

    Those apart are a group each.
    """
    groups: list[list[PostOp]] = []
    for link in links:
        most = MAX_POST_OPS + (1 if groups and groups[-1][0].kind in BINARY else 0)
        if not groups or len(groups[-1]) == most or is_apart(link) or is_apart(groups[-1][-1]):
            groups.append([])
        groups[-1].append(link)
    return groups


def _inputs(group: Sequence[PostOp]) -> set[int]:
    return {link.input for link in group if link.kind in BINARY}


@operator(fused_elementwise.FusedElementwise.schema, engine="ONEDNN")
class FusedElementwise(Chain, fused_elementwise.FusedElementwise):
    """A chain as the definition says it."""

    def links(self) -> tuple[Array, list[PostOp], Operands]:
        links = list(read_post_ops(self.call()))
        return self.x(0), links, {index: self.x(index) for index in _inputs(links)}


class DeclaredChain(Chain):
    """An operator that its schema says in post-ops: of one tensor, or of several that are stretched to the first."""

    def links(self) -> tuple[Array, list[PostOp], Operands]:
        rule = type(self).schema.post_ops
        entries = rule(self.arguments, self.input(0).meta, len(self.input_blobs)) if rule else None
        links = [parse_post_op(entry, self.label) for entry in entries or ()]
        return self.x(0), links, {index: self.x(index) for index in _inputs(links)}


class BinaryOperator(DeclaredChain):
    """Two tensors, of which one is stretched to the other."""

    def links(self) -> tuple[Array, list[PostOp], Operands]:
        """A sum or a product may start from either tensor."""
        a, links, operands = super().links()
        b, y = operands[1].reshape(operand_views(self.call())[1]), self.y(0)
        if a.shape != y.shape and links[0].kind in ("add", "mul"):
            a, b = b, a
        return a, links, {1: b}


@operator(prelu.PRelu.schema, engine="ONEDNN")
class PRelu(OneDNNOperator, prelu.PRelu):
    """Relu with a learned slope for negative values, by a kernel of our own."""

    repeats = True
    metas = (FLOAT32,)

    def prepare_primitive(self) -> Step:
        """One chain of one link. Raises UnsupportedFeatureError where there is no kernel."""
        x, slope, call = self.x(0), self.x(1), self.call()
        view = slope.reshape(prelu.slope_view(x.shape, slope.shape, channel_axis(call), call))
        chain = [(PRELU, 0.0, 0.0, 0)]
        step = chain_step(self.onednn.machine, chain, x, self.y(0), [view], self.label)
        if step is None:
            raise UnsupportedFeatureError(f"{self.label}: there is no kernel for these tensors")
        return step


@operator(arithmetic.Pow.schema, engine="ONEDNN")
class Pow(OneDNNOperator, arithmetic.Pow):
    """Powers that are products and roots, by a kernel of our own."""

    metas = (FLOAT32,)

    def prepare_primitive(self) -> Step:
        """One chain of one link. Raises UnsupportedFeatureError for an exponent that a run decides, and for others."""
        exponents = self.x(1) if len(self.input_blobs) == 2 else np.asarray(self.arguments.float("exponent", 1.0))
        if exponents.size != 1 or (len(self.input_blobs) == 2 and self.input(1).constant is None):
            raise UnsupportedFeatureError(f"{self.label}: the kernel takes one constant exponent")
        chain = [("pow", 1.0, float(exponents.reshape(())), -1)]
        step = chain_step(self.onednn.machine, chain, self.x(0), self.y(0), (), self.label)
        if step is None:
            raise UnsupportedFeatureError(f"{self.label}: there is no kernel for this power")
        return step


@completes
def register_declared(op_type: str) -> None:
    """Register an operator that its schema says in post-ops; not as a power where NumPy has a quotient or a product."""
    schema = schema_of(op_type)
    count = min(schema.inputs[1], 2)
    entries = schema.post_ops(Arguments(NOTHING, op_type), FLOAT32, count) if schema.post_ops else None
    if not entries or any(entry.startswith("pow:") for entry in entries):
        return
    default = operator_class(op_type)
    bases = (BinaryOperator if schema.inputs == (2, 2) else DeclaredChain, default)
    members = {"__doc__": default.__doc__, "__module__": __name__}
    operator(schema, engine="ONEDNN")(type(default.__name__, bases, members))
