"""Which operators are post-ops of another operator's result, for the fusions.

A link is what one element-wise operator does to one of its inputs, as entries of argument `post_ops` (see
`dagexec.ops.families.activation.post_ops`), whose operands are still blob names here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from dagexec.compiler.passes.draft import Draft
from dagexec.compiler.passes.types import BlobType
from dagexec.core.dtypes import BFLOAT16, FLOAT16, FLOAT32, FLOAT64, TypeMeta
from dagexec.core.node import Node
from dagexec.core.registry import schema_of
from dagexec.ops.families.activation.post_ops import COMMUTATIVE, PostOp, as_post_ops
from dagexec.platform.records import dataclass

MAX_POST_OPS = 32
"""As many as oneDNN's primitives take (`DNNL_POST_OPS_LIMIT`, 32 in all versions)."""

FUSED_TYPES = (FLOAT32, FLOAT64, BFLOAT16, FLOAT16)


@dataclass(frozen=True)
class Link:
    """One post-op, and the blob that its operand is, if it has one."""

    post_op: PostOp
    operand: str = ""


Types = Mapping[str, BlobType]


def unary_links(definition: Node, meta: TypeMeta) -> tuple[Link, ...]:
    """The links of an operator of one input and the type `meta`; none when it is not known as a post-op."""
    if len(definition.input) != 1 or len(definition.output) != 1 or meta not in FUSED_TYPES:
        return ()
    return tuple(map(Link, as_post_ops(definition, meta) or ()))


def is_function(definition: Node) -> bool:
    """True for an operator of one input that post-ops compute."""
    return bool(unary_links(definition, FLOAT32))


def is_sum(definition: Node) -> bool:
    """True for an operator that adds its inputs, and does nothing else to them."""
    post_ops = as_post_ops(definition) if len(definition.input) > 1 else None
    return bool(post_ops) and all(post_op.kind == "add" for post_op in post_ops or ())


def has_two_operands(definition: Node) -> bool:
    """True for an operator that never has more than two inputs, which may broadcast by Caffe2's older rule."""
    return schema_of(definition.type).inputs[1] == 2


def operand_links(draft: Draft, number: int, source: str, types: Types) -> tuple[Link, ...]:
    """The links of an operator of several inputs to `source`, whose shape its result has; none when it is no post-op.

    A constant of one element is part of the link where there is one for it; other operands must broadcast to `source`.
    """
    definition, kind = draft[number], types.get(source)
    if kind is None or kind.meta not in FUSED_TYPES or len(definition.output) != 1 or len(definition.input) < 2:
        return ()
    if len(definition.input) > MAX_POST_OPS + 1:  # asked for each of its inputs
        return ()
    post_ops = as_post_ops(definition, kind.meta)
    if not post_ops:
        return ()
    position = list(definition.input).index(source)
    others = [name for place, name in enumerate(definition.input) if place != position]
    if not operands_fit(definition, [types.get(name) for name in others], kind):
        return ()
    if has_two_operands(definition):
        [post_op] = post_ops
        scalar = scalar_value(draft, others[0])
        exact = _with_number(post_op.kind, position, scalar) if scalar is not None else ()
        return exact or _with_operand(post_op.kind, position, others[0])
    if position and any(post_op.input >= 0 and post_op.kind not in COMMUTATIVE for post_op in post_ops):
        return ()
    operands = iter(others)
    return tuple(
        Link(replace(post_op, input=-1), next(operands)) if post_op.input >= 0 else Link(post_op)
        for post_op in post_ops
    )


def operands_fit(definition: Node, operands: Sequence[BlobType | None], kind: BlobType) -> bool:
    """True when all operands have the type of `kind` and broadcast to it by NumPy's rule.

    Caffe2's older rule says the same where shapes are equal or B has one element.
    """
    arguments = definition.arguments()
    old_rule = has_two_operands(definition) and arguments.int("broadcast", 0)
    for operand in operands:
        if operand is None or operand.meta is not kind.meta or not operand.broadcasts_to(kind):
            return False
        if old_rule and operand.shapes != kind.shapes and any(math.prod(shape) != 1 for shape in operand.shapes):
            return False
    return True


def scalar_value(draft: Draft, name: str) -> float | None:
    """The finite value of a constant of one element; else None."""
    array = draft.constant(name)
    if array is None or array.size != 1:
        return None
    value = float(array.reshape(-1)[0])
    return value if math.isfinite(value) else None


def _with_number(kind: str, position: int, value: float) -> tuple[Link, ...]:
    """A binary post-op of the result at `position` and a number at the other place; none when no link does that."""
    if kind == "add":
        return (Link(PostOp("linear", 1.0, value)),)
    if kind == "sub":
        return (Link(PostOp("linear", 1.0, -value) if position == 0 else PostOp("linear", -1.0, value)),)
    if kind == "mul":
        return (Link(PostOp("linear", value, 0.0)),)
    if kind != "div":
        return ()
    if position == 1:
        return (Link(PostOp("pow", value, -1.0)),)
    return (Link(PostOp("linear", 1.0 / value, 0.0)),) if value and math.isfinite(1.0 / value) else ()


def _with_operand(kind: str, position: int, name: str) -> tuple[Link, ...]:
    if kind in COMMUTATIVE or position == 0:
        return (Link(PostOp(kind), name),)
    if kind == "sub":
        return Link(PostOp("linear", -1.0, 0.0)), Link(PostOp("add"), name)
    return Link(PostOp("pow", 1.0, -1.0)), Link(PostOp("mul"), name)
