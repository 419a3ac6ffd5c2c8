"""From an integer sum to the output: scaled, with an addend and an activation, and made an integer again.

Everything is counted in units of the output's scale, as float32 operations in this order:

    v = float32(sum) * ((x_scale * w_scale) / y_scale)
    post_ops, one after the other, on v
    Y = saturate(round(v) + y_zero_point), rounded to the nearest integer, ties to even; or Y = v, for a float32 output

A float32 output has y_scale 1 and y_zero_point 0. `add:I` adds (input I - add_zero_point) * (add_scale / y_scale).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import numpy as np

from dagexec.core.dtypes import FLOAT32, TypeMeta
from dagexec.core.operator import Operator, Step
from dagexec.core.schema import OperatorCall
from dagexec.errors import ArgumentError
from dagexec.ops.families.activation.post_ops import PostOp, read_post_ops
from dagexec.ops.families.quantized.linear import saturate_passes
from dagexec.ops.families.quantized.scales import BYTES, Array, scale_argument, type_named, zero_point_argument
from dagexec.platform.records import dataclass

OUTPUT_ARGS = {
    "to": "Y's type: float32 (default), uint8 or int8",
    "y_scale": "Y's scale, for a Y of integers",
    "y_zero_point": "Y's zero point (default 0)",
}
POST_OPS_ARGS = {
    "post_ops": "applied in order: relu, leaky_relu:alpha, clip:low:high (in real numbers), add:I, which adds input I",
    "add_scale": "the scale of a quantized addend (default 1)",
    "add_zero_point": "its zero point (default 0)",
}
INPUT_ARGS = {"x_scale": "X's scale", "x_zero_point": "X's zero point (default 0)"}

POST_OPS = ("relu", "leaky_relu", "clip", "add")
"""The kinds of `ops.post_ops` that integers allow: those that scaling commutes with, and one addend."""


@dataclass(frozen=True, slots=True)
class Requantization:
    """How a sum becomes the output.

    Attributes:
        y: the output's type.
        y_scale, y_zero_point: its scale and zero point; 1 and 0 for float32.
        post_ops: what happens in between; at most one of them is `add`.
        add_scale, add_zero_point: of the addend.
    """

    y: TypeMeta
    y_scale: np.float32
    y_zero_point: int
    post_ops: tuple[PostOp, ...]
    add_scale: np.float32
    add_zero_point: int

    @property
    def addend(self) -> int | None:
        """The input that is added; None without one."""
        return next((op.input for op in self.post_ops if op.kind == "add"), None)


def read_requantization(call: OperatorCall, shape: tuple[int, ...], first_extra: int) -> Requantization:
    """The arguments of an operator with output `shape`; extra inputs begin at index `first_extra`.

    Raises ArgumentError or ShapeError for scales, zero points, post-ops and addends that make no sense.
    """
    meta = type_named(call, "to", FLOAT32, (FLOAT32, *BYTES))
    if meta is FLOAT32 and ("y_scale" in call.arguments or "y_zero_point" in call.arguments):
        raise ArgumentError(f"{call.label}: y_scale and y_zero_point require integer output; give `to` as well")
    if meta is not FLOAT32 and "y_scale" not in call.arguments:
        raise ArgumentError(f"{call.label}: argument 'y_scale' is required for a Y of {meta}")
    post_ops = quantized_post_ops(call)
    extras = [op.input for op in post_ops if op.kind == "add"]
    if extras != list(range(first_extra, len(call.inputs))) or len(extras) > 1:
        raise call.fail(f"post_ops must add every input from {first_extra} on, one at most; they add {extras}")
    addend_meta = FLOAT32
    if extras:
        addend_meta = call.require_types(extras[0], FLOAT32, *BYTES)
        call.require_shape(extras[0], shape, "the output's shape")
        if addend_meta is FLOAT32 and "add_scale" in call.arguments:
            raise ArgumentError(f"{call.label}: argument 'add_scale' requires an integer addend")
    return Requantization(
        meta,
        scale_argument(call, "y_scale"),
        zero_point_argument(call, "y_zero_point", meta),
        post_ops,
        scale_argument(call, "add_scale"),
        zero_point_argument(call, "add_zero_point", addend_meta),
    )


def quantized_post_ops(call: OperatorCall) -> tuple[PostOp, ...]:
    """Argument `post_ops`. Raises ArgumentError for what is none, and for a kind that is not in POST_OPS."""
    post_ops = read_post_ops(call)
    for op in post_ops:
        if op.kind not in POST_OPS or (op.kind == "leaky_relu" and not math.isfinite(op.a)):
            raise ArgumentError(
                f"{call.label}: post_ops: {str(op)!r} is not supported for integers; expected {POST_OPS}"
            )
    return post_ops


def multiplier_steps(target: Array, x_scale: np.float32, w_scale: Array, y_scale: np.float32) -> list[Step]:
    """Steps that compute (x_scale * w_scale) / y_scale, one entry or one for each output channel."""
    return [
        partial(np.multiply, w_scale.reshape(target.shape), x_scale, out=target),
        partial(np.divide, target, y_scale, out=target),
    ]


def output_steps(owner: Operator, what: Requantization, values: Array, y: Array) -> list[Step]:
    """Steps from `values`, v in float32 (overwritten), to `y`. Both have the output's shape and may be one array."""
    steps: list[Step] = []
    for op in what.post_ops:
        steps += _post_op_steps(owner, what, op, values)
    if what.y is FLOAT32:
        return steps if values is y else [*steps, partial(np.copyto, y, values)]
    return steps + saturate_passes(values, np.asarray(what.y_zero_point, np.float32), what.y, y)


