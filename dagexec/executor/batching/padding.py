"""Padding of requests of different lengths to a few sizes, so that they may be joined, and their results cut again.

The user vouches that padding does not change a result; dagexec ensures that its shape is that of a run without it.
A request is padded even if it runs alone, so that its bytes do not depend on who is in its batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from dagexec.core.feeds import Array
from dagexec.core.inference import infer_listed
from dagexec.core.model import Model
from dagexec.core.schema import TensorType
from dagexec.core.spelling import did_you_mean
from dagexec.errors import FeedError, SettingError
from dagexec.executor.requests.request import Cuts
from dagexec.executor.source.types import GivenTypes
from dagexec.options import BatchPadding

_ROWS = 2
"""Rows in the runs that types are inferred for: 1 would make an axis of rows times lengths look like one of lengths."""


class Padding:
    """Pads the requests of a model, and says how their results are cut."""

    def __init__(
        self, model: Model, padding: BatchPadding, types: Mapping[str, TensorType], batch_axes: Mapping[str, int]
    ) -> None:
        """`types` are those of the inputs in some run, `batch_axes` the axes of their rows.

        Raises SettingError for axes that no input has, that have rows or a fixed size, and for a result along which
        the length of a request cannot be told.
        """
        self._net = model.name
        self._axes = dict(padding.axes)
        self._sizes = tuple(padding.sizes)
        for name, axis in self._axes.items():
            _check_axis(model, name, axis, batch_axes)
        if padding.mask not in self._axes:
            raise SettingError(f"net {model.name!r}: batch_padding: the mask {padding.mask!r} is none of {self._axes}")
        self._cut_axes, self._untold = self._find_cuts(GivenTypes.of(model), types, batch_axes)
        for name in model.outputs:
            self._check_told(name, SettingError)

    def filled(self, feeds: Mapping[str, Array]) -> tuple[Mapping[str, Array], int | None]:
        """`feeds`, padded with zeros up to the next of the sizes, and their length; None if that is one of the sizes.

        Raises FeedError when inputs disagree on the length, or it is more than the largest size.
        """
        lengths = {name: _size(feeds[name], axis) for name, axis in self._axes.items()}
        length = next(iter(lengths.values()))
        if length is None or any(other != length for other in lengths.values()):
            raise FeedError(f"net {self._net!r}: the inputs disagree on the length: {lengths}")
        size = next((size for size in self._sizes if size >= length), None)
        if size is None:
            raise FeedError(
                f"net {self._net!r}: a request has a length of {length}, batch_padding at most {self._sizes[-1]}"
            )
        if size == length:
            return feeds, None
        return {name: self._padded(name, array, size) for name, array in feeds.items()}, length

    def cuts(self, names: Sequence[str], length: int) -> Cuts:
        """The parts of the results `names` that belong to a request of `length`. Raises FeedError where unknown."""
        for name in names:
            self._check_told(name, FeedError)
        return {
            name: tuple(slice(length) if axis in axes else slice(None) for axis in range(max(axes) + 1))
            for name in names
            if (axes := self._cut_axes.get(name))
        }

    def _padded(self, name: str, array: Array, size: int) -> Array:
        axis = self._axes.get(name)
        if axis is None:
            return array
        if array.dtype == np.object_:
            raise FeedError(f"net {self._net!r}: input {name!r} is text, which batch_padding cannot fill up")
        padded = np.zeros((*array.shape[:axis], size, *array.shape[axis + 1 :]), array.dtype)
        padded[(slice(None),) * axis + (slice(array.shape[axis]),)] = array
        return padded

    def _find_cuts(
        self, given: GivenTypes, types: Mapping[str, TensorType], batch_axes: Mapping[str, int]
    ) -> tuple[dict[str, tuple[int, ...]], frozenset[str]]:
        """By blob, the axes that have the length of a request; and the blobs where they cannot be inferred."""
        sizes = self._sizes[-1], self._sizes[-1] - 1
        with_rows = {name: _resized(kind, batch_axes.get(name), _ROWS) for name, kind in types.items()}
        kinds = []
        for size in sizes:
            sized = {name: _resized(kind, self._axes.get(name), size) for name, kind in with_rows.items()}
            sized = {**given.types, **sized}
            kinds.append(infer_listed(given.name, given.operators, sized, given.values).blobs)
        cuts: dict[str, tuple[int, ...]] = {}
        untold = set()
        for name, kind in kinds[0].items():
            axes = _axes_of_lengths(kind, kinds[1][name], sizes)
            if axes is None:
                untold.add(name)
            else:
                cuts[name] = axes
        return cuts, frozenset(untold)

    def _check_told(self, name: str, kind: type[SettingError | FeedError]) -> None:
        if name in self._untold or name not in self._cut_axes:
            raise kind(
                f"net {self._net!r}: batch_padding: result {name!r} depends on the length, but has no axis that "
                "is as long as the request, or nobody can tell"
            )


def _check_axis(model: Model, name: str, axis: int, batch_axes: Mapping[str, int]) -> None:
    info = model.inputs.get(name)
    if info is None:
        raise SettingError(
            f"net {model.name!r}: batch_padding: {name!r} is none of the inputs {sorted(model.inputs)}"
            f"{did_you_mean(name, model.inputs)}"
        )
    if batch_axes.get(name) == axis:
        raise SettingError(f"net {model.name!r}: batch_padding: axis {axis} of input {name!r} is that of its rows")
    if info.shape is not None and (axis >= len(info.shape) or info.shape[axis] is not None):
        raise SettingError(
            f"net {model.name!r}: batch_padding: axis {axis} of input {name!r} is not free in {info.shape}"
        )


def _size(array: Array, axis: int) -> int | None:
    return array.shape[axis] if array.ndim > axis else None


def _resized(kind: TensorType, axis: int | None, size: int) -> TensorType:
    if axis is None:
        return kind
    return replace(kind, shape=(*kind.shape[:axis], size, *kind.shape[axis + 1 :]))


def _axes_of_lengths(
    kind: TensorType | None, other: TensorType | None, lengths: tuple[int, int]
) -> tuple[int, ...] | None:
    """The axes as long as a request, from the types for two lengths; None if another size differs."""
    if kind is None or other is None or len(kind.shape) != len(other.shape):
        return None
    differ = tuple(axis for axis, pair in enumerate(zip(kind.shape, other.shape, strict=True)) if pair[0] != pair[1])
    return differ if all((kind.shape[axis], other.shape[axis]) == lengths for axis in differ) else None
