"""What all fusions do once they know what to fuse: write the fused operator's def, or add to that of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from dagexec.compiler.passes.draft import Draft, copied
from dagexec.compiler.passes.post_operations import FUSED_TYPES, MAX_POST_OPS, Link
from dagexec.core.arguments import make_argument
from dagexec.core.dtypes import TypeMeta, from_numpy
from dagexec.core.proto import OperatorDef
from dagexec.core.registry import schema_of
from dagexec.ops.activation.post_ops import PostOp, parse_post_op

FUSED_CONVOLUTION = "FusedConv"
FUSED_PRODUCT = "FusedFC"
FUSED_CHAIN = "FusedElementwise"


def post_ops_of(definition: OperatorDef) -> list[PostOp]:
    """The post-ops that an operator has already."""
    texts = [text.decode() for argument in definition.arg if argument.name == "post_ops" for text in argument.strings]
    return [parse_post_op(text, definition.type) for text in texts]


def layer_meta(draft: Draft, number: int) -> TypeMeta | None:
    """The element type of a layer that takes post-ops: a convolution or FC on the host, of float32 or float64."""
    definition = draft[number]
    if not schema_of(definition.type).fused and definition.type not in (FUSED_CONVOLUTION, FUSED_PRODUCT):
        return None
    if not draft.is_free(number):
        return None
    weights = draft.constant(definition.input[1])
    meta = None if weights is None else from_numpy(np.dtype(weights.dtype))
    return meta if meta in FUSED_TYPES else None


def has_room(definition: OperatorDef, links: Sequence[Link]) -> bool:
    """True when an operator may take so many post-ops more."""
    return len(post_ops_of(definition)) + len(links) <= MAX_POST_OPS


def fused(definition: OperatorDef, links: Sequence[Link], output: str) -> OperatorDef:
    """`definition` with `links` on its result, which becomes blob `output`; their operands become further inputs."""
    changed = copied(definition)
    fused_type = schema_of(definition.type).fused
    if fused_type == FUSED_CONVOLUTION and len(definition.input) > 2:
        changed.arg.append(make_argument("bias", 1))
    changed.type = fused_type or definition.type
    post_ops = post_ops_of(definition)
    for link in links:
        if not link.operand:
            post_ops.append(link.post_op)
            continue
        post_ops.append(replace(link.post_op, input=len(changed.input)))
        changed.input.append(link.operand)
    kept = [argument for argument in changed.arg if argument.name != "post_ops"]
    del changed.arg[:]
    changed.arg.extend([*kept, make_argument("post_ops", [str(post_op) for post_op in post_ops])])
    changed.output[:] = [output]
    return changed


def described(links: Sequence[Link]) -> str:
    """The links in a change: their kinds."""
    return ", ".join(link.post_op.kind for link in links)
