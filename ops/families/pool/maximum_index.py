"""MaxPoolWithIndex, whose second output says where each maximum was, and its gradient.

The index is that of the first maximum in the row-major order of the window's taps, or of the first NaN where the
maximum is NaN; -1 for a window with no pixel, which dilation makes possible. It counts the pixels of one image plane,
in the order of the spatial axes (h * W + w), as the int32 mask of Caffe2's operator does, or with `flat_indices` all
elements of X as N, C, spatial, as the int64 Indices of ONNX's MaxPool do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import numpy as np

from dagexec.core.dtypes import FLOAT_TYPES, INT32, INT64, NUMBER_TYPES
from dagexec.core.operator import Step, in_sequence, nothing_to_do
from dagexec.core.rows import along_axis
from dagexec.core.rows_call import RowsCall
from dagexec.core.schema import OperatorCall, OpSchema, TensorType
from dagexec.core.traits import Rows
from dagexec.errors import ArgumentError
from dagexec.ops.base.blocks import compute_dtype, is_narrow
from dagexec.ops.base.geometry import POOL_ARGS, Axis
from dagexec.ops.base.layout import ImageOperator
from dagexec.ops.families.index.indexing import check_indices
from dagexec.ops.families.pool.maximum import MaxPooling
from dagexec.ops.families.pool.phases import Phases, part, split_phases
from dagexec.ops.families.pool.window import (
    RANKS,
    Array,
    as_images,
    image_blocks,
    is_whole,
    of_input,
    of_output,
    pool_window,
    pooled_type,
    pooling_cost,
    register_pooling,
)
from dagexec.platform.records import dataclass


def pixel_pitches(call: OperatorCall, sizes: Sequence[int]) -> list[int]:
    """How far apart, in the mask's numbers, neighbors along each spatial axis are. Raises ArgumentError."""
    storage_order = call.arguments.int("storage_order", 0)
    if storage_order not in (0, 1) or (storage_order and not call.arguments.bool("flat_indices")):
        raise ArgumentError(
            f"{call.label}: argument 'storage_order' must be 0, or 1 with flat_indices=1, found {storage_order}"
        )
    if storage_order:
        return [math.prod(sizes[:number]) for number in range(len(sizes))]
    return [math.prod(sizes[number + 1 :]) for number in range(len(sizes))]


@dataclass(frozen=True, slots=True)
class FirstTap:
    """The search of a block of windows for the first tap that has the maximum.

    Attributes:
        taps: the phase and the shift of each tap.
        pixels: the row of each phase.
        maxima: the maximum of each window.
        first: the result for each window: the number of taps from the one found to the last, 0 when none is.
        code, equal: working memory of the size of a row, or larger.
        image: for each phase, which places of its row hold a pixel of the image; None when all do that windows read.
    """

    taps: Sequence[tuple[int, int]]
    pixels: Array
    maxima: Array
    first: Array
    code: Array
    equal: Array
    image: Array | None

    def of_maximum(self) -> list[Step]:
        """The steps that search all windows but those whose maximum is NaN, which they leave at 0."""
        steps: list[Step] = [partial(self.first.fill, 0)]
        for tap, (phase, shift) in enumerate(self.taps):
            row = self.pixels[phase, shift:]
            steps.append(partial(np.equal, row, self.maxima[: len(row)], out=self.equal[: len(row)]))
            steps += self._keep(tap)
        return steps

    def of_nan(self) -> list[Step]:
        """The steps that, after those, search the windows whose maximum is NaN."""
        steps: list[Step] = []
        for tap, (phase, shift) in enumerate(self.taps):
            row = self.pixels[phase, shift:]
            steps.append(partial(np.not_equal, row, row, out=self.equal[: len(row)]))
            steps += self._keep(tap)
        return steps

    def _keep(self, tap: int) -> list[Step]:
        """The steps that keep a tap where `equal` is true, unless there is one before it."""
        phase, shift = self.taps[tap]
        length = len(self.maxima) - shift
        equal, code, first = self.equal[:length], self.code[:length], self.first[:length]
        dtype = first.dtype
        steps: list[Step] = []
        if self.image is not None:
            steps.append(partial(np.logical_and, equal, self.image[phase, shift : shift + length], out=equal))
        steps.append(partial(np.multiply, equal, dtype.type(len(self.taps) - tap), out=code, dtype=dtype))
        return [*steps, partial(np.maximum, first, code, out=first)]


