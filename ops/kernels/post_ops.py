"""Post-ops without another operand, by the names of `ops.activation.post_ops`, for kernels to do to their results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache, partial

from dagexec.ops.kernels import elementary
from dagexec.ops.kernels.builder import Builder, Mask, Scalar, Vector, fitting, within
from dagexec.platform.assembly.native import Assembler

TEMPORARIES = 7
"""Vectors that they need beside the one that they change."""

PostOp = tuple[str, float, float]
"""Its kind and two numbers."""

ADD_OTHER = "add"
"""The kind that adds another tensor, which kernels of their own read."""


def _hard_swish(build: Builder, x: Vector) -> Vector:
    return x * elementary.hard_sigmoid(build, x, 1 / 6, 0.5)


FUNCTIONS: Mapping[str, Callable[[Builder, Vector, float, float], Vector]] = {
    "relu": lambda build, x, a, b: build.maximum(0.0, x),
    "leaky_relu": lambda build, x, a, b: elementary.leaky_relu(build, x, a),
    "clip": lambda build, x, a, b: elementary.clip(build, x, a, b),
    "sigmoid": lambda build, x, a, b: elementary.near_sigmoid(build, x),
    "tanh": lambda build, x, a, b: elementary.tanh(build, x),
    "swish": lambda build, x, a, b: elementary.near_swish(build, x, a),
    "hardsigmoid": lambda build, x, a, b: elementary.hard_sigmoid(build, x, a, b),
    "hardswish": lambda build, x, a, b: _hard_swish(build, x),
    "gelu_erf": lambda build, x, a, b: elementary.gelu(build, x),
    "gelu_tanh": lambda build, x, a, b: elementary.tanh_gelu(build, x),
    "linear": lambda build, x, a, b: build.fma(x, build.constant(a), b),
    "mish": lambda build, x, a, b: elementary.mish(build, x),
}
"""By kind."""


def post_op_within(lanes: int, free: list[int], post_op: PostOp) -> Callable[[Assembler, int], None]:
    """What writes it into the code of a kernel, for any vector; `free` are others. Raises OutOfRegistersError."""
    return within(lanes, free, partial(_of_numbers, *post_op))


def _of_numbers(kind: str, a: float, b: float, build: Builder, x: Vector) -> Vector:
    return FUNCTIONS[kind](build, x, a, b)


@lru_cache(maxsize=64)
def post_op_kernel(post_ops: tuple[PostOp, ...], lanes: int) -> int | None:
    """The address of a function of an array and its number of elements, which does them in place; None where it cannot
    run."""
    return fitting(partial(_on_array, post_ops, lanes)).function()


def _on_array(post_ops: tuple[PostOp, ...], lanes: int, together: int) -> Builder:
    build = Builder(lanes)
    array, count = build.arguments(2)

    def body(place: Scalar, mask: Mask | None) -> None:
        value = build.load(array, place, mask=mask)
        for kind, a, b in post_ops:
            value = FUNCTIONS[kind](build, value, a, b)
        build.store(value, array, place, mask=mask)

    build.each(count, body, together)
    return build
