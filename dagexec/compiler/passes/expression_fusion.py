"""expression-fusion: regions of operators become one `FusedExpression`, or `FusedRows`, which is one kernel.

Chains are for `elementwise_fusion`; here branches meet. A region grows from an operator backwards, over all those of
its shape whose results only the region reads: a gate and what it lets through, the sum of several products, a function
of a tensor and of its square. Rows along the last axis may be joined in it, too: softmax and normalizations, whether
they are one operator or spelled out, with what is before and behind them. Numbers become part of the expression. A
region is fused where a kernel has registers.
"""

from __future__ import annotations

from dagexec.compiler.passes.draft import Draft
from dagexec.compiler.passes.fusion import FUSED_CHAIN, post_ops_of
from dagexec.compiler.passes.post_operations import Types, operands_fit, scalar_value
from dagexec.compiler.passes.rewriting import Pass
from dagexec.compiler.passes.types import BlobType
from dagexec.core.dtypes import FLOAT32
from dagexec.core.expressions import (
    MOST_LINES,
    Expression,
    apply,
    as_lines,
    element,
    inputs_of,
    number,
    with_inputs,
)
from dagexec.core.node import Node, new_node
from dagexec.core.registry import schema_of
from dagexec.core.schema import OperatorCall, OpSchema, TensorType
from dagexec.ops.engines.onednn.binding import engine_library
from dagexec.ops.families.activation.post_ops import SUM, as_post_ops
from dagexec.ops.families.elementwise.fused_expression import of_rows
from dagexec.ops.kernels.expression_kernels import ExpressionFormula, has_kernel
from dagexec.ops.kernels.formulas import formula_kernel
from dagexec.ops.kernels.row_expressions import row_kernel
from dagexec.ops.kernels.standardizing import LONG_ROW
from dagexec.platform.cached import cached_property

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


_ATTEMPTS = ((MOST_LINES, True), (48, True), (MOST_LINES, False))
"""How many lines a region may have, and whether it may have rows: less where no kernel has registers for more."""


def edit(draft: Draft) -> None:
    """Fuse regions, from the end of the list on; those with rows where there are some, else those of elements."""
    types: Types | None = None
    locals_: dict[int, Expression | None] = {}
    for sink in reversed(draft.having(_may_join)):
        if sink not in draft or not any(draft.producer(name) is not None for name in draft[sink].input):
            continue
        types = draft.types() if types is None else types
        kind = types.get(draft[sink].output[0])
        if kind is not None and kind.meta is FLOAT32:
            for most_lines, of_rows in _ATTEMPTS:
                region = _Region(draft, types, locals_, sink, kind, most_lines, of_rows)
                if region.fuse() or not region.of_rows:
                    break


def _may_join(schema: OpSchema) -> bool:
    """It says what it is as an expression, or as post-ops."""
    return schema.expression is not None or schema.post_ops is not None or schema.type == FUSED_CHAIN


