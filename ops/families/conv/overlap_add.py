"""How an image is cut for convolution by transforms: blocks, lengths of transforms, and what is computed together.

The choice depends on the geometry alone, by a formula of costs; `dagexec.ops.families.conv.fft` computes with it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product

from dagexec.ops.base.geometry import Axis
from dagexec.ops.families.conv.problem import ConvProblem
from dagexec.platform.records import dataclass

_ARENA = 4 << 20  # bytes of each of the two workspaces, while one row of blocks takes less
_CUTS_AN_OCTAVE = 3  # lengths of transforms that are compared

# Nanoseconds on one core for float32, of which only the ratios matter.
_TRANSFORM = 2.0  # a real element, along one axis, with its share of copies
_TRANSFORM_FAR = 4.0  # the same, in a workspace that does not stay in the cache
_START = 15.0  # a transform
_MULTIPLY = 0.1  # a complex product of the matrix product
_LOAD = 0.8  # a complex element of the filter
_CALL = 300.0  # one matrix product


@dataclass(frozen=True)
class Cut:
    """How one axis is cut into blocks.

    Attributes:
        axis: the axis with those taps only that lie inside the input for some window.
        taps: which taps of the filter these are.
        pixels: the pixels that they read.
        block: pixels of a block; the last one may have fewer.
        size: length of the transform.
    """

    axis: Axis
    taps: tuple[int, int]
    pixels: tuple[int, int]
    block: int
    size: int

    @property
    def count(self) -> int:
        """Number of pixels."""
        return self.pixels[1] - self.pixels[0]

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return -(-self.count // self.block)

    def windows(self, block: int) -> tuple[slice, slice]:
        """The windows that read a block, and where they are in its convolution with the filter turned round."""
        axis, reach = self.axis, self.axis.extent - 1
        start = self.pixels[0] + block * self.block
        length = min(self.block, self.pixels[1] - start)
        origin = start + axis.head - reach  # the window of stride 1 that is element 0 of the convolution
        first = max(0, -(-origin // axis.stride))
        last = min(axis.out - 1, (origin + length + reach - 1) // axis.stride)
        if last < first:
            return slice(0, 0), slice(0, 0)
        return slice(first, last + 1), slice(first * axis.stride - origin, last * axis.stride - origin + 1, axis.stride)


@dataclass(frozen=True)
class Sizes:
    """What the choice of a plan depends on.

    Attributes:
        itemsize: bytes of a complex element.
        converts: True when the arrays are of another type than the work dtype.
        constant: True when the spectra of the filters are kept.
        limit: bytes of workspace.
    """

    axes: tuple[Axis, ...]
    batch: int
    channels: int
    filters: int
    group: int
    itemsize: int
    converts: bool
    constant: bool
    limit: int

    @staticmethod
    def of(problem: ConvProblem) -> Sizes:
        """The sizes of a problem."""
        return Sizes(
            axes=problem.axes,
            batch=problem.batch,
            channels=problem.channels,
            filters=problem.filters,
            group=problem.group,
            itemsize=2 * problem.work.itemsize,
            converts=problem.work != problem.x.dtype,
            constant=problem.constant is not None,
            limit=problem.limit,
        )

    @property
    def filter_elements(self) -> int:
        """Filters times the channels of a group."""
        return self.filters * (self.channels // self.group)


@dataclass(frozen=True)
class OverlapAddPlan:
    """How a problem is divided: the cut of each axis, and the images and rows of blocks that are computed together.

    Attributes:
        arena: complex elements of each of the two workspaces.
        elements: complex elements of all memory, with the spectra of the filters.
    """

    cuts: tuple[Cut, ...]
    images: int
    rows: int
    arena: int
    elements: int

    @property
    def frequencies(self) -> tuple[int, ...]:
        """Frequencies along each axis: half of them along the last one, as the others are conjugates of these."""
        return _frequencies(self.cuts)


@lru_cache(maxsize=1024)
def choose_plan(sizes: Sizes) -> OverlapAddPlan | None:
    """The plan of least cost within the limit, or else the one of least memory; None when no window reads a pixel."""
    choices = [axis_cuts(axis) for axis in sizes.axes]
    if not all(choices):
        return None
    plans = [_divide(sizes, cuts) for cuts in product(*choices)]
    most = sizes.limit // sizes.itemsize
    return min(plans, key=lambda plan: (max(0, plan.elements - most), _cost(sizes, plan)))


def axis_cuts(axis: Axis) -> list[Cut]:
    """The cuts of an axis that are compared: in one block, and in as many as some lengths of transforms make."""
    inside = [number for number in range(axis.kernel) if axis.tap(number)[0].stop]
    if not inside:
        return []
    first, stop = inside[0], inside[-1] + 1
    axis = replace(axis, kernel=stop - first, head=axis.head - first * axis.dilation)
    low, high = max(0, -axis.head), min(axis.size, axis.covered - axis.head)
    whole = Cut(axis, (first, stop), (low, high), high - low, 0)
    reach = axis.extent - 1
    wanted = whole.windows(0)[1]
    # What wraps round the end of a single block may fall on elements that no window wants.
    least = max(wanted.stop, whole.count + reach - wanted.start, whole.count, axis.extent)
    found = {0: replace(whole, size=fast_size(least))}
    for size in _fast_sizes(reach + 1, whole.count + reach):
        blocks = -(-whole.count // (size - reach))
        if blocks > 1:
            block = -(-whole.count // blocks)
            cut = replace(whole, block=block, size=fast_size(block + reach))
            octave = 1 + int(_CUTS_AN_OCTAVE * math.log2(cut.size))
            if octave not in found or cut.blocks * cut.size < found[octave].blocks * found[octave].size:
                found[octave] = cut
    return list(found.values())


def _fast_sizes(low: int, high: int) -> Iterator[int]:
    """The fast sizes from low to high, both counted."""
    size = fast_size(low)
    while size <= high:
        yield size
        size = fast_size(size + 1)


@lru_cache(maxsize=4096)
def fast_size(least: int) -> int:
    """The first number from `least` on with no prime factors but 2, 3 and 5, which NumPy's transforms have code for."""
    best = 1 << (least - 1).bit_length()
    five = 1
    while five < best:
        three = five
        while three < best:
            rest = -(-least // three)
            best = min(best, three << (rest - 1).bit_length())
            three *= 3
        five *= 5
    return best


def _frequencies(cuts: Sequence[Cut]) -> tuple[int, ...]:
    return (*(cut.size for cut in cuts[:-1]), cuts[-1].size // 2 + 1)


def _divide(sizes: Sizes, cuts: tuple[Cut, ...]) -> OverlapAddPlan:
    """As many images, or else rows of blocks, as the workspaces hold and the limit allows; at least one row."""
    wanted = _ARENA // sizes.itemsize
    images = max(1, min(sizes.batch, wanted // _arena(sizes, cuts, 1, cuts[0].blocks)))
    rows = cuts[0].blocks
    if images == 1:
        rows = max(1, min(rows, wanted // _arena(sizes, cuts, 1, 1)))
    while True:
        plan = plan_with(sizes, cuts, images, rows)
        if plan.elements * sizes.itemsize <= sizes.limit or images == rows == 1:
            return plan
        images, rows = (images // 2, rows) if images > 1 else (1, rows // 2)


def plan_with(sizes: Sizes, cuts: tuple[Cut, ...], images: int, rows: int) -> OverlapAddPlan:
    """The plan that cuts the axes like this and computes so many images and rows of blocks together."""
    arena = _arena(sizes, cuts, images, rows)
    if not sizes.constant:
        arena = max(arena, filter_arena(cuts, sizes.filter_elements))
    spectra = sizes.filter_elements * math.prod(_frequencies(cuts))
    sums = -(-images * sizes.filters * math.prod(axis.out for axis in sizes.axes) // 2) if sizes.converts else 0
    return OverlapAddPlan(cuts, images, rows, arena, 2 * arena + spectra + sums)


def _arena(sizes: Sizes, cuts: Sequence[Cut], images: int, rows: int) -> int:
    """Complex elements of the spectra of some rows of blocks of some images: no array on the way has more."""
    blocks = rows * math.prod(cut.blocks for cut in cuts[1:])
    return images * max(sizes.channels, sizes.filters) * blocks * math.prod(_frequencies(cuts))


def filter_arena(cuts: Sequence[Cut], elements: int) -> int:
    """Complex elements of the largest array on the way from `elements` filters of one channel to their spectra."""
    extents, spectrum = [cut.axis.extent for cut in cuts], _frequencies(cuts)
    stages = [math.prod(extents[:axis]) * math.prod(spectrum[axis:]) for axis in range(1, len(cuts))]
    return elements * max([-(-math.prod(extents) // 2), *stages])


def _cost(sizes: Sizes, plan: OverlapAddPlan) -> float:
    """Nanoseconds, about."""
    cuts = plan.cuts
    spectrum = [cut.blocks * cut.size for cut in cuts]
    element = _TRANSFORM if plan.arena * sizes.itemsize <= _ARENA else _TRANSFORM_FAR
    transforms = 0.0
    for axis, cut in enumerate(cuts):
        elements = sizes.channels * math.prod(cut.count for cut in cuts[:axis])
        elements += sizes.filters * math.prod(cut.axis.out for cut in cuts[:axis])
        halves = 1 if axis == len(cuts) - 1 else 2  # complex transforms take two real elements each time
        transforms += elements * math.prod(spectrum[axis:]) * (element + _START / cut.size / halves)
    frequencies, columns = math.prod(plan.frequencies), sizes.batch * math.prod(cut.blocks for cut in cuts)
    parts = -(-sizes.batch // plan.images) * -(-cuts[0].blocks // plan.rows)
    products = sizes.filter_elements * (columns * _MULTIPLY + parts * _LOAD) + parts * sizes.group * _CALL
    filters = 0 if sizes.constant else 2 * len(cuts) * sizes.filter_elements * frequencies * _TRANSFORM
    return sizes.batch * transforms + filters + frequencies * products