class IndexedMaxPooling(MaxPooling):
    """The maximum of each window, and where it is."""

    def prepare(self) -> Step:
        """The maxima, then for each tap a comparison of all windows with the pixels it reads."""
        call = self.call()
        window, axes = pool_window(call)
        sizes = [axis.size for axis in axes]
        pitches = pixel_pitches(call, sizes)
        x, y, mask = (as_images(array, window) for array in (self.x(0), self.y(0), self.y(1)))
        if not y.size:
            return nothing_to_do
        maxima = self.maxima()
        steps = (
            self._whole(x, mask, axes, pitches)
            if is_whole(axes)
            else self._by_phase(x, y, mask, [axis.trimmed() for axis in axes], pitches)
        )
        if call.arguments.bool("flat_indices"):
            batch, channels = self.x(0).shape[0], window.channels(self.x(0).shape)
            firsts = np.arange(batch * channels, dtype=np.int64) * math.prod(sizes)
            firsts = firsts.reshape(mask.shape[0], *(1 for _ in axes), *mask.shape[1 + len(axes) :])
            steps.append(partial(np.add, mask, firsts, out=mask))
        return in_sequence([maxima, *steps, *_mark_empty(mask, axes)])

    def _whole(self, x: Array, mask: Array, axes: Sequence[Axis], pitches: Sequence[int]) -> list[Step]:
        """The one window is the image."""
        rank, pixels = len(axes), math.prod(axis.size for axis in axes)
        planes = x.reshape(len(x), pixels, -1).transpose(0, 2, 1)
        numbers = sum(
            np.arange(axis.size).reshape(-1, *(1,) * (rank - 1 - index)) * pitch
            for index, (axis, pitch) in enumerate(zip(axes, pitches, strict=True))
        )
        table = np.asarray(numbers, mask.dtype).reshape(-1)
        places = self.scratch(planes.shape[:2], np.intp)
        targets = mask.reshape(places.shape)
        steps: list[Step] = []
        if planes.shape[1] == 1 and not is_narrow(x.dtype):
            steps.append(partial(np.argmax, planes, axis=2, out=places))
        else:
            blocks = image_blocks(len(x), math.prod(planes.shape[1:]))
            turned = self.scratch((blocks[0].stop, *planes.shape[1:]), compute_dtype(x.dtype))
            for piece in blocks:
                stage = turned[: len(planes[piece])]
                steps.append(partial(np.copyto, stage, planes[piece]))
                steps.append(partial(np.argmax, stage, axis=2, out=places[piece]))
        return [*steps, partial(np.take, table, places, out=targets, mode="clip")]

    def _by_phase(self, x: Array, y: Array, mask: Array, axes: Sequence[Axis], pitches: Sequence[int]) -> list[Step]:
        work = compute_dtype(x.dtype)
        phases = split_phases(axes, x.shape[1 + len(axes) :])
        number, size = len(phases.phases), phases.elements
        code_type = np.min_scalar_type(len(phases.taps))
        blocks = image_blocks(len(x), number * size)
        count = blocks[0].stop
        pixels = self.scratch((number, count, *phases.shape), work)
        maxima = self.scratch((count, *phases.shape), work)
        pixels.fill(0)
        maxima.fill(0)
        firsts, codes = (self.scratch((count, *phases.shape), code_type) for _ in range(2))
        equal = self.scratch((count * size,), np.bool_)
        places = self.scratch((count, *mask.shape[1:]), np.intp)
        image = _image_places(phases, count) if phases.reads_padding else None
        starts, table = _numbers(axes, mask, pitches)
        steps: list[Step] = []
        for piece in blocks:
            some = slice(0, piece.stop - piece.start)
            search = FirstTap(
                taps=phases.taps,
                pixels=pixels[:, some].reshape(number, -1),
                maxima=maxima[some].reshape(-1),
                first=firsts[some].reshape(-1),
                code=codes[some].reshape(-1),
                equal=equal,
                image=image,
            )
            for index, phase in enumerate(phases.phases):
                inside = part(pixels[index, some], phase.inside)
                steps.append(partial(np.copyto, inside, part(x[piece], phase.pixels)))
            steps.append(partial(np.copyto, part(maxima[some], phases.windows), y[piece]))
            steps += search.of_maximum()
            if x.dtype.kind not in "iu":
                steps.append(partial(_if_nan, y[piece].reshape(-1), in_sequence(search.of_nan())))
            steps.append(partial(np.copyto, places[some], part(firsts[some], phases.windows)))
            steps.append(partial(np.take, table, places[some], out=mask[piece], mode="clip"))
            steps.append(partial(np.add, mask[piece], starts, out=mask[piece]))
        return steps


