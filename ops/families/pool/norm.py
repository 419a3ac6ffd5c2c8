"""LpPool, the p-norm of each window, and its gradient.

With S the sum of |x|^p over a window, Y = S^(1/p). By the chain rule dY/dx = (1/p) S^(1/p - 1) * p |x|^(p-1) sign(x)
= sign(x) |x|^(p-1) / Y^(p-1), so dX = sign(x) |x|^(p-1) * (the sum over the pixel's windows of dY / Y^(p-1)): the sum
is that of average pooling. Where Y is 0 or x is 0 the gradient is 0, which is right for p > 1; for p <= 1, where there
is none, it lies between the gradients of both sides.

|x|^p is computed in the type of the data (16-bit floats in float32) and must not overflow in it.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np

from dagexec.core.dtypes import FLOAT_TYPES
from dagexec.core.operator import Step, in_sequence, nothing_to_do
from dagexec.core.rows import along_axis
from dagexec.core.schema import OperatorCall, OpSchema, TensorType
from dagexec.core.traits import ImageRole
from dagexec.errors import ArgumentError
from dagexec.ops.base.blocks import compute_dtype
from dagexec.ops.base.geometry import POOL_ARGS
from dagexec.ops.base.layout import ImageOperator
from dagexec.ops.families.pool.reduction import Pooling
from dagexec.ops.families.pool.spreading import spread
from dagexec.ops.families.pool.window import (
    RANKS,
    Array,
    as_images,
    image_blocks,
    infer_gradient,
    is_whole,
    of_input,
    of_output,
    pool_window,
    pooled_type,
    pooling_cost,
    register_pooling,
)
from dagexec.platform.records import dataclass


def read_exponent(call: OperatorCall) -> float:
    """Argument p. Raises ArgumentError unless it is finite and above 0."""
    exponent = call.arguments.float("p", 2.0)
    if not 0 < exponent < math.inf:
        raise ArgumentError(f"{call.label}: argument 'p' must be a finite number above 0, found {exponent}")
    return exponent


class NormPooling(Pooling):
    """The p-norm of each window; padding counts as zeros."""

    def prepare(self) -> Step:
        """Powers, sums along one axis after the other, and the root."""
        exponent = read_exponent(self.call())
        work = compute_dtype(self.x(0).dtype)

        def load(source: Array, target: Array) -> list[Step]:
            if exponent == 2:
                return [partial(np.square, source, out=target, dtype=work)]
            absolute = partial(np.absolute, source, out=target, dtype=work)
            return [absolute] if exponent == 1 else [absolute, partial(np.power, target, work.type(exponent), target)]

        def finish(found: Array, target: Array) -> Step:
            if exponent == 1:
                return partial(np.copyto, target, found, casting="same_kind")
            if exponent == 2:
                return partial(np.sqrt, found, out=target, casting="same_kind")
            return partial(np.power, found, work.type(1 / exponent), out=target, casting="same_kind")

        return self.reduce(np.add, 0, work, finish, load)


@dataclass(frozen=True)
class _Terms:
    """What the gradient is made of, for exponent p and the type to compute in."""

    exponent: float
    work: np.dtype[Any]

    def quotients(self, y: Array, dy: Array, place: Array, power: Array, defined: Array) -> list[Step]:
        """place = dy / y^(p-1), 0 where y is 0."""
        work, exponent = self.work, self.exponent
        if exponent == 1:
            return [partial(np.copyto, place, dy)]
        steps: list[Step] = [partial(np.copyto, power, y), partial(np.not_equal, power, 0, out=defined)]
        if exponent != 2:
            steps.append(partial(np.power, power, work.type(exponent - 1), out=power, where=defined))
        return [*steps, partial(place.fill, 0), partial(np.divide, dy, power, out=place, dtype=work, where=defined)]

    def products(self, x: Array, found: Array, dx: Array, factor: Array, nonzero: Array) -> list[Step]:
        """dx = sign(x) |x|^(p-1) * found, 0 where x is 0."""
        work, exponent = self.work, self.exponent
        product = partial(np.multiply, factor, found, out=dx, casting="same_kind")
        if exponent == 2:
            return [partial(np.multiply, x, found, out=dx, dtype=work, casting="same_kind")]
        if exponent == 1:
            return [partial(np.sign, x, out=factor, dtype=work), product]
        return [
            partial(np.absolute, x, out=factor, dtype=work),
            partial(np.not_equal, factor, 0, out=nonzero),
            partial(np.power, factor, work.type(exponent - 1), out=factor, where=nonzero),
            partial(np.copysign, factor, x, out=factor, dtype=work),
            product,
        ]


class NormPoolingGradient(ImageOperator):
    """dX = sign(x) |x|^(p-1) * the sum over the pixel's windows of dY / Y^(p-1)."""

    def prepare(self) -> Step:
        """Quotients, sums along one axis after the other, and a product."""
        work = compute_dtype(self.x(0).dtype)
        terms = _Terms(read_exponent(self.call()), work)
        window, axes = pool_window(self.call())
        x, y, dy, dx = (as_images(array, window) for array in (self.x(0), self.x(1), self.x(2), self.y(0)))
        if not dx.size:
            return nothing_to_do
        blocks = image_blocks(len(dx), math.prod(dx.shape[1:]))
        count = blocks[0].stop
        factor = self.scratch((count, *dx.shape[1:]), work)
        nonzero = self.scratch(factor.shape, np.bool_)
        quotient = self.scratch((count, *y.shape[1:]), work)
        defined = self.scratch(quotient.shape, np.bool_)

        def values(piece: slice, place: Array) -> list[Step]:
            some = slice(0, piece.stop - piece.start)
            return terms.quotients(y[piece], dy[piece], place, quotient[some], defined[some])

        def sums(piece: slice, found: Array) -> list[Step]:
            some = slice(0, piece.stop - piece.start)
            return terms.products(x[piece], found, dx[piece], factor[some], nonzero[some])

        if is_whole(axes):
            steps: list[Step] = []
            spare = self.scratch(quotient.shape, work)
            for piece in blocks:
                place = spare[: piece.stop - piece.start]
                steps += [*values(piece, place), *sums(piece, place)]
            return in_sequence(steps)
        return spread(self, dx.shape, axes, work, values, sums)


def _infer(call: OperatorCall) -> list[TensorType]:
    pooled = pooled_type(call, FLOAT_TYPES)
    read_exponent(call)
    return [pooled]


_ARGS = POOL_ARGS | {"p": "the exponent, a float above 0 (default 2)"}

register_pooling(
    NormPooling,
    [
        OpSchema(
            f"LpPool{rank}",
            infer=_infer,
            doc="Y = (sum |x|^p)^(1/p) over each window of X (N, C, spatial, or N, spatial, C with order NHWC); "
            "padding counts as zeros.",
            input_names=("X",),
            output_names=("Y",),
            args=_ARGS,
            cost=pooling_cost(2, of_output),
            image_role=ImageRole.POOLING,
        )
        for rank in RANKS
    ],
)
register_pooling(
    NormPoolingGradient,
    [
        OpSchema(
            f"LpPool{rank}Gradient",
            infer=infer_gradient(_infer),
            doc=f"Gradient of LpPool{rank}: dX = sign(x) |x|^(p-1) * the sum over the pixel's windows of "
            "dY / Y^(p-1); 0 where Y or x is 0.",
            input_names=("X", "Y", "dY"),
            output_names=("dX",),
            args=_ARGS,
            cost=pooling_cost(2, of_input),
            rows=along_axis(0, 0, 1, 2),
        )
        for rank in RANKS
    ],
)
