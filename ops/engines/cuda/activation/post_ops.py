"""Post-ops on CUDA: what is done to a product or convolution before it is written, in one kernel with its bias."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from dagexec.core.operator import Step, nothing_to_do
from dagexec.ops.base.blocks import compute_dtype
from dagexec.ops.engines.cuda.base.expression import elementwise
from dagexec.ops.engines.cuda.base.operator import Array, CudaOperator
from dagexec.ops.families.activation.post_ops import PostOp

FUNCTIONS = {
    "relu": "nan_max(v, A(0))",
    "leaky_relu": "leaky_relu(v, {a})",
    "clip": "clipped(v, {a}, {b})",
    "sigmoid": "logistic(v)",
    "tanh": "tanh(v)",
    "elu": "elu(v, {a})",
    "swish": "swish(v, {a})",
    "hardswish": "hard_swish(v)",
    "hardsigmoid": "hard_sigmoid(v, {a}, {b})",
    "gelu_erf": "gelu_erf(v)",
    "gelu_tanh": "gelu_tanh(v)",
    "abs": "fabs(v)",
    "sqrt": "sqrt(v)",
    "square": "v * v",
    "exp": "exp(v)",
    "log": "log(v)",
    "linear": "{a} * v + {b}",
    "pow": "{a} * pow(v, {b})",
    "softplus": "softplus(v)",
    "mish": "mish(v)",
    "add": "v + {o}",
    "sum": "v + {o}",
    "mul": "v * {o}",
    "sub": "v - {o}",
    "div": "v / {o}",
    "max": "nan_max(v, {o})",
    "min": "nan_min(v, {o})",
}
"""The C++ of every post-op on value v of type A; {a} and {b} are its numbers, {o} is its operand's element."""


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
    work = compute_dtype(target.dtype).type
    inputs: dict[str, Array] = {"x": product}
    scalars: dict[str, np.generic] = {}
    lines = ["A v = x;"]
    if bias is not None:
        inputs["bias"] = bias
        lines.append("v = v + bias;")
    for number, post_op in enumerate(post_ops):
        names = {"a": f"a{number}", "b": f"b{number}", "o": f"operand{post_op.input}"}
        formula = FUNCTIONS[post_op.kind]
        if "{a}" in formula:
            scalars[names["a"]] = work(post_op.a)
        if "{b}" in formula:
            scalars[names["b"]] = work(post_op.b)
        if post_op.input >= 0 and operands is not None:
            inputs[names["o"]] = operands[post_op.input]
        lines.append(f"v = {formula.format(**names)};")
    lines.append("y = v;")
    return elementwise(owner, "epilogue", inputs, {"y": target}, "\n        ".join(lines), scalars)
