"""What dagexec promises of results, tested on islands: the kernels of other runtimes promise none of it.

A test is no proof: it compares bytes for a few batches and values. It stands for the kernels that the runtime chooses
for such shapes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.binding.parameters import parameter_workspace
from dagexec.compiler.tuning.runner import Runner, Trial
from dagexec.core.dtypes import FLOAT32, from_numpy
from dagexec.core.model import Model
from dagexec.core.row_axes import RowAxes, find_row_axes
from dagexec.core.schema import TensorType
from dagexec.core.traits import Rows
from dagexec.errors import DagexecError, RowsError
from dagexec.options import CompileOptions
from dagexec.platform.deadline import Deadline

Array = npt.NDArray[Any]
Feeds = Mapping[str, Array]

_BATCHES = (1, 2, 3, 8)


def promises(options: CompileOptions) -> bool:
    """True when the options promise something that islands may not keep."""
    return options.batch_invariant or options.nan == "kept"


class Guarantees:
    """Tests of one model with islands against what is known of the model that it was made from."""

    def __init__(self, given: Model, own: Trial | None, inputs: Feeds, options: CompileOptions, deadline: Deadline):
        """`own` is the model on dagexec's kernels; without it rows of fixed batches and NaN are not tested."""
        self._given = given
        self._own = own
        self._inputs = inputs
        self._options = options
        self._deadline = deadline

    def broken(self, trial: Trial) -> str | None:
        """Which promise the results of `trial` break, in words; None when all hold that the options ask for."""
        try:
            return next(self._broken(trial), None)
        except DagexecError as error:
            return f"it cannot be tested: {error}"

    def _broken(self, trial: Trial) -> Iterator[str]:
        if self._options.nan == "kept" and self._loses_nan(trial):
            yield "it turns NaN into numbers"
        if not self._options.batch_invariant:
            return
        if self._depends_on_batch(trial):
            yield "the rows of its results depend on their batch"
        if self._deadline.is_over:
            yield "there was no time to test it"

    def _loses_nan(self, trial: Trial) -> bool:
        feeds = {name: _with_nan(array) for name, array in self._inputs.items()}
        if self._own is None or all(feeds[name] is array for name, array in self._inputs.items()):
            return False
        kept, found = _results(self._own, [feeds])[0], _results(trial, [feeds])[0]
        return any(_is_lost(mine, theirs) for mine, theirs in zip(kept, found, strict=True))

    def _depends_on_batch(self, trial: Trial) -> bool:
        axes = self._row_axes()
        if axes is None:
            return self._own is not None and self._mixes_rolled(trial) and not self._mixes_rolled(self._own)
        most = self._batch(axes, max(_BATCHES))
        feeds = [_first_rows(most, axes.inputs, count) for count in _BATCHES]
        *fewer, whole = _results(trial, feeds)
        for count, results in zip(_BATCHES, fewer, strict=False):
            for name, part, all_rows in zip(trial.model.outputs, results, whole, strict=True):
                rows = axes.outputs.get(name)
                expected = all_rows if rows is None else _rows(all_rows, rows, count)
                if part.tobytes() != np.ascontiguousarray(expected).tobytes():
                    return True
        return False

    def _row_axes(self) -> RowAxes | None:
        """Where the model has rows; None where their number is fixed, or they are not apart."""
        types = {name: TensorType(array.shape, from_numpy(array.dtype)) for name, array in self._inputs.items()}
        try:
            return find_row_axes(self._given, types)
        except RowsError:
            return None

    def _batch(self, axes: RowAxes, count: int) -> dict[str, Array]:
        random = np.random.default_rng(0)
        found = dict(self._inputs)
        for name, rows in axes.inputs.items():
            array = self._inputs[name]
            shape = (*array.shape[: rows.axis], count, *array.shape[rows.axis + 1 :])
            found[name] = _random(random, shape, array.dtype)
        return found

    def _mixes_rolled(self, trial: Trial) -> bool:
        """True unless rows that change places along the first axis of all inputs take their results with them."""
        sizes = {array.shape[:1] for array in self._inputs.values()}
        if len(sizes) != 1 or () in sizes or min(sizes)[0] < 2:
            return False
        random = np.random.default_rng(0)
        feeds = {name: _random(random, array.shape, array.dtype) for name, array in self._inputs.items()}
        rolled = {name: np.roll(array, 1, axis=0) for name, array in feeds.items()}
        before, after = _results(trial, [feeds, rolled])
        with_rows = [
            (one, other)
            for one, other in zip(before, after, strict=True)
            if one.shape[:1] == min(sizes) and other.shape == one.shape
        ]
        return any(np.roll(one, 1, axis=0).tobytes() != other.tobytes() for one, other in with_rows)


def _results(trial: Trial, feeds: Sequence[Feeds]) -> list[list[Array]]:
    with Runner(trial, parameter_workspace(trial.model)) as runner:
        return [runner.results(one) for one in feeds]


def _random(random: np.random.Generator, shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
    """Normal floats; zeros and ones for all else, as these are indices of anything."""
    if from_numpy(dtype).is_float:
        return random.standard_normal(shape, FLOAT32.numpy).astype(dtype, copy=False)
    return random.integers(0, 2, shape).astype(dtype)


def _with_nan(array: Array) -> Array:
    """A copy whose first element is NaN; the array itself where it cannot hold one."""
    if array.dtype.kind != "f" or not array.size:
        return array
    found = array.copy()
    found.reshape(-1)[0] = np.nan
    return found


def _is_lost(kept: Array, found: Array) -> bool:
    return kept.dtype.kind == "f" and bool((np.isnan(kept) & ~np.isnan(found)).any())


def _first_rows(feeds: Feeds, rows: Mapping[str, Rows], count: int) -> dict[str, Array]:
    return {
        name: np.ascontiguousarray(_rows(array, rows[name], count)) if name in rows else array
        for name, array in feeds.items()
    }


def _rows(array: Array, rows: Rows, count: int) -> Array:
    """The first `count` examples of an array."""
    shape = array.shape
    split = array.reshape(*shape[: rows.axis], rows.before, -1, rows.each, *shape[rows.axis + 1 :])
    cut = split[(slice(None),) * (rows.axis + 1) + (slice(count),)]
    return cut.reshape(*shape[: rows.axis], rows.size(count), *shape[rows.axis + 1 :])
