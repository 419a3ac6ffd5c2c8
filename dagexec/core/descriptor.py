"""TensorDescriptor: a memory layout by shape and strides. It holds no memory, and any number of tensors may have it.

The terms are those of the cuDNN developer guide, section "Tensor Descriptor". Axes are always counted in the logical
order N, C, spatial; the order of the letters in "NHWC" is that of the strides, from the largest to the smallest. An
axis of size 1 is never stepped along, so its stride is irrelevant here, as is any stride of a tensor without elements.
`dagexec.core.conversion` has the operators' use of it.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from dagexec.core.shapes import element_count
from dagexec.errors import ResourceError, ShapeError
from dagexec.platform.records import dataclass

MAX_SPAN = (1 << 62) - 1
_LETTERS = ("", "N", "NC", "NCW", "NCHW", "NCDHW")
_CHUNK = 1 << 16

Array = npt.NDArray[Any]


def axis_letters(rank: int) -> str:
    """The letters of the axes in logical order: NCW, NCHW, NCDHW, and N or NC for fewer axes.

    Raises ShapeError for more than 5 axes, which have no letters.
    """
    if rank >= len(_LETTERS):
        raise ShapeError(f"axes have letters up to 5 of them ({_LETTERS[-1]}), found {rank}: give a permutation")
    return _LETTERS[rank]


def axis_order(order: str | Sequence[int], rank: int) -> tuple[int, ...]:
    """The logical axes from the one with the largest stride to that with the smallest.

    `order` is a permutation of the axes, or one of their letters ("CHWN", "NWC", "NDHWC"). "NCHW" and "NHWC" name
    channels first and channels last for any number of spatial axes, as the argument `order` of operators does.
    Raises ShapeError for anything else.
    """
    if isinstance(order, str):
        letters = axis_letters(rank)
        spatial = letters[2:]
        spelled = {"NCHW": f"NC{spatial}", "NHWC": f"N{spatial}C"}.get(order, order) if spatial else order
        if sorted(spelled) != sorted(letters):
            raise ShapeError(f"order {order!r} must hold each of the letters {letters!r} of {rank} axes once")
        return tuple(letters.index(letter) for letter in spelled)
    axes = tuple(operator.index(axis) for axis in order)
    if sorted(axes) != list(range(rank)):
        raise ShapeError(f"order {axes} must be a permutation of 0..{rank - 1}")
    return axes


@dataclass(frozen=True, slots=True)
class TensorDescriptor:
    """The shape of a tensor, and how many elements apart its neighbors along each axis lie in memory.

    Raises ShapeError for a negative stride or another number of strides than sizes, ResourceError for a negative size
    and for sizes that overflow.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def __post_init__(self) -> None:
        shape = tuple(operator.index(size) for size in self.shape)
        strides = tuple(operator.index(stride) for stride in self.strides)
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "strides", strides)
        if len(shape) != len(strides):
            raise ShapeError(f"shape {shape} has {len(shape)} axes, strides {strides} are {len(strides)}")
        if any(stride < 0 for stride in strides):
            raise ShapeError(f"strides {strides} of shape {shape} must be 0 or more: copy arrays that run backwards")
        element_count(shape)
        if self.span > MAX_SPAN:
            raise ResourceError(f"shape {shape} with strides {strides} overflows: it spans {self.span} elements")

    @staticmethod
    def packed(shape: Sequence[int]) -> TensorDescriptor:
        """Fully packed in the logical order, as tensors are unless something else is requested."""
        return TensorDescriptor.ordered(shape, range(len(shape)))

    @staticmethod
    def ordered(shape: Sequence[int], order: str | Sequence[int]) -> TensorDescriptor:
        """Fully packed with the axes in `order` (see `axis_order`); `shape` is in the logical order."""
        strides = [0] * len(shape)
        step = 1
        for axis in reversed(axis_order(order, len(shape))):
            strides[axis] = step
            step *= shape[axis]
        return TensorDescriptor(tuple(shape), tuple(strides))

    @staticmethod
    def of(array: Array) -> TensorDescriptor:
        """The layout of `array`. Raises ShapeError for a negative stride, or one that is no multiple of the itemsize.

        Irrelevant strides are replaced by those of a packed axis.
        """
        shape = tuple(array.shape)
        if array.size == 0:
            return TensorDescriptor.packed(shape)
        strides = [0] * len(shape)
        step = 1
        for axis in reversed(range(len(shape))):
            if shape[axis] > 1:
                step, rest = divmod(array.strides[axis], array.itemsize)
                if rest:
                    raise ShapeError(
                        f"axis {axis} of an array of shape {shape} has a stride of {array.strides[axis]} bytes; "
                        f"expected a multiple of the {array.itemsize} bytes of its {array.dtype} elements"
                    )
            strides[axis] = step
            step *= shape[axis]
        return TensorDescriptor(shape, tuple(strides))

    @property
    def elements(self) -> int:
        """The number of elements."""
        return element_count(self.shape)

    @property
    def span(self) -> int:
        """Elements of memory from the first element to the last, both included, with the gaps between them."""
        if 0 in self.shape:
            return 0
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))

    @property
    def is_packed(self) -> bool:
        """Fully packed in the logical order: what `packed` makes."""
        return self.is_fully_packed(range(len(self.shape)))

    def is_fully_packed(self, order: str | Sequence[int] | None = None) -> bool:
        """True when every stride is the product of the size and the stride of the next axis, the last one 1.

        "Next" is as `order` says; without it, as the strides do: then this is true when the elements fill the memory.
        """
        axes = self.axes if order is None else axis_order(order, len(self.shape))
        return self._is_run_packed(axes, frozenset(axes))

    def is_partially_packed(self, run: str | Sequence[int], order: str | Sequence[int] | None = None) -> bool:
        """True when the adjacent axes `run` (letters such as "HW", or numbers) follow the rule of the fully packed.

        The strides of all other axes must be at least the product of the size and the stride of the next one. `order`
        says what "adjacent" and "next" mean; by default the order that the strides have.
        Raises ShapeError for axes that this tensor does not have, or that are named twice.
        """
        rank = len(self.shape)
        axes = self.axes if order is None else axis_order(order, rank)
        letters = axis_letters(rank) if isinstance(run, str) else ""
        chosen = [letters.find(letter) for letter in run] if isinstance(run, str) else [*map(operator.index, run)]
        if len(set(chosen)) != len(chosen) or any(not 0 <= axis < rank for axis in chosen):
            raise ShapeError(f"axes {run!r} must each be one of {letters or tuple(range(rank))}, named once")
        places = [axes.index(axis) for axis in chosen]
        adjacent = all(later == earlier + 1 for earlier, later in itertools.pairwise(places))
        return adjacent and self._is_run_packed(axes, frozenset(chosen))

    @property
    def is_spatially_packed(self) -> bool:
        """Packed in the spatial axes, which are the innermost: NCHW HW-packed or CNHW HW-packed, say.

        False for a tensor without spatial axes, and for one of more than 5 axes, which have no letters.
        """
        rank = len(self.shape)
        if not 3 <= rank < len(_LETTERS):
            return False
        spatial = range(2, rank)
        return any(self.is_partially_packed(spatial, (*outer, *spatial)) for outer in ((0, 1), (1, 0)))

    def _is_run_packed(self, axes: Sequence[int], run: frozenset[int]) -> bool:
        if 0 in self.shape:
            return True
        least = 1
        for axis in reversed(axes):
            size, stride = self.shape[axis], self.strides[axis]
            if size > 1:
                if stride < least or (axis in run and stride != least):
                    return False
                least = size * stride
        return True

    @property
    def axes(self) -> tuple[int, ...]:
        """The logical axes from the largest stride to the smallest.

        Where the strides leave a choice, the logical order is named before channels last, and that before others.
        """
        rank = len(self.shape)
        logical = tuple(range(rank))
        for axes in (logical, (0, *logical[2:], 1)) if rank > 1 else (logical,):
            steps = [self.strides[axis] for axis in axes if self._has_say(axis)]
            if all(outer >= inner for outer, inner in itertools.pairwise(steps)):
                return axes
        order = sorted((axis for axis in logical if self._has_say(axis)), key=lambda axis: -self.strides[axis])
        for axis in logical:
            if not self._has_say(axis):
                order.insert(order.index(axis - 1) + 1 if axis else 0, axis)
        return tuple(order)

    @property
    def order(self) -> str:
        """The name of `axes`: "NHWC", or numbers such as "0 2 1" for more than 5 axes."""
        rank = len(self.shape)
        if rank >= len(_LETTERS):
            return " ".join(map(str, self.axes))
        return "".join(_LETTERS[rank][axis] for axis in self.axes)

    def _has_say(self, axis: int) -> bool:
        return self.shape[axis] > 1 and 0 not in self.shape

    @property
    def is_overlapping(self) -> bool:
        """True when two different indices lead to one element.

        Two indices do so when their difference d, with |d[k]| < size[k], has sum(d[k] * stride[k]) = 0. Mostly the
        sorted strides settle it: no two meet when each stride exceeds the span of the axes of smaller strides, some do
        when there are more elements than the span has room for. Otherwise the axes are gone through from the largest
        stride on, with the set of distances that the rest could still bring back to zero; when those become many,
        every address is marked instead. Either way the time is at most proportional to rank times span.
        """
        axes = sorted(
            ((stride, size) for stride, size in zip(self.strides, self.shape, strict=True) if size > 1), reverse=True
        )
        if 0 in self.shape or not axes:
            return False
        if axes[-1][0] == 0 or self.elements > self.span:
            return True
        if _are_nested(axes):
            return False
        return _may_return(axes)

    def is_same_layout(self, other: TensorDescriptor) -> bool:
        """True when shapes are equal, and so are all strides that have a say."""
        return self.shape == other.shape and all(
            self.strides[axis] == other.strides[axis] for axis in range(len(self.shape)) if self._has_say(axis)
        )

    def check_holds(self, shape: tuple[int, ...]) -> None:
        """Raise ShapeError unless values of `shape` can be written to this layout: an overlapping one holds none."""
        if self.shape != shape:
            raise ShapeError(f"values of shape {shape} cannot be laid out as {self}")
        if self.is_overlapping:
            raise ShapeError(f"an overlapping layout cannot be written to: shape {shape}, strides {self.strides}")

    @property
    def layout(self) -> str:
        """The layout in words: order, what is packed or overlaps, and the strides where the words do not give them."""
        if self.is_packed:
            return f"{self.order} fully packed"
        if self.is_fully_packed():
            return f"{self.order} fully packed, strides {self.strides}"
        if self.is_overlapping:
            return f"overlapping, strides {self.strides}"
        spatially = " spatially packed," if self.is_spatially_packed else ""
        return f"{self.order}{spatially} strides {self.strides}"

    def view(self, buffer: Array) -> Array:
        """The elements in `buffer`, C-contiguous memory that begins with the first of them, as an array of `shape`.

        Nothing is copied. The view of an overlapping layout is read-only. Raises ShapeError when the buffer is too
        small or has gaps itself.
        """
        if not buffer.flags.c_contiguous:
            raise ShapeError(f"a buffer must be contiguous, found one of strides {buffer.strides} bytes")
        if buffer.size < self.span:
            raise ShapeError(
                f"a buffer of {buffer.size} elements is too small for shape {self.shape} with strides {self.strides}: "
                f"expected at least {self.span}"
            )
        steps = tuple(stride * buffer.itemsize for stride in self.strides)
        writeable = bool(buffer.flags.writeable) and not self.is_overlapping
        flat = buffer.reshape(-1)
        if isinstance(flat, np.ndarray):
            return as_strided(flat, self.shape, steps, writeable=writeable)
        return flat.strided(self.shape, steps, writeable)

    def __str__(self) -> str:
        return f"{list(self.shape)} {self.layout}"


