"""Post-ops that are done behind a product: the library computes them too coarsely, or would drop NaN unseen, or there
is no library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

import numpy as np

from dagexec.core.operator import Step, in_sequence
from dagexec.ops.engines.onednn.descriptors import Array
from dagexec.ops.engines.onednn.operator import OneDNNOperator
from dagexec.ops.families.activation.post_ops import PostOp, post_op_passes
from dagexec.ops.kernels.chains import chain_step
from dagexec.ops.kernels.conversions import convert_step
from dagexec.ops.kernels.function_kernels import GELU, gelu_step


def finishing_step(owner: OneDNNOperator, post_ops: Sequence[PostOp], y: Array, operands: Mapping[int, Array]) -> Step:
    """The step that does `post_ops` to `y`, in place: the exact GELU by machine code, others by NumPy.

    `operands` are by input number. Code computes in float32, so 16 bits are widened before it and rounded behind it.
    Without oneDNN one kernel does all, where it can.
    """
    if post_ops and not owner.onednn.has_primitives:
        order = list(operands)
        links = [(one.kind, one.a, one.b, order.index(one.input) if one.input >= 0 else -1) for one in post_ops]
        step = chain_step(owner.onednn.machine, links, y, y, list(operands.values()), owner.label)
        if step is not None:
            return step
    steps: list[Step] = []
    for is_gelu, group in groupby(post_ops, lambda one: one.kind == GELU):
        alike = list(group)
        kernels = _gelu(owner, y) if is_gelu else None
        own = {one.input: operands[one.input] for one in alike if one.input >= 0}
        steps += kernels * len(alike) if kernels is not None else [post_op_passes(owner, alike, y, y, own)]
    return in_sequence(steps)


def _gelu(owner: OneDNNOperator, y: Array) -> list[Step] | None:
    """Its steps; None where there are no kernels for `y`."""
    machine, label = owner.onednn.machine, owner.label
    values = y if y.dtype == np.float32 else owner.scratch(y.shape, np.float32)
    steps = [gelu_step(machine, values, values, label)]
    if values is not y:
        steps = [
            convert_step(machine, y, values, label),
            *steps,
            convert_step(machine, values, y, label),
        ]
    found = [step for step in steps if step is not None]
    return found if len(found) == len(steps) else None
