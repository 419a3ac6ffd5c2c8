"""Chains of element-wise operators as one kernel: functions of one tensor, and operands that broadcast to it.

A chain is a sequence of links, as post-ops are (`ops/families/activation/post_ops.py`). All of them are computed in
registers: a tensor is read once and written once, however long the chain is. Operands are read as they lie: of the
shape of the result, one number for each row, or one row for all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy.typing as npt

from dagexec.core.operator import Step
from dagexec.ops.kernels import elementary, post_ops
from dagexec.ops.kernels.builder import Builder, Vector
from dagexec.ops.kernels.formulas import formula_step
from dagexec.ops.kernels.machine import Machine
from dagexec.platform.records import dataclass

Array = npt.NDArray[Any]

Link = tuple[str, float, float, int]
"""What is done: its kind, two numbers, and the place of its operand among those of the chain, or -1."""

PRELU = "prelu"
"""x where it is positive, else x times the operand: a link beside those of post-ops."""


def _maximum(build: Builder, x: Vector, other: Vector) -> Vector:
    """NaN where one of them is."""
    return build.select(build.is_nan(x), x, build.maximum(x, other))


def _minimum(build: Builder, x: Vector, other: Vector) -> Vector:
    return build.select(build.is_nan(x), x, build.minimum(x, other))


def _power(build: Builder, x: Vector, factor: float, exponent: float) -> Vector:
    value = elementary.power(build, x, exponent)
    assert value is not None, "`is_known` says which exponents there are"
    return value if factor == 1 else value * factor


BINARY: Mapping[str, Callable[[Builder, Vector, Vector], Vector]] = {
    "add": lambda build, x, other: x + other,
    "sum": lambda build, x, other: x + other,
    "mul": lambda build, x, other: x * other,
    "sub": lambda build, x, other: x - other,
    "div": lambda build, x, other: x / other,
    "max": _maximum,
    "min": _minimum,
    PRELU: lambda build, x, other: build.select(build.less(x, 0.0), x * other, x),
}

FUNCTIONS: Mapping[str, Callable[[Builder, Vector, float, float], Vector]] = {
    **post_ops.FUNCTIONS,
    "elu": lambda build, x, a, b: elementary.elu(build, x, a),
    "abs": lambda build, x, a, b: build.absolute(x),
    "sqrt": lambda build, x, a, b: build.square_root(x),
    "square": lambda build, x, a, b: x * x,
    "exp": lambda build, x, a, b: elementary.exp(build, x),
    "log": lambda build, x, a, b: elementary.log(build, x),
    "pow": _power,
    "softplus": lambda build, x, a, b: elementary.softplus(build, x),
}


def is_known(link: Link) -> bool:
    """True where there is code for a link."""
    kind, _, exponent, _ = link
    return kind in BINARY or (kind in FUNCTIONS and (kind != "pow" or elementary.has_power(exponent)))


def chain_step(
    machine: Machine,
    links: Sequence[Link],
    x: Array,
    y: Array,
    operands: Sequence[Array],
    label: str,
) -> Step | None:
    """The step that applies `links` to float32 `x`, of the shape of `y`, which may be `x`; operands broadcast to it.

    None where the kernels do not serve: other processors, links, types or strides, or operands that `y` overwrites.
    """
    if not all(map(is_known, links)):
        return None
    return formula_step(machine, _Chain(tuple(links)), (x, *operands), (y,), label)


@dataclass(frozen=True)
class _Chain:
    """A chain as a formula, of x and the operands."""

    links: tuple[Link, ...]

    def __call__(self, build: Builder, read: Callable[[int], Vector]) -> list[Vector]:
        value = read(0)
        for kind, a, b, operand in self.links:
            if kind in BINARY:
                value = BINARY[kind](build, value, read(1 + operand))
            else:
                value = FUNCTIONS[kind](build, value, a, b)
        return [value]
