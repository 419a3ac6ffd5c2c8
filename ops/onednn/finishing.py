"""Post-ops that are done behind a primitive, as the library computes them too coarsely or would drop NaN unseen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

from dagexec.core.operator import Step, in_sequence
from dagexec.ops.activation.post_ops import PostOp, post_op_passes
from dagexec.ops.kernels.function_kernels import GELU, gelu_step
from dagexec.ops.onednn.operator import OneDNNOperator
from dagexec.ops.onednn.primitive import Array


def finishing_step(owner: OneDNNOperator, post_ops: Sequence[PostOp], y: Array, operands: Mapping[int, Array]) -> Step:
    """The step that does `post_ops` to `y`, in place: the exact GELU by machine code, others by NumPy.

    `operands` are by input number.
    """
    steps: list[Step] = []
    for is_gelu, group in groupby(post_ops, lambda one: one.kind == GELU):
        links = list(group)
        kernel = gelu_step(owner.onednn.machine, owner.threads, y, y, owner.label) if is_gelu else None
        own = {one.input: operands[one.input] for one in links if one.input >= 0}
        steps += [kernel] * len(links) if kernel is not None else [post_op_passes(owner, links, y, y, own)]
    return in_sequence(steps)
