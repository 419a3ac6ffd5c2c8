"""Convolution by the Fourier transform: products of spectra in place of sums over taps, so that the cost hardly depends
on the size of the kernel.

The image is cut into blocks that do not overlap. Each is convolved with the whole filter by a transform long enough for
the result, and the results, which reach over the edges of their blocks, are added where they overlap: overlap-add
(Oppenheim and Schafer, "Discrete-Time Signal Processing", section 8.7). A layer multiplies all channels with all
filters, which at each frequency is one complex matrix product (M/G, C/G) (C/G, blocks of all images), as in Mathieu,
Henaff, LeCun, arXiv:1312.5851. `docs/convolution.md` derives it; `dagexec.ops.families.conv.overlap_add` chooses the
blocks.

A convolution layer is a cross-correlation, whose theorem has the conjugate spectrum of the filter. Here the filter is
turned round before it is transformed, which gives that conjugate, moved so that results start at their first element.
Taps of a dilated filter are spread; with strides, windows of stride 1 are computed along one axis after the other and
those between are dropped. NumPy pads each transform with zeros as it reads, so no block is copied for that.

Every transform, forward and back, divides by its length, and the filters are multiplied with what is too much: NumPy
transforms float32 in float32 only when it has such a factor to multiply with, and otherwise copies to float64.

Each result depends on all pixels of its block: rounding errors are relative to the largest values of the block, and an
infinity or NaN spoils every window that the blocks it lies in reach.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from dagexec.core.operator import Step
from dagexec.ops.families.conv.overlap_add import Cut, OverlapAddPlan, Sizes, choose_plan, filter_arena
from dagexec.ops.families.conv.problem import Algorithm, Allocate, Array, ConvProblem

_ALL = slice(None)


def _refusal(problem: ConvProblem) -> str:
    if problem.half:
        return "transforms are computed in float32 or float64, not with every result rounded to float16"
    plan = choose_plan(Sizes.of(problem))
    need = 0 if plan is None else plan.elements * 2 * problem.work.itemsize
    if need <= problem.limit:
        return ""
    return f"the spectra of filters and of a row of blocks take {need} bytes, more than the limit of {problem.limit}"


def _steps(problem: ConvProblem, allocate: Allocate) -> list[Step]:
    """Transform the filters unless they are constant; then images and rows of blocks, as the plan divides them."""
    plan = choose_plan(Sizes.of(problem))
    return _start(problem, problem.y) if plan is None else planned_steps(problem, plan, allocate)


FFT = Algorithm("FFT", _refusal, _steps)


class _Workspace:
    """Two arenas, used in turn: a step reads an array in one and writes an array in the other."""

    def __init__(self, allocate: Allocate, elements: int, work: np.dtype[Any]) -> None:
        self._work = work
        self._arenas = [allocate((elements,), _complex(work)) for _ in range(2)]

    def array(self, shape: Sequence[int], *, real: bool = False) -> Array:
        """An array in the arena that the previous one is not in."""
        self._arenas.reverse()
        arena = self._arenas[0]
        return (arena.view(self._work) if real else arena)[: math.prod(shape)].reshape(shape)


def planned_steps(problem: ConvProblem, plan: OverlapAddPlan, allocate: Allocate) -> list[Step]:
    """For some images at a time: the bias everywhere, then what each row of blocks adds."""
    workspace = _Workspace(allocate, plan.arena, problem.work)
    filters, calls = _filter_spectra(problem, plan, workspace, allocate)
    converts = problem.work != problem.y.dtype
    wide = allocate((plan.images, *problem.y.shape[1:]), problem.work) if converts else None
    blocks = plan.cuts[0].blocks
    for start in range(0, problem.batch, plan.images):
        x, y = problem.x[start : start + plan.images], problem.y[start : start + plan.images]
        sums = y if wide is None else wide[: len(y)]
        calls += _start(problem, sums)
        for row in range(0, blocks, plan.rows):
            calls += _rows(problem, plan, workspace, filters, x, sums, (row, min(row + plan.rows, blocks)))
        if wide is not None:
            calls.append(partial(np.copyto, y, sums, casting="same_kind"))
    return calls


def _rows(
    problem: ConvProblem,
    plan: OverlapAddPlan,
    workspace: _Workspace,
    filters: Array,
    x: Array,
    sums: Array,
    rows: tuple[int, int],
) -> list[Step]:
    """Add to `sums` what a range of rows of blocks gives."""
    first, cuts = plan.cuts[0], plan.cuts
    start, stop = (first.pixels[0] + row * first.block for row in rows)
    pixels = [slice(start, min(stop, first.pixels[1])), *(slice(*cut.pixels) for cut in cuts[1:])]
    source = _channels_first(problem, x)[(_ALL, _ALL, *pixels)]
    calls: list[Step] = []
    if problem.work != x.dtype:
        loaded = workspace.array(source.shape, real=True)
        calls.append(partial(np.copyto, loaded, source))
        source = loaded
    natural, transforms = _forward(workspace, [(cut.block, cut.size) for cut in cuts], source)
    calls += transforms
    spectra = _frequencies_first(natural)
    by_frequency = workspace.array(spectra.shape)
    outputs = workspace.array((*plan.frequencies, problem.filters, *spectra.shape[len(cuts) + 1 :]))
    found = _frequencies_last(outputs)
    natural = workspace.array(found.shape)
    calls += [
        partial(np.copyto, by_frequency, spectra),
        _multiply(problem, filters, by_frequency, outputs),
        partial(np.copyto, natural, found),
        *_inverse(workspace, cuts, rows[0], natural, _channels_first(problem, sums)),
    ]
    return calls


def _forward(
    workspace: _Workspace, lengths: Sequence[tuple[int, int]], x: Array, into: Array | None = None
) -> tuple[Array, list[Step]]:
    """Spectra of blocks: N, C, spatial becomes N, C, (blocks, frequencies) for each axis; and the steps.

    `lengths` has, for each axis, the pixels of a block and the length of the transform. Along the last axis, the first
    one here, transforms are real. The last result is written to `into`, if that is given.
    """
    calls: list[Step] = []
    for axis in reversed(range(len(lengths))):
        block, size = lengths[axis]
        last, place = axis == len(lengths) - 1, 2 + axis
        blocks, frequencies = -(-x.shape[place] // block), size // 2 + 1 if last else size
        if into is None or axis > 0:
            result = workspace.array((*x.shape[:place], blocks, frequencies, *x.shape[place + 1 :]))
        else:
            result = into
        transform: Callable[..., Array] = np.fft.rfft if last else np.fft.fft
        for some, pixels in _full_and_rest(x.shape[place], block):
            source = x[(*(_ALL,) * place, pixels)]
            # the axis as blocks, pixels of a block
            split = source.reshape(*x.shape[:place], some.stop - some.start, -1, *x.shape[place + 1 :])
            target = result[(*(_ALL,) * place, some)]
            calls.append(partial(transform, split, n=size, axis=place + 1, norm="forward", out=target))
        x = result
    return x, calls


def _full_and_rest(count: int, block: int) -> list[tuple[slice, slice]]:
    """The blocks that are full and the one that is not, if there are any, each with their pixels."""
    full = count // block
    found = [(slice(0, full), slice(0, full * block)), (slice(full, full + 1), slice(full * block, count))]
    return [(blocks, pixels) for blocks, pixels in found if pixels.start < pixels.stop]


def _multiply(problem: ConvProblem, filters: Array, x: Array, y: Array) -> Step:
    """y = W x at every frequency; x and y are frequencies, channels, images, blocks."""
    frequencies, groups = filters.shape[:2]
    source = x.reshape(frequencies, groups, problem.channels // groups, -1)  # f, G, C/G, images * blocks
    target = y.reshape(frequencies, groups, problem.filters // groups, -1)  # f, G, M/G, images * blocks
    return partial(np.multiply if source.shape[2] == 1 else np.matmul, filters, source, out=target)


def _inverse(workspace: _Workspace, cuts: Sequence[Cut], row: int, z: Array, sums: Array) -> list[Step]:
    """Add to `sums` the convolutions that have the spectra z, as `_forward` has them; row number `row` is the first.

    Blocks are added up along an axis as soon as that axis is transformed, so that later axes have less to transform.
    """
    calls: list[Step] = []
    target: list[slice] = [_ALL, _ALL]
    for axis, cut in enumerate(cuts):
        last, place = axis == len(cuts) - 1, 2 + axis
        result = workspace.array((*z.shape[: place + 1], cut.size, *z.shape[place + 2 :]), real=last)
        transform: Callable[..., Array] = np.fft.irfft if last else np.fft.ifft
        calls.append(partial(transform, z, n=cut.size, axis=place + 1, norm="backward", out=result))
        first = row if axis == 0 else 0
        pieces = []
        for number in range(z.shape[place]):
            windows, elements = cut.windows(first + number)
            if windows.stop > windows.start:
                place_of: tuple[Any, ...] = (*(_ALL,) * place, number, elements)
                pieces.append((windows, result[place_of]))
        if not pieces:
            return []
        low, high = pieces[0][0].start, max(windows.stop for windows, _ in pieces)
        if last:
            low, z = 0, sums[tuple(target)]
        elif len(pieces) == 1:
            z = pieces.pop()[1]
        else:
            z = workspace.array((*result.shape[:place], high - low, *result.shape[place + 2 :]))
            calls.append(partial(z.fill, 0))
        for windows, piece in pieces:
            part = z[(*(_ALL,) * place, slice(windows.start - low, windows.stop - low))]
            calls.append(partial(np.add, part, piece, out=part))
        target.append(slice(low, high))
    return calls


def _filter_spectra(
    problem: ConvProblem, plan: OverlapAddPlan, workspace: _Workspace, allocate: Allocate
) -> tuple[Array, list[Step]]:
    """Spectra of the filters turned round, with the factor of `_scale`, as (frequencies, G, M/G, C/G).

    And the steps that compute them, none when they are kept.
    """
    per_group = problem.channels // problem.group
    shape = (*plan.frequencies, problem.filters, per_group)
    stack = (math.prod(plan.frequencies), problem.group, problem.filters // problem.group, per_group)
    kind = _complex(problem.work)
    if problem.constant is None:
        array = allocate(shape, kind)
        return array.reshape(stack), _filter_steps(problem, plan.cuts, workspace, array)

    def compute() -> Array:
        array = np.empty(shape, kind)
        own = _Workspace(np.empty, filter_arena(plan.cuts, problem.filters * per_group), problem.work)
        for step in _filter_steps(problem, plan.cuts, own, array):
            step()
        return array

    lengths = tuple((cut.taps, cut.axis.dilation, cut.size) for cut in plan.cuts)
    key = ("fft", lengths, problem.channels_last, problem.work.str)
    return problem.constant.derived(key, compute).reshape(stack), []


def _filter_steps(problem: ConvProblem, cuts: Sequence[Cut], workspace: _Workspace, array: Array) -> list[Step]:
    """The steps that write the spectra to `array`: frequencies, M, C/G."""
    used = (_ALL, _ALL, *(slice(*cut.taps) for cut in cuts))
    turned = _channels_first(problem, problem.weights)[used][(_ALL, _ALL, *(slice(None, None, -1),) * len(cuts))]
    spread = workspace.array((*turned.shape[:2], *(cut.axis.extent for cut in cuts)), real=True)
    taps = spread[(_ALL, _ALL, *(slice(None, None, cut.axis.dilation) for cut in cuts))]
    rank = len(cuts)
    into = array.transpose(rank, rank + 1, *range(rank))[(_ALL, _ALL, *(None, _ALL) * rank)]  # M, C/G, (1, f) an axis
    _, transforms = _forward(workspace, [(cut.axis.extent, cut.size) for cut in cuts], spread, into)
    return [
        partial(spread.fill, 0),
        partial(np.copyto, taps, turned),
        partial(np.multiply, taps, _scale(problem.work, cuts), out=taps),
        *transforms,
    ]


def _scale(work: np.dtype[Any], cuts: Sequence[Cut]) -> float:
    """What the filters are multiplied with, so that the three transforms together divide by the number of elements."""
    factors = [(cut.size, float(work.type(1) / work.type(cut.size))) for cut in cuts]  # as NumPy rounds them
    return math.prod(1 / (size * factor**3) for size, factor in factors)


def _start(problem: ConvProblem, sums: Array) -> list[Step]:
    """Set images to the bias, or to 0."""
    if problem.bias is None:
        return [partial(sums.fill, 0)]
    row = problem.bias if problem.channels_last else problem.bias.reshape(-1, *(1,) * len(problem.axes))
    return [partial(np.copyto, sums, row, casting="same_kind")]


def _channels_first(problem: ConvProblem, array: Array) -> Array:
    """A view of images as N, C, spatial, or of filters as M, C/G, kernel."""
    return np.moveaxis(array, -1, 1) if problem.channels_last else array


def _frequencies_first(spectra: Array) -> Array:
    """N, C, (blocks, frequencies) as a view: frequencies, C, N, blocks."""
    rank = (spectra.ndim - 2) // 2
    return spectra.transpose(*range(3, 3 + 2 * rank, 2), 1, 0, *range(2, 2 + 2 * rank, 2))


def _frequencies_last(spectra: Array) -> Array:
    """The reverse: frequencies, M, N, blocks as N, M, (blocks, frequencies)."""
    rank = (spectra.ndim - 2) // 2
    pairs = [place for axis in range(rank) for place in (rank + 2 + axis, axis)]
    return spectra.transpose(rank + 1, rank, *pairs)


def _complex(work: np.dtype[Any]) -> np.dtype[Any]:
    return np.result_type(work, np.complex64)
