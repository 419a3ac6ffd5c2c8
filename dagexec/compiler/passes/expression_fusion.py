"""expression-fusion: regions of element-wise operators become one `FusedExpression`, which is one kernel.

Chains are for `elementwise_fusion`; here branches meet. A region grows from an operator backwards, over all those of
its shape whose results only the region reads: a gate and what it lets through, the sum of several products, a function
of a tensor and of its square. Numbers become part of the expression. A region is fused where a kernel has registers.
"""

from __future__ import annotations

from functools import cached_property

from dagexec.compiler.passes.draft import Draft
from dagexec.compiler.passes.fusion import FUSED_CHAIN, post_ops_of
from dagexec.compiler.passes.post_operations import Types, operands_fit, scalar_value
from dagexec.compiler.passes.rewriting import Pass
from dagexec.compiler.passes.types import BlobType
from dagexec.core.dtypes import FLOAT32
from dagexec.core.expressions import MOST_LINES, Expression, apply, as_lines, element, inputs_of, number, with_inputs
from dagexec.core.node import Node, new_node
from dagexec.core.registry import operator_class
from dagexec.core.schema import OpSchema
from dagexec.ops.base.elementwise_operator import Elementwise
from dagexec.ops.base.expressed import expression_of
from dagexec.ops.engines.onednn.binding import library
from dagexec.ops.families.activation.post_ops import SUM, as_post_ops
from dagexec.ops.kernels.expression_kernels import ExpressionFormula, has_kernel
from dagexec.ops.kernels.formulas import formula_kernel

MOST_INPUTS = 8
"""Addresses of a kernel, beside those of the result and of what it counts by."""

_IMAGE_RANK = 4  # from which on layouts move channels

_JOINS = {
    "add": "add",
    SUM: "add",
    "mul": "multiply",
    "sub": "subtract",
    "div": "divide",
    "max": "maximum",
    "min": "minimum",
}
"""Post-ops of two operands, as primitives."""


def edit(draft: Draft) -> None:
    """Fuse regions, from the end of the list on."""
    regions = _Regions(draft)
    for sink in reversed(draft.having(_may_join)):
        if sink in draft:
            regions.fuse_into(sink)


def _may_join(schema: OpSchema) -> bool:
    """It is an expression of elements, or post-ops say it."""
    if schema.post_ops is not None or schema.type == FUSED_CHAIN:
        return True
    return (
        schema.formula is not None and schema.inputs == (1, 1) and issubclass(operator_class(schema.type), Elementwise)
    )


class _Regions:
    """The fusions of one net."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft

    @cached_property
    def _types(self) -> Types:
        return self._draft.types()

    def fuse_into(self, sink: int) -> None:
        """Fuse the region that ends with operator `sink`, if it has a neighbor in it."""
        draft = self._draft
        if not self._is_member(sink) or all(self._joins(name, {sink}) is None for name in draft[sink].input):
            return
        kind = self._types.get(draft[sink].output[0])
        if kind is None or kind.meta is not FLOAT32:
            return
        region = self._region(sink, kind)
        inputs: dict[str, Expression] = {}
        expression = self._expression(draft[sink].output[0], region, kind, inputs)
        if len(region) < 2 or expression is None or not _fits(expression, len(inputs)):
            return
        definition = draft[sink]
        draft.changed(
            f"{len(region)} operators up to {draft.label(sink)} become one expression of {len(inputs)} inputs"
        )
        nodes = as_lines(expression)
        fused = new_node("FusedExpression", list(inputs), definition.output, name=definition.name, nodes=nodes)
        draft.replace(sink, fused)
        for member in region - {sink}:
            draft.remove(member)

    def _region(self, sink: int, kind: BlobType) -> set[int]:
        """Operators before `sink` whose results, of its type, the region alone reads, as far as a kernel might go."""
        draft, region, more, size = self._draft, set[int](), {sink}, 0
        while more:
            size += sum(self._size(member) for member in more)
            if size > MOST_LINES:
                break
            region |= more
            names = [name for member in more for name in draft[member].input]
            more = {
                producer
                for name in names
                for producer in [self._joins(name, region)]
                if producer is not None and self._types.get(name) == kind
            }
        return region

    def _size(self, number_: int) -> int:
        local = self._local(self._draft[number_])
        return MOST_LINES if local is None else local.size

    def _joins(self, name: str, region: set[int]) -> int | None:
        """The operator that computes a blob that only the region reads, if it may be a member."""
        draft = self._draft
        producer = draft.producer(name)
        if producer is None or producer in region or name in draft.outputs or not set(draft.readers(name)) <= region:
            return None
        return producer if self._is_member(producer) else None

    def _is_member(self, number_: int) -> bool:
        draft = self._draft
        definition = draft[number_]
        if len(definition.output) != 1 or definition.output[0] in definition.input or not draft.is_free(number_):
            return False
        return self._local(definition) is not None

    def _local(self, definition: Node) -> Expression | None:
        """What an operator computes, from elements of its inputs; None for what is no expression of numbers."""
        if definition.type == FUSED_CHAIN:
            post_ops = post_ops_of(definition)
        else:
            kind = self._types.get(definition.input[0]) if definition.input else None
            if kind is None or kind.meta is not FLOAT32:
                return None
            default = operator_class(definition.type)
            if issubclass(default, Elementwise):
                return expression_of(default.formula, definition.arguments(), FLOAT32)
            post_ops = as_post_ops(definition, FLOAT32) or ()
        if not post_ops or any(post_op.kind == SUM for post_op in post_ops):
            return None
        value = element(0)
        for post_op in post_ops:
            if post_op.input < 0:
                value = post_op.expression(value)
            else:
                value = apply(_JOINS[post_op.kind], value, element(post_op.input))
        return value

    def _expression(
        self, name: str, region: set[int], kind: BlobType, inputs: dict[str, Expression]
    ) -> Expression | None:
        """What the region computes of a blob; its inputs are numbered as they are met. None where one does not fit."""
        draft = self._draft
        producer = draft.producer(name)
        if producer not in region or producer is None:
            return self._input(name, kind, inputs)
        definition = draft[producer]
        local = self._local(definition)
        operands = [self._types.get(one) for one in definition.input]
        if local is None or not operands_fit(definition, operands, kind):
            return None
        parts = [self._expression(one, region, kind, inputs) for one in definition.input]
        if None in parts:
            return None
        known = {element(position): part for position, part in enumerate(parts) if part is not None}
        return with_inputs(local, {one: known[one] for one in map(element, inputs_of(local))})

    def _input(self, name: str, kind: BlobType, inputs: dict[str, Expression]) -> Expression | None:
        value = scalar_value(self._draft, name)
        if value is not None:
            return number(value)
        if kind.rank >= _IMAGE_RANK and self._types.get(name) != kind:
            return None
        return inputs.setdefault(name, element(len(inputs)))


def _fits(expression: Expression, count: int) -> bool:
    """True where a kernel can be written for the expression of so many whole inputs."""
    positions = tuple(range(count))
    if not 0 < count <= MOST_INPUTS or tuple(inputs_of(expression)) != positions or not has_kernel(expression):
        return False
    if len(as_lines(expression)) > MOST_LINES:
        return False
    found = library()
    if found is None or not found.machine.can_run:
        return False
    formula = ExpressionFormula((expression,), positions)
    return formula_kernel(formula, 1, tuple(range(1, 1 + count)), found.machine.lanes) is not None


PASS = Pass("expression-fusion", "Regions of element-wise operators become one kernel.", edit, needs=(_may_join,))