def _numbers(axes: Sequence[Axis], mask: Array, pitches: Sequence[int]) -> tuple[Array, Array]:
    """The number of each window's first tap, which may lie outside, and how far from it is the tap of each code."""
    rank = len(axes)
    starts = np.zeros((), np.int64)
    steps = np.zeros((), np.int64)
    for axis, pitch in zip(axes, pitches, strict=True):
        starts = starts[..., None] + (np.arange(axis.out) * axis.stride - axis.head) * pitch
        steps = steps[..., None] + np.arange(axis.kernel) * axis.dilation * pitch
    starts = starts.reshape(*starts.shape, *(1 for _ in mask.shape[1 + rank :]))
    table = np.append(0, steps.reshape(-1)[::-1])
    return starts.astype(mask.dtype), table.astype(mask.dtype)


def _mark_empty(mask: Array, axes: Sequence[Axis]) -> list[Step]:
    """The step that writes -1 for windows with no pixel, if there are any."""
    empty = np.zeros((), np.bool_)
    for axis in axes:
        empty = empty[..., None] | (np.asarray(axis.window_sizes(with_padding=False)) == 0)
    if not empty.any():
        return []
    empty = empty.reshape(*empty.shape, *(1 for _ in mask.shape[1 + len(axes) :]))
    return [partial(np.copyto, mask, -1, where=empty)]


def _image_places(phases: Phases, count: int) -> Array:
    """For each phase, along the row of `count` images, which places hold a pixel of an image."""
    found = np.zeros((len(phases.phases), count, *phases.shape), np.bool_)
    for index, phase in enumerate(phases.phases):
        part(found[index], phase.inside)[...] = True
    return found.reshape(len(found), -1)


def _if_nan(row: Array, step: Step) -> None:
    """Run `step` when some element is not a number."""
    largest = np.maximum.reduce(row)
    if largest != largest:
        step()


class IndexedMaxPoolingGradient(ImageOperator):
    """Each pixel gets dY of the windows whose index is its own, in the order of the windows.

    Sums have one place more, at the end, for each plane or for all: there, from the front, goes index -1.
    """

    def prepare(self) -> Step:
        """A check of the indices, then sums at them."""
        call = self.call()
        window, axes = pool_window(call)
        if not self.y(0).size:
            return nothing_to_do
        mask, pixels = self.x(2), math.prod(axis.size for axis in axes)
        if call.arguments.bool("flat_indices"):
            check = partial(check_indices, mask, -1, self.y(0).size, self.label)
            return in_sequence([check, *self._flat(window.channels_last, [axis.size for axis in axes])])
        check = partial(check_indices, mask, -1, pixels, self.label)
        arrays = (as_images(array, window) for array in (self.x(1), mask, self.y(0)))
        dy, mask, dx = (array.reshape(len(array), -1, math.prod(array.shape[1 + len(axes) :])) for array in arrays)
        return in_sequence([check, *self._by_plane(dy, mask, dx)])

    def _by_plane(self, dy: Array, mask: Array, dx: Array) -> list[Step]:
        """Arrays of images, pixels (or windows) and channels."""
        work = compute_dtype(dx.dtype)
        _, pixels, channels = dx.shape
        blocks = image_blocks(len(dx), (pixels + 1) * channels)
        count = blocks[0].stop
        sums = self.scratch((count, pixels + 1, channels), work)
        places = self.scratch((count, *dy.shape[1:]), np.intp)
        weights = self.scratch((count, *dy.shape[1:]), work)
        firsts = np.arange(count)[:, None, None] * ((pixels + 1) * channels) + np.arange(channels)
        steps: list[Step] = []
        for piece in blocks:
            some = slice(0, len(dx[piece]))
            steps += [
                partial(np.multiply, mask[piece], channels, out=places[some], dtype=np.intp),
                partial(np.add, places[some], firsts[some], out=places[some]),
                partial(np.copyto, weights[some], dy[piece]),
                partial(sums[some].fill, 0),
                partial(np.add.at, sums[some].reshape(-1), places[some].reshape(-1), weights[some].reshape(-1)),
                partial(np.copyto, dx[piece], sums[some, :pixels], casting="same_kind"),
            ]
        return steps

    def _flat(self, channels_last: bool, sizes: list[int]) -> list[Step]:
        """Indices into the whole tensor: all sums at once."""
        dy, mask, dx = self.x(1), self.x(2), self.y(0)
        work = compute_dtype(dx.dtype)
        sums = self.scratch((dx.size + 1,), work)
        channels = dx.shape[-1 if channels_last else 1]
        planes = (dx.shape[0], channels)
        if self.arguments.int("storage_order", 0):
            image = sums[:-1].reshape(*planes, *reversed(sizes)).transpose(0, 1, *range(len(sizes) + 1, 1, -1))
        else:
            image = sums[:-1].reshape(*planes, *sizes)
        if channels_last:
            image = np.moveaxis(image, 1, -1)
        steps: list[Step] = [partial(sums.fill, 0)]
        weights = dy.reshape(-1)
        if work != dy.dtype:
            weights = self.scratch((dy.size,), work)
            steps.append(partial(np.copyto, weights, dy.reshape(-1)))
        steps.append(partial(np.add.at, sums, mask.reshape(-1), weights))
        return [*steps, partial(np.copyto, dx, image, casting="same_kind")]


