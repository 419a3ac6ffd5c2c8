"""Dynamic batching: requests that wait are joined along their batch axis, run once, and split again.

This module joins and splits; `queue` and `dispatch.state` decide which requests are joined, and when.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dagexec.binding.io_binding import Array, Signature, arrays_like
from dagexec.core.dtypes import from_numpy
from dagexec.core.feeds import Feeds
from dagexec.core.model import Model
from dagexec.core.schema import TensorType
from dagexec.errors import FeedError, RowsError
from dagexec.executor.requests.request import Group, Request

if TYPE_CHECKING:
    from dagexec.core.row_axes import RowAxes
    from dagexec.executor.batching.axes import BatchAxes

MAX_SHARED_BYTES = 4096
"""Inputs for all rows are compared up to this size; a request with a larger one runs alone."""

_MAX_GROUPS = 1024
"""Kinds of requests that are remembered."""


class _Last(NamedTuple):
    """The previous request, which the next one probably resembles."""

    signature: Signature
    names: Sequence[str]
    rows: int
    group: Group


class Batching:
    """Finds rows and groups of the requests of a model whose requests are joined."""

    def __init__(
        self, model: Model, axes: BatchAxes, max_batch: int, later: Callable[[Callable[[], object]], object]
    ) -> None:
        """`later` has another thread call its argument."""
        self._net = model.name
        self._outputs = frozenset(model.outputs)
        self._axes = axes
        self._max_batch = max_batch
        self._later = later
        self._groups: dict[Hashable, Group | None] = {}
        self._shown: dict[Hashable, RowAxes | None] = {}
        self._last: _Last | None = None
        self._sizes = _sizes_up_to(max_batch) if axes.has_empty_rows else ()

    def fitting(self, feeds: Feeds) -> dict[str, Array] | None:
        """`feeds`, if they are arrays like those of the previous request, which were checked."""
        last = self._last
        arrays = None if last is None else arrays_like(last.signature, feeds)
        if last is None or arrays is None:
            return None
        return {kind[0]: array for kind, array in zip(last.signature, arrays, strict=True)}

    def padded(self, feeds: Mapping[str, Array]) -> Mapping[str, Array]:
        """Checked `feeds`, padded where that was asked for. Raises FeedError."""
        return feeds if self._axes.padding is None else self._axes.padding.filled(feeds)[0]

    def place(self, request: Request) -> None:
        """Set `rows` and `group` of a request with checked feeds.

        Its feeds are padded where that was asked for. Raises FeedError when inputs disagree on the number of rows or
        the length, or have more than `max_batch` rows.
        """
        if self._axes.padding is not None:
            request.feeds, length = self._axes.padding.filled(request.feeds)
            if length is not None:
                request.cuts = self._axes.padding.cuts(request.names, length)
        last = self._last
        if (
            last is not None
            and request.names == last.names
            and request.call.trace is None
            and arrays_like(last.signature, request.feeds) is not None
        ):
            request.rows, request.group = last.rows, last.group
            return
        request.rows = self.rows(request.feeds)
        if request.rows and request.call.trace is None:
            self._find_group(request)

    def rows(self, feeds: Mapping[str, Array]) -> int:
        """The number of rows of checked feeds; 0 where an input lacks its batch axis. Raises FeedError."""
        axes = self._axes.inputs.items()
        sizes = {name: feeds[name].shape[axis] for name, axis in axes if name in feeds and feeds[name].ndim > axis}
        counts = set(sizes.values())
        if len(counts) > 1:
            raise FeedError(f"net {self._net!r}: the inputs disagree on the number of rows: {sizes}")
        rows = counts.pop() if len(sizes) == len(axes) else 0
        if rows > self._max_batch:
            raise FeedError(f"net {self._net!r}: a request has at most max_batch={self._max_batch} rows, found {rows}")
        return rows

    def _find_group(self, request: Request) -> None:
        """Set the group of a request, if it may be joined with others."""
        types: list[Hashable] = []
        shared: list[Hashable] = []
        for name, array in request.feeds.items():
            axis = self._axes.inputs.get(name)
            if array.dtype == np.object_ or (axis is None and array.nbytes > MAX_SHARED_BYTES):
                return
            shape = array.shape if axis is None else (*array.shape[:axis], 1, *array.shape[axis + 1 :])
            types.append((name, array.dtype.str, shape))
            if axis is None:
                shared.append(array.tobytes())
        key = (tuple(request.names), *types, *shared)
        request.group = self._groups.get(key)
        if request.group is None:
            request.group = self._new_group(request, key, tuple(types))
        if request.group is not None and not shared:
            signature = tuple((name, array.dtype, array.shape) for name, array in request.feeds.items())
            self._last = _Last(signature, request.names, request.rows, request.group)

    def _new_group(self, request: Request, key: Hashable, types: Hashable) -> Group | None:
        """The group of requests like this one; None when it runs alone, as before its rows are analyzed."""
        axes = self._axes.found or self._shown_for(request.feeds, types)
        if axes is None:
            return None
        results = {name: axes.blobs.get(name) for name in request.names}
        if any(rows.before > 1 if rows else name not in self._outputs for name, rows in results.items()):
            return None  # results cannot be split, or it is not known whether they can
        if len(self._groups) >= _MAX_GROUPS:
            self._groups = {}
        return self._groups.setdefault(key, Group(self._axes.inputs, results, self._sizes))

    def _shown_for(self, feeds: Mapping[str, Array], types: Hashable) -> RowAxes | None:
        """The row axes for inputs of these types. The first request with them has them inferred, and does not wait."""
        if types not in self._shown:
            if len(self._shown) >= _MAX_GROUPS:
                self._shown = {}
            self._shown[types] = None
            kinds = {name: TensorType(array.shape, from_numpy(array.dtype)) for name, array in feeds.items()}
            self._later(lambda: self._show(kinds, types))
            return None
        return self._shown.get(types)

    def _show(self, kinds: Mapping[str, TensorType], types: Hashable) -> None:
        with suppress(RowsError):  # requests of these shapes run alone
            self._shown[types] = self._axes.of(kinds)


def _sizes_up_to(most: int) -> tuple[int, ...]:
    """Numbers of rows for which a net is prepared: 1, 2, 3, 4, 6, 8, 12 and so on."""
    sizes = {size for power in range(most.bit_length()) for size in (1 << power, 3 << power >> 1)}
    return (*sorted(size for size in sizes if size < most), most)
