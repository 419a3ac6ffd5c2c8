"""MaxPool and its gradient; `maximum_index` has the pair that remembers where the maximum was."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from dagexec.core.dtypes import NUMBER_TYPES
from dagexec.core.onnx_name import OnnxName
from dagexec.core.operator import Step, in_sequence, nothing_to_do
from dagexec.core.rows import along_axis
from dagexec.core.schema import OpSchema
from dagexec.core.traits import ImageRole
from dagexec.ops.base.blocks import compute_dtype
from dagexec.ops.base.geometry import POOL_ARGS, Axis
from dagexec.ops.base.layout import ImageOperator
from dagexec.ops.families.pool.phases import part, split_phases
from dagexec.ops.families.pool.reduction import Pooling
from dagexec.ops.families.pool.window import (
    RANKS,
    Array,
    as_images,
    image_blocks,
    infer_gradient,
    infer_pooling,
    is_whole,
    of_input,
    of_output,
    pool_window,
    pooling_cost,
    register_pooling,
)
from dagexec.platform.records import dataclass


class MaxPooling(Pooling):
    """The maximum of each window; padding never wins."""

    def prepare(self) -> Step:
        """Maxima along one axis after the other."""
        return self.maxima()

    def maxima(self) -> Step:
        """The step that computes Y, output 0."""
        dtype = self.x(0).dtype
        least: Any = np.iinfo(dtype).min if dtype.kind in "iu" else dtype.type(-np.inf)
        return self.reduce(np.maximum, least, dtype, lambda found, target: partial(np.copyto, target, found))


@dataclass(frozen=True, slots=True)
class Tap:
    """One tap of all windows of some images: rows of as many elements, one a window (and some that belong to none).

    Attributes:
        pixels: what the tap reads.
        maxima: Y of the window.
        weights: dY of the window.
        totals: where the gradients of the pixels are summed.
        first: nothing is there yet.
    """

    pixels: Array
    maxima: Array
    weights: Array
    totals: Array
    first: bool


class MaxPoolingGradient(ImageOperator):
    """Each pixel gets dY of every window whose maximum it equals, one of several or not, as Caffe2's.

    So every tap of every window is compared; a library that remembers one maximum a window, as torch does, is faster
    (some 5 times) and gives other gradients where pixels are alike, as zeros behind a Relu are. dY times the truth of a
    comparison is computed on the bits of dY as integers: it is then dY or zero also when dY is infinite or not a
    number.
    """

    def prepare(self) -> Step:
        """For each tap a comparison of all windows with the pixels it reads, and a sum."""
        window, axes = pool_window(self.call())
        x, y, dy, dx = (as_images(array, window) for array in (self.x(0), self.x(1), self.x(2), self.y(0)))
        if not dx.size:
            return nothing_to_do
        if is_whole(axes):
            return self._whole(x, y, dy, dx)
        return self._by_phase(x, y, dy, dx, tuple(axis.trimmed() for axis in axes))

    def _whole(self, x: Array, y: Array, dy: Array, dx: Array) -> Step:
        """The one window is the image: `y` and `dy` are broadcast over it."""
        bits = np.dtype(f"i{x.dtype.itemsize}")
        blocks = image_blocks(len(x), math.prod(x.shape[1:]))
        equal = self.scratch((blocks[0].stop, *x.shape[1:]), np.bool_)
        steps: list[Step] = []
        for piece in blocks:
            found = equal[: len(x[piece])]
            steps.append(partial(np.equal, x[piece], y[piece], out=found))
            steps.append(partial(np.multiply, dy[piece].view(bits), found, out=dx[piece].view(bits)))
        return in_sequence(steps)

    def _by_phase(self, x: Array, y: Array, dy: Array, dx: Array, axes: tuple[Axis, ...]) -> Step:
        work = compute_dtype(x.dtype)
        phases = split_phases(axes, x.shape[1 + len(axes) :])
        number, size = len(phases.phases), phases.elements
        blocks = image_blocks(len(x), number * size)
        count = blocks[0].stop
        pixels, sums = (self.scratch((number, count, *phases.shape), work) for _ in range(2))
        maxima, gradients = (self.scratch((count, *phases.shape), work) for _ in range(2))
        equal = self.scratch((count * size,), np.bool_)
        chosen = self.scratch((count * size,), work)
        sums_of: dict[int, list[Step]] = {}  # by the number of images of a block
        for array in (pixels, maxima, gradients):
            array.fill(0)
        steps: list[Step] = []
        for piece in blocks:
            some = slice(0, len(x[piece]))
            rows = pixels[:, some].reshape(number, -1)  # phases, elements of the piece
            totals = sums[:, some].reshape(number, -1)
            tops, weights = maxima[some].reshape(-1), gradients[some].reshape(-1)
            for index, phase in enumerate(phases.phases):
                inside = part(pixels[index, some], phase.inside)
                steps.append(partial(np.copyto, inside, part(x[piece], phase.pixels)))
            steps.append(partial(np.copyto, part(maxima[some], phases.windows), y[piece]))
            steps.append(partial(np.copyto, part(gradients[some], phases.windows), dy[piece]))
            taps: list[Tap] = []
            begun: set[int] = set()
            for index, shift in phases.taps:
                if shift and index not in begun:
                    steps.append(partial(totals[index].fill, 0))
                length = len(tops) - shift
                taps.append(Tap(rows[index, shift:], tops[:length], weights[:length], totals[index, shift:], not shift))
                begun.add(index)
            if len(x[piece]) not in sums_of:
                sums_of[len(x[piece])] = self.sums(taps, equal, chosen)
            steps += sums_of[len(x[piece])]
            if not phases.complete:
                steps.append(partial(dx[piece].fill, 0))
            for index, phase in enumerate(phases.phases):
                inside = part(sums[index, some], phase.inside)
                steps.append(partial(np.copyto, part(dx[piece], phase.pixels), inside, casting="same_kind"))
        return in_sequence(steps)

    def sums(self, taps: Sequence[Tap], equal: Array, chosen: Array) -> list[Step]:
        """The steps that add, for each tap in turn, the weights to the totals where the pixels equal the maxima.

        `equal` and `chosen` are working memory for as many elements as a tap has.
        """
        steps: list[Step] = []
        for tap in taps:
            length = len(tap.pixels)
            bits = np.dtype(f"i{tap.weights.itemsize}")
            found, product = equal[:length], tap.totals if tap.first else chosen[:length]
            steps.append(partial(np.equal, tap.pixels, tap.maxima, out=found))
            steps.append(partial(np.multiply, tap.weights.view(bits), found, out=product.view(bits)))
            if not tap.first:
                steps.append(partial(np.add, tap.totals, product, out=tap.totals))
        return steps


_infer = infer_pooling(NUMBER_TYPES)

register_pooling(
    MaxPooling,
    [
        OpSchema(
            f"MaxPool{rank}",
            infer=_infer,
            doc="Y = the maximum of each window of X (N, C, spatial, or N, spatial, C with order NHWC).",
            input_names=("X",),
            output_names=("Y",),
            args=POOL_ARGS,
            cost=pooling_cost(1, of_output),
            onnx=() if rank else (OnnxName("GlobalMaxPool", 22, fixed={"global_pooling": 1}),),
            image_role=ImageRole.POOLING,
            moves_elements=True,
        )
        for rank in RANKS
    ],
)
register_pooling(
    MaxPoolingGradient,
    [
        OpSchema(
            f"MaxPool{rank}Gradient",
            infer=infer_gradient(_infer),
            doc=f"Gradient of MaxPool{rank}, as Caffe2's: dX = for each pixel the sum of dY over those of its windows "
            "whose maximum Y it equals; several pixels of a window that equal it all get dY.",
            input_names=("X", "Y", "dY"),
            output_names=("dX",),
            args=POOL_ARGS,
            cost=pooling_cost(2, of_input),
            rows=along_axis(0, 0, 1, 2),
        )
        for rank in RANKS
    ],
)