def _infer(call: OperatorCall) -> list[TensorType]:
    pooled = pooled_type(call, NUMBER_TYPES)
    _, axes = pool_window(call)
    sizes = [axis.size for axis in axes]
    pixel_pitches(call, sizes)
    if call.arguments.bool("flat_indices"):
        return [pooled, TensorType(pooled.shape, INT64)]
    if math.prod(sizes) > np.iinfo(np.int32).max:
        raise call.fail(f"an int32 index cannot count {math.prod(sizes)} pixels; flat_indices=1 gives int64 ones")
    return [pooled, TensorType(pooled.shape, INT32)]


def _infer_gradient(call: OperatorCall) -> list[TensorType]:
    call.require_types(0, *FLOAT_TYPES)
    for index, (name, expected) in enumerate(zip(("dY", "mask"), _infer(call), strict=True), 1):
        call.require_shape(index, expected.shape, f"{name}: what pooling X gives")
        call.require_types(index, expected.meta)
    return [call.inputs[0]]


def _rows(asked: RowsCall) -> Sequence[Rows | None]:
    """Images on axis 0 of all inputs. Raises RowsError where the mask has indices into the whole X."""
    if asked.call.arguments.bool("flat_indices"):
        raise asked.refuse("indices count through all rows")
    return along_axis(0, *range(len(asked.rows)))(asked)


_ARGS = POOL_ARGS | {
    "flat_indices": "0: int32 pixel numbers within an image plane, as Caffe2's; 1: int64 indices into the whole X as "
    "N, C, spatial, as ONNX's (default 0)",
    "storage_order": "1, with flat_indices: the last spatial axis is the slowest, as ONNX's (default 0)",
}

register_pooling(
    IndexedMaxPooling,
    [
        OpSchema(
            f"MaxPoolWithIndex{rank}",
            infer=_infer,
            doc="Y = the maximum of each window of X (N, C, spatial, or N, spatial, C with order NHWC); mask = the "
            "index of the first pixel of the window that has it (or is NaN, where Y is), -1 for a window with none.",
            input_names=("X",),
            output_names=("Y", "mask"),
            args=_ARGS,
            cost=pooling_cost(2, of_output),
            rows=_rows,
        )
        for rank in RANKS
    ],
)
register_pooling(
    IndexedMaxPoolingGradient,
    [
        OpSchema(
            f"MaxPoolWithIndex{rank}Gradient",
            infer=_infer_gradient,
            doc=f"Gradient of MaxPoolWithIndex{rank}: dX = for each pixel the sum of dY over the windows whose mask is "
            "its index; -1 is nowhere. The values of X are not read.",
            input_names=("X", "dY", "mask"),
            output_names=("dX",),
            args=_ARGS,
            cost=pooling_cost(1, of_input),
            rows=_rows,
        )
        for rank in RANKS
    ],
)
