"""A run of a new number of rows, as several runs of numbers of rows that the net is already prepared for.

Results are the same where the rows of a net are independent and have the same bytes in every batch.
`dagexec.binding.block_sizes` chooses the blocks.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from dagexec.binding.io_binding import Array, Signature, arrays_like
from dagexec.binding.parameters import Parameters
from dagexec.binding.replicas import Replica
from dagexec.core.dtypes import from_numpy
from dagexec.core.model import Model
from dagexec.core.schema import TensorType
from dagexec.core.traits import Rows
from dagexec.errors import RowsError, SettingError
from dagexec.executor.requests.blocked_run import BlockedRun
from dagexec.executor.requests.request import Request
from dagexec.options import CompileOptions
from dagexec.platform.lazy import LazyModule

if not TYPE_CHECKING:
    batch_axes = LazyModule("dagexec.executor.batching.axes")
else:
    from dagexec.core.row_axes import RowAxes
    from dagexec.executor.batching import axes as batch_axes
    from dagexec.executor.batching.axes import BatchAxes

_MAX_SHOWN = 1024
"""Kinds of inputs for which is remembered whether their rows are independent."""

_MANY = 8
"""From this many prepared numbers of rows on it is inferred whether rows are independent, as blocks then pay."""

_UNKNOWN = object()
"""Stands for a kind that is not remembered."""


class RowBlocks:
    """Splits runs of a model into blocks of rows. Row axes are inferred only once a second number of rows comes."""

    def __init__(self, model: Model, options: CompileOptions) -> None:
        self._outputs = frozenset(model.outputs)
        self._axes = _first_axes(model) if options.batch_axes is None else options.batch_axes
        self._batch_axes = _Later(model, options)
        self._shown: dict[Hashable, RowAxes | None] = {}

    def of(self, request: Request) -> BlockedRun | None:
        """The blocks of `request`, which has a replica; None when it is a single run.

        That is also so where it is observed, warms up a replica, or has padded inputs.
        """
        replica = request.replica
        watched = request.call.trace is not None or request.pinned is not None
        if not self._axes or replica is None or watched or request.cuts is not None:
            return None
        binding = replica.io_binding
        if binding is None or arrays_like(binding.signature, request.feeds) is not None:
            return None
        rows = self._rows(request.feeds)
        if not rows:
            return None
        kind = self._kind_of(tuple([(name, array.dtype, array.shape) for name, array in request.feeds.items()]))
        if self._shown.get(kind, _UNKNOWN) is None:
            return None
        ready = self._ready(replica, kind)
        sizes = replica.block_sizes.blocks(kind, rows, ready)
        if sizes is None and len(ready) < _MANY:
            return None
        shown = self._shown_for(request.feeds, kind)
        results = None if shown is None else self._results(request, shown)
        if sizes is None or results is None:
            return None
        return BlockedRun(rows, sizes, self._axes, results)

    def _rows(self, feeds: Mapping[str, Array]) -> int:
        """The number of rows of the inputs; 0 when they disagree, or an input is text."""
        if any(array.dtype == np.object_ for array in feeds.values()) or not self._axes.keys() <= feeds.keys():
            return 0
        if any(feeds[name].ndim <= axis for name, axis in self._axes.items()):
            return 0
        counts = {feeds[name].shape[axis] for name, axis in self._axes.items()}
        return counts.pop() if len(counts) == 1 else 0

    def _kind_of(self, signature: Signature) -> Hashable:
        """The inputs but for the number of their rows."""
        return tuple([(name, dtype.str, self._others(name, shape)) for name, dtype, shape in signature])

    def _others(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The sizes of an input, without that of its batch axis."""
        axis = self._axes.get(name)
        return shape if axis is None else (*shape[:axis], -1, *shape[axis + 1 :])

    def _ready(self, replica: Replica, kind: Hashable) -> dict[int, float]:
        """The numbers of rows of this kind that `replica` is prepared for, and the seconds that a run of each takes."""
        seconds_by_rows: dict[int, float] = {}
        for signature, seconds in replica.prepared_for(kind, self._kind_of):
            counts = {shape[self._axes[name]] for name, _, shape in signature if name in self._axes}
            seconds_by_rows[counts.pop()] = seconds
        seconds_by_rows.pop(0, None)  # no rows, no block
        return dict(sorted(seconds_by_rows.items()))

    def _shown_for(self, feeds: Mapping[str, Array], kind: Hashable) -> RowAxes | None:
        """The row axes for inputs of this kind; None where rows are not independent, or that is unknown."""
        if kind not in self._shown:
            if len(self._shown) >= _MAX_SHOWN:
                self._shown = {}
            self._shown[kind] = self._find_shown(feeds)
        return self._shown[kind]

    def _find_shown(self, feeds: Mapping[str, Array]) -> RowAxes | None:
        batch_axes = self._batch_axes.made()
        if batch_axes is None or batch_axes.found is not None:
            return None if batch_axes is None else batch_axes.found
        types = {name: TensorType(array.shape, from_numpy(array.dtype)) for name, array in feeds.items()}
        try:
            return batch_axes.of(types)
        except RowsError:
            return None

    def _results(self, request: Request, shown: RowAxes) -> dict[str, Rows | None] | None:
        """Where the results have rows; None when a result cannot be put together."""
        results = {name: shown.blobs.get(name) for name in request.names}
        for name, rows in results.items():
            if name in request.feeds or (rows.before > 1 if rows else name not in self._outputs):
                return None
        return results


class _Later:
    """The batch axes of a model, inferred at first use."""

    def __init__(self, model: Model, options: CompileOptions) -> None:
        self._model: Model | None = model
        self._options = options
        self._made: BatchAxes | None = None

    def made(self) -> BatchAxes | None:
        """None where rows are not apart, or may have other bytes in other batches."""
        model, self._model = self._model, None
        if model is not None and all(node.arguments().bool("batch_invariant", True) for node in model.program.op):
            with suppress(RowsError, SettingError):
                parameters = model.parameters
                outlines = parameters.outlines() if isinstance(parameters, Parameters) else parameters
                options = replace(self._options, batch_padding=None)
                self._made = batch_axes.BatchAxes(model.changed(parameters=outlines), options)
        return self._made


def _first_axes(model: Model) -> dict[str, int]:
    """Axis 0 of every input whose size there is free."""
    infos = {name: model.inputs[name] for name in model.needed_inputs()}
    return {name: 0 for name, info in infos.items() if info.shape is not None and info.shape[:1] == (None,)}
