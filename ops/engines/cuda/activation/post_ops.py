"""Post-ops on CUDA: what is done to a product or convolution before it is written, in one kernel with its bias."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from dagexec.core.expressions import element
from dagexec.core.operator import Step, nothing_to_do
from dagexec.ops.engines.cuda.base.expressed import Statements
from dagexec.ops.engines.cuda.base.expression import computed_scalar, elementwise
from dagexec.ops.engines.cuda.base.operator import Array, CudaOperator
from dagexec.ops.families.activation.post_ops import PostOp

BINARY = {
    "add": "v + {o}",
    "sum": "v + {o}",
    "mul": "v * {o}",
    "sub": "v - {o}",
    "div": "v / {o}",
    "max": "nan_max(v, {o})",
    "min": "nan_min(v, {o})",
}
"""The C++ of post-ops on value v and {o}, the element of an operand."""


def epilogue(
    owner: CudaOperator,
    product: Array,
    target: Array,
    *,
    bias: Array | None = None,
    post_ops: Sequence[PostOp] = (),
    operands: Mapping[int, Array] | None = None,
) -> Step:
    """A step that leaves in `target` the `product` plus `bias`, with `post_ops` applied; one kernel, or none.

    All arrays broadcast to the target, which may be the product; `operands` are by input number. That of a `sum` may
    be the target itself. 16-bit floats are computed in float and rounded once.
    """
    if product is target and bias is None and not post_ops:
        return nothing_to_do
    inputs: dict[str, Array] = {"x": product}
    scalars: dict[str, np.generic] = {}
    lines = ["A v = x;"]
    if bias is not None:
        inputs["bias"] = bias
        lines.append("v = v + bias;")
    for number, post_op in enumerate(post_ops):
        if post_op.input < 0:
            statements = Statements(lambda _position: "v", f"t{number}_")
            result = statements.of(post_op.expression(element(0)))
            scalars |= {name: computed_scalar(target, value) for name, value in statements.scalars.items()}
            lines += [*statements.lines, f"v = {result};"]
            continue
        operand = f"operand{post_op.input}"
        if operands is not None:
            inputs[operand] = operands[post_op.input]
        lines.append(f"v = {BINARY[post_op.kind].format(o=operand)};")
    lines.append("y = v;")
    return elementwise(owner, "epilogue", inputs, {"y": target}, "\n        ".join(lines), scalars)
