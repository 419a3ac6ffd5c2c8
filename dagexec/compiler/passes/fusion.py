"""What all fusions do once they know what to fuse: write the fused operator's def, or add to that of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from dagexec.compiler.passes.draft import Draft
from dagexec.compiler.passes.post_operations import FUSED_TYPES, MAX_POST_OPS, Link
from dagexec.core.arguments import ArgumentValue
from dagexec.core.dtypes import TypeMeta, from_numpy
from dagexec.core.node import Node
from dagexec.core.registry import schema_of
from dagexec.core.schema import OpSchema
from dagexec.ops.families.activation.post_ops import PostOp, parse_post_op

FUSED_CONVOLUTION = "FusedConv"
FUSED_PRODUCT = "FusedFC"
FUSED_CHAIN = "FusedElementwise"


def post_ops_of(definition: Node) -> tuple[PostOp, ...]:
    """The post-ops that an operator has already."""
    return definition.values.once("post_ops", partial(_read, definition)) if "post_ops" in definition.values else ()


def _read(definition: Node) -> tuple[PostOp, ...]:
    return tuple([parse_post_op(text, definition.type) for text in definition.arguments().strings("post_ops")])


def takes_post_ops(schema: OpSchema) -> bool:
    """A layer that applies post-ops to its result, or that one takes the place of which does."""
    return bool(schema.fused) or schema.type in (FUSED_CONVOLUTION, FUSED_PRODUCT)


def layer_meta(draft: Draft, number: int) -> TypeMeta | None:
    """The element type of a layer that takes post-ops: a convolution or FC on the host, of float32 or float64."""
    definition = draft[number]
    if not (schema_of(definition.type).once(takes_post_ops) and draft.is_free(number)):
        return None
    weights = draft.constant(definition.input[1])
    meta = None if weights is None else from_numpy(np.dtype(weights.dtype))
    return meta if meta in FUSED_TYPES else None


def has_room(definition: Node, links: Sequence[Link]) -> bool:
    """True when an operator may take so many post-ops more."""
    return len(post_ops_of(definition)) + len(links) <= MAX_POST_OPS


def fused(definition: Node, links: Sequence[Link], output: str) -> Node:
    """`definition` with `links` on its result, which becomes blob `output`; their operands become further inputs."""
    fused_type = schema_of(definition.type).fused
    inputs, post_ops = list(definition.input), list(post_ops_of(definition))
    for link in links:
        if not link.operand:
            post_ops.append(link.post_op)
            continue
        post_ops.append(replace(link.post_op, input=len(inputs)))
        inputs.append(link.operand)
    arguments: dict[str, ArgumentValue | None] = {"post_ops": list(map(str, post_ops))}
    if fused_type == FUSED_CONVOLUTION and len(definition.input) > 2:
        arguments["bias"] = 1
    return definition.changed(
        op_type=fused_type or definition.type, inputs=inputs, outputs=[output], arguments=arguments
    )


def described(links: Sequence[Link]) -> str:
    """The links in a change: their kinds."""
    return ", ".join(link.post_op.kind for link in links)