class _Region:
    """The region that ends with operator `sink`, whose result is of type `kind`.

    Attributes:
        of_rows: it joins members of rows.
    """

    def __init__(
        self,
        draft: Draft,
        types: Types,
        locals_: dict[int, Expression | None],
        sink: int,
        kind: BlobType,
        most_lines: int,
        of_rows: bool,
    ) -> None:
        """`locals_`: what operators compute, as far as it is known. With `of_rows` members of rows may be joined."""
        self._draft, self._types, self._locals, self._sink, self._kind = draft, types, locals_, sink, kind
        self._most_lines, self.of_rows = most_lines, of_rows
        self._inputs: dict[str, Expression] = {}
        self._values: dict[str, Expression | None] = {}
        self._members = self._grown() if self._is_member(sink) else set()
        self.of_rows = any(local.joins_members for one in self._members if (local := self._local(one)) is not None)

    def fuse(self) -> bool:
        """Put one operator in the place of all; false, and nothing is done, where no kernel computes the region."""
        draft, definition = self._draft, self._draft[self._sink]
        expression = self._value(definition.output[0]) if len(self._members) > 1 else None
        if expression is None or not self._fits(expression):
            return False
        count, nodes = len(self._inputs), as_lines(expression)
        draft.changed(f"{len(self._members)} operators up to {draft.label(self._sink)} become one of {count} inputs")
        kind = "FusedRows" if self.of_rows else "FusedExpression"
        draft.replace(
            self._sink, new_node(kind, list(self._inputs), definition.output, name=definition.name, nodes=nodes)
        )
        self._locals[self._sink] = None
        for member in self._members - {self._sink}:
            draft.remove(member)
        return True

    @cached_property
    def _of_row(self) -> BlobType:
        """The type of what has one value a row."""
        return BlobType(self._kind.meta, tuple((*shape[:-1], 1)[: len(shape)] for shape in self._kind.shapes))

    def _grown(self) -> set[int]:
        """Operators whose results the region alone reads, as far as a kernel might go."""
        draft, region, more, size = self._draft, set[int](), {self._sink}, 0
        while more:
            size += sum(self._size(member) for member in more)
            if size > self._most_lines:
                break
            region |= more
            names = [name for member in more for name in draft[member].input]
            more = {producer for name in names for producer in [self._joined(name, region)] if producer is not None}
        return self._without_strangers(region) if self.of_rows else region

    def _without_strangers(self, region: set[int]) -> set[int]:
        """Without what has one value a row that the region has not joined: each element would compute it again."""
        draft = self._draft
        strangers = {-1}
        while strangers:
            strangers = {
                member
                for member in region - {self._sink}
                if not set(draft.readers(draft[member].output[0])) <= region or not self._follows(member, region)
            }
            region = region - strangers
        return region

    def _follows(self, member: int, region: set[int]) -> bool:
        """The result is of the region's shape, or follows from what the region joins."""
        draft, definition, local = self._draft, self._draft[member], self._local(member)
        if local is None or local.is_of_row or self._types.get(definition.output[0]) == self._kind:
            return True
        names = [definition.input[position] for position in inputs_of(local)]
        return all(draft.producer(name) in region or scalar_value(draft, name) is not None for name in names)

    def _size(self, member: int) -> int:
        local = self._local(member)
        return MOST_LINES if local is None else local.size

    def _joined(self, name: str, region: set[int]) -> int | None:
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
        kind = self._types.get(definition.output[0])
        if kind != self._kind and not (self.of_rows and kind == self._of_row):
            return False
        local = self._local(number_)
        if local is None or kind is None:
            return False
        operands = [self._types.get(definition.input[position]) for position in inputs_of(local)]
        if local.joins_members:
            return self.of_rows and operands[0] == self._kind and operands_fit(definition, operands, self._kind)
        return operands_fit(definition, operands, kind)

    def _local(self, number_: int) -> Expression | None:
        """What an operator computes, from elements of its inputs; None for what is no expression of numbers."""
        if number_ not in self._locals:
            self._locals[number_] = self._read(self._draft[number_])
        return self._locals[number_]

    def _read(self, definition: Node) -> Expression | None:
        if definition.type == FUSED_CHAIN:
            post_ops = post_ops_of(definition)
        else:
            kinds = [self._types.get(name) for name in definition.input]
            if not kinds or kinds[0] is None or kinds[0].meta is not FLOAT32:
                return None
            expression = self._stated(definition, kinds)
            if expression is not None:
                return expression
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

    def _stated(self, definition: Node, kinds: list[BlobType | None]) -> Expression | None:
        """What its schema says."""
        rule = schema_of(definition.type).expression
        types = tuple(TensorType(kind.shapes[0], kind.meta) for kind in kinds if kind is not None)
        if rule is None or len(types) < len(kinds):
            return None
        values = tuple(map(self._draft.constant, definition.input))
        return rule(OperatorCall(definition, definition.arguments(), types, values, definition.type))

    def _value(self, name: str) -> Expression | None:
        """What the region computes of a blob; its inputs are numbered as they are met. None where one does not fit."""
        if name not in self._values:
            producer = self._draft.producer(name)
            if producer is None or producer not in self._members:
                self._values[name] = self._input(name)
            else:
                self._values[name] = self._computed(producer)
        return self._values[name]

    def _computed(self, member: int) -> Expression | None:
        definition, local = self._draft[member], self._local(member)
        assert local is not None, "members are expressions"
        parts = {element(position): self._value(definition.input[position]) for position in inputs_of(local)}
        values = {one: part for one, part in parts.items() if part is not None}
        return with_inputs(local, values) if len(values) == len(parts) else None

    def _input(self, name: str) -> Expression | None:
        value = scalar_value(self._draft, name)
        if value is not None:
            return number(value)
        if self._kind.rank >= _IMAGE_RANK and self._types.get(name) != self._kind and not self.of_rows:
            return None
        return self._inputs.setdefault(name, element(len(self._inputs)))

    def _fits(self, expression: Expression) -> bool:
        """True where a kernel can be written for the expression."""
        positions, found = tuple(range(len(self._inputs))), engine_library()
        if not 0 < len(positions) <= MOST_INPUTS or tuple(inputs_of(expression)) != positions:
            return False
        if not has_kernel(expression, of_rows=self.of_rows) or len(as_lines(expression)) > MOST_LINES:
            return False
        if found is None or not found.machine.can_run:
            return False
        if not self.of_rows:
            formula = ExpressionFormula((expression,), positions)
            return formula_kernel(formula, 1, tuple(range(1, 1 + len(positions))), found.machine.lanes) is not None
        members = self._kind.shapes[0][-1]
        if not 0 < members < LONG_ROW:
            return False
        result = of_rows(expression, members, [self._types[name].shapes[0] for name in self._inputs])
        return row_kernel((result,), (False,), found.machine.lanes) is not None


PASS = Pass(
    "expression-fusion", "Regions of element-wise operators and of rows become one kernel.", edit, needs=(_may_join,)
)