def clip_bounds(clip: PostOp, unit: np.float32) -> tuple[np.float32, np.float32]:
    """The bounds of a clip in units of `unit`; the largest number, which is no bound, may become infinity."""
    with np.errstate(over="ignore"):
        return np.float32(np.float32(clip.a) / unit), np.float32(np.float32(clip.b) / unit)


def _post_op_steps(owner: Operator, what: Requantization, op: PostOp, values: Array) -> list[Step]:
    if op.kind == "add":
        addend = owner.x(op.input)
        scaled = owner.scratch(addend.shape, np.float32)
        return [
            partial(np.subtract, addend, np.float32(what.add_zero_point), out=scaled, dtype=np.float32),
            partial(np.multiply, scaled, np.float32(what.add_scale / what.y_scale), out=scaled),
            partial(np.add, values, scaled, out=values),
        ]
    zero = np.float32(0)
    if op.kind == "relu":
        return [partial(np.maximum, values, zero, out=values)]
    if op.kind == "clip":
        low, high = clip_bounds(op, what.y_scale)
        return [partial(np.maximum, values, low, out=values), partial(np.minimum, values, high, out=values)]
    negative = owner.scratch(values.shape, np.float32)
    return [
        partial(np.minimum, values, zero, out=negative),
        partial(np.multiply, negative, np.float32(op.a), out=negative),
        partial(np.maximum, values, zero, out=values),
        partial(np.add, values, negative, out=values),
    ]


def scaled_sum_steps(sums: Array, bias: Array | None, multiplier: Array, values: Array) -> list[Step]:
    """Steps for v = float32(sums + bias) * multiplier, in `values`; `bias` and `multiplier` broadcast to `sums`.

    The sum with the bias is exact: it is computed in float64 and rounded to float32 once.
    """
    steps: list[Step] = []
    if bias is not None:
        steps.append(partial(np.add, sums, bias, out=values, dtype=np.float64, casting="unsafe"))
    elif sums is not values:
        steps.append(partial(np.copyto, values, sums, casting="unsafe"))
    return [*steps, partial(np.multiply, values, multiplier, out=values)]


def check_bias(call: OperatorCall, index: int, entries: int, metas: Sequence[TypeMeta]) -> None:
    """Raise ShapeError unless input `index` has one of `metas` and one entry for each output channel."""
    call.require_types(index, *metas)
    call.require_shape(index, (entries,), "one entry for each output channel")