def convert(values: Array, target: TensorDescriptor, out: Array | None = None) -> Array:
    """Copy `values`, an array of any strides, into the layout `target`; returns the view of it.

    The view is of `out`, a contiguous buffer of their dtype with at least `target.span` elements, or of a new one.
    Raises ShapeError when shapes or dtypes differ, when `out` is too small, and for an overlapping target, which
    cannot hold one value for each index.
    """
    target.check_holds(tuple(values.shape))
    buffer = np.empty(target.span, values.dtype) if out is None else out
    if buffer.dtype != values.dtype:
        raise ShapeError(f"values of {values.dtype} cannot be laid out in a buffer of {buffer.dtype}")
    view = target.view(buffer)
    np.copyto(view, values)
    return view


def _are_nested(axes: Sequence[tuple[int, int]]) -> bool:
    """True when each stride exceeds all distances along the axes after it. `axes` are (stride, size), descending."""
    reach = 0
    for stride, size in reversed(axes):
        if stride <= reach:
            return False
        reach += (size - 1) * stride
    return True


def _may_return(axes: Sequence[tuple[int, int]]) -> bool:
    """True when some steps along `axes`, not all zero, lead back to the start. `axes` are (stride, size), descending.

    Distances come in pairs of both signs; the positive one stands for both.
    """
    span = reach = sum((size - 1) * stride for stride, size in axes)
    distances = np.empty(0, np.int64)
    for place, (stride, size) in enumerate(axes):
        reach -= (size - 1) * stride
        unit = math.gcd(*(later for later, _size in axes[place + 1 :]))
        first = np.arange(1, min(size - 1, reach // stride) + 1, dtype=np.int64) * stride
        chunks = [_reachable(first, reach, unit)]
        limit = min(size - 1, (reach + int(distances.max(initial=0))) // stride)
        if distances.size * (2 * limit + 1) > max(_CHUNK, span // 1024):
            return _addresses_meet(axes)
        chunk = max(1, _CHUNK // max(1, distances.size))
        for start in range(-limit, limit + 1, chunk):
            steps = np.arange(start, min(start + chunk, limit + 1), dtype=np.int64) * stride
            ends = np.abs(distances[:, None] + steps).reshape(-1)
            if not ends.all():
                return True
            chunks.append(_reachable(ends, reach, unit))
        distances = np.unique(np.concatenate(chunks))
    return False


def _addresses_meet(axes: Sequence[tuple[int, int]]) -> bool:
    """As `_may_return`, from one bit for each address: n steps along an axis are combined from n/2 and n/2."""
    marked = 1
    for stride, size in reversed(axes):
        single, count = marked, 1
        for bit in f"{size:b}"[1:]:
            parts = [(marked, count), (single, 1)] if bit == "1" else [(marked, count)]
            for part, steps in parts:
                moved = part << count * stride
                if marked & moved:
                    return True
                marked |= moved
                count += steps
    return False


def _reachable(distances: npt.NDArray[np.int64], reach: int, unit: int) -> npt.NDArray[np.int64]:
    """The distinct distances up to `reach` that are multiples of `unit`. With no axis left, both are 0."""
    near = distances[distances <= reach]
    return np.unique(near[near % unit == 0]) if unit else near
