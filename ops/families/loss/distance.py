"""Distances and similarities of rows of two tensors: SquaredL2Distance, L1Distance, DotProduct, CosineSimilarity."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from dagexec.core.operator import Step
from dagexec.ops.base.blocks import Array, Scratch
from dagexec.ops.base.passes import scalar_pass
from dagexec.ops.families.loss.rows import (
    RowGradient,
    RowLoss,
    gradient_after_inputs,
    inner_product,
    row_gradient_operator,
    row_loss_operator,
)

_PAIR, _WITH_GRADIENT, _BOTH = ("X", "Y"), ("X", "Y", "dZ"), ("dX", "dY")
_EQUAL = 1e-12  # of L1Distance: elements that differ by no more have no gradient, as in Caffe2
_MIN_SQUARE = 1e-12  # of CosineSimilarity: the least square of a length, as in Caffe2


@row_loss_operator("SquaredL2Distance", _PAIR, "Z = half the sum of (X - Y)^2 over each row, of the first axis.")
class SquaredL2Distance(RowLoss):
    """Half the squared Euclidean distance."""

    def passes(self, sources: Sequence[Array], z: Array, scratch: Scratch) -> list[Step]:
        """The difference, and its inner product with itself."""
        difference = scratch(0, sources[0].shape)
        return [
            partial(np.subtract, *sources, out=difference),
            inner_product(difference, difference, z),
            scalar_pass(np.multiply, z, 0.5, z),
        ]


@row_gradient_operator("SquaredL2DistanceGradient", _WITH_GRADIENT, _BOTH)
class SquaredL2DistanceGradient(RowGradient):
    """dX = dZ * (X - Y), dY = -dX."""

    def passes(self, sources: Sequence[Array], dz: Array, targets: Sequence[Array], scratch: Scratch) -> list[Step]:
        dx, dy = targets
        return [
            partial(np.subtract, *sources, out=dx),
            partial(np.multiply, dx, dz, out=dx),
            partial(np.negative, dx, out=dy),
        ]


@row_loss_operator("L1Distance", _PAIR, "Z = the sum of |X - Y| over each row, of the first axis.")
class L1Distance(RowLoss):
    """Sum of absolute differences."""

    def passes(self, sources: Sequence[Array], z: Array, scratch: Scratch) -> list[Step]:
        difference = scratch(0, sources[0].shape)
        return [
            partial(np.subtract, *sources, out=difference),
            partial(np.absolute, difference, out=difference),
            partial(np.add.reduce, difference, axis=1, out=z),
        ]


@row_gradient_operator("L1DistanceGradient", _WITH_GRADIENT, _BOTH)
class L1DistanceGradient(RowGradient):
    """dX = dZ * sign(X - Y), 0 where they differ by no more than 1e-12; dY = -dX."""

    def passes(self, sources: Sequence[Array], dz: Array, targets: Sequence[Array], scratch: Scratch) -> list[Step]:
        """The sign of the difference, times 1 where it counts."""
        dx, dy = targets
        size = scratch(0, dx.shape)
        return [
            partial(np.subtract, *sources, out=dx),
            partial(np.absolute, dx, out=size),
            scalar_pass(np.greater, size, _EQUAL, size),
            partial(np.sign, dx, out=dx),
            partial(np.multiply, dx, size, out=dx),
            partial(np.multiply, dx, dz, out=dx),
            partial(np.negative, dx, out=dy),
        ]


@row_loss_operator("DotProduct", _PAIR, "Z = the sum of X * Y over each row, of the first axis.")
class DotProduct(RowLoss):
    """Inner product."""

    def passes(self, sources: Sequence[Array], z: Array, scratch: Scratch) -> list[Step]:
        return [inner_product(sources[0], sources[1], z)]


@row_gradient_operator("DotProductGradient", _WITH_GRADIENT, _BOTH)
class DotProductGradient(RowGradient):
    """dX = dZ * Y, dY = dZ * X."""

    def passes(self, sources: Sequence[Array], dz: Array, targets: Sequence[Array], scratch: Scratch) -> list[Step]:
        x, y = sources
        return [partial(np.multiply, y, dz, out=targets[0]), partial(np.multiply, x, dz, out=targets[1])]


def _length_passes(x: Array, out: Array) -> list[Step]:
    """The passes that write the length of each row, at least 1e-6, to the vector `out`."""
    return [
        inner_product(x, x, out),
        scalar_pass(np.maximum, out, _MIN_SQUARE, out),
        partial(np.sqrt, out, out=out),
    ]


@row_loss_operator(
    "CosineSimilarity",
    _PAIR,
    "Z = the inner product of X and Y over each row, of the first axis, divided by their lengths; a length counts "
    "as 1e-6 at least.",
)
class CosineSimilarity(RowLoss):
    """Cosine of the angle between rows."""

    def passes(self, sources: Sequence[Array], z: Array, scratch: Scratch) -> list[Step]:
        x, y = sources
        length = scratch(0, z.shape)
        return [
            inner_product(x, y, z),
            *_length_passes(x, length),
            partial(np.divide, z, length, out=z),
            *_length_passes(y, length),
            partial(np.divide, z, length, out=z),
        ]


@row_gradient_operator("CosineSimilarityGradient", _WITH_GRADIENT, _BOTH)
class CosineSimilarityGradient(RowGradient):
    """dX = dZ / |X| * (Y / |Y| - Z * X / |X|), and dY likewise."""

    def passes(self, sources: Sequence[Array], dz: Array, targets: Sequence[Array], scratch: Scratch) -> list[Step]:
        """Unit rows, their inner product, and what of each is across the other."""
        x, y = sources
        dx, dy = targets
        rows = len(x)
        lengths = scratch(0, (rows, 1)), scratch(1, (rows, 1))
        cosine = scratch(2, (rows, 1))
        unit_x, unit_y = scratch(3, x.shape), scratch(4, x.shape)
        steps: list[Step] = []
        for source, length, unit in ((x, lengths[0], unit_x), (y, lengths[1], unit_y)):
            steps += [*_length_passes(source, length[:, 0]), partial(np.divide, source, length, out=unit)]
        steps.append(inner_product(unit_x, unit_y, cosine[:, 0]))
        for one, other, length, target in ((unit_x, unit_y, lengths[0], dx), (unit_y, unit_x, lengths[1], dy)):
            steps += [
                partial(np.multiply, one, cosine, out=target),
                partial(np.subtract, other, target, out=target),
                partial(np.divide, target, length, out=target),
                partial(np.multiply, target, dz, out=target),
            ]
        return steps


for _loss in ("SquaredL2Distance", "L1Distance", "DotProduct", "CosineSimilarity"):
    gradient_after_inputs(_loss, (0, 1))
