"""Runs of inputs whose lengths vary: on a net for any length up to a full one, of which there are few.

A text, say, is put into tensors that are somewhat longer, and only attention is told where it ends
(`dagexec.compiler.lengths`). So a new length costs next to nothing beyond a known one. Which full length a run has
follows from its own length alone, so that results do not depend on what ran before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from dagexec.binding.io_binding import Array, Outputs, check_result
from dagexec.compiler.length_rules import LEAST, NotSizedError
from dagexec.compiler.lengths import LENGTH_INPUT, Sized, sized_net
from dagexec.core.dtypes import from_numpy
from dagexec.core.feeds import Feeds
from dagexec.core.model import InputInfo, Model
from dagexec.core.schema import TensorType
from dagexec.errors import DagexecError, OperatorError, ShapeError
from dagexec.executor.model_runner import ModelRunner
from dagexec.executor.requests.call import Call
from dagexec.executor.requests.waiting import on_a_thread
from dagexec.ops.families.attention.fused import FUSED_ATTENTION
from dagexec.platform.records import dataclass
from dagexec.platform.threads import threads

logger = logging.getLogger("dagexec")

_MOST_KINDS = 32
"""Of other sizes than lengths, which are shown to be right one by one."""

_MOST_REFUSED = 1 << 10
"""Full lengths that a net cannot have, as it has fewer positions, say."""

_PARTS = 16
"""Of a length between a power of two and the next, whose multiples are full lengths: at most a 16th is too much."""


def full_length(length: int) -> int:
    """How long the tensors are for inputs that are so long."""
    step = max(4, (1 << (length - 1).bit_length() >> 1) // _PARTS)
    return -(-length // step) * step


@dataclass(frozen=True)
class _Kind:
    """Runs that differ in their length alone.

    Attributes:
        sized: their net.
        executor: runs it.
        refused: full lengths that it cannot have.
    """

    sized: Sized
    executor: ModelRunner
    refused: dict[int, None]


@dataclass(frozen=True)
class LengthRun:
    """One such run.

    Attributes:
        kind: of its net.
        length, full: how long its inputs are, and the tensors.
        fed: what the net is fed.
        call: what it is asked for.
        out: the caller's arrays for outputs.
    """

    kind: _Kind
    length: int
    full: int
    fed: Mapping[str, Array]
    call: Call
    out: Mapping[str, Array]

    def results(self, outputs: Outputs) -> Outputs:
        """The first positions of the outputs of the net. Raises FeedError for an array that does not fit."""
        return {name: self._result(name, array) for name, array in outputs.items()}

    def _result(self, name: str, array: Array) -> Array:
        axes = self.kind.sized.outputs[name]
        first = array[tuple(slice(self.length if axis in axes else None) for axis in range(array.ndim))]
        target = self.out.get(name)
        if target is None:
            return np.ascontiguousarray(first)
        check_result(self.kind.executor.model.name, name, first, target)
        target[...] = first
        return target


def axes_of_length(inputs: Mapping[str, InputInfo]) -> dict[str, int]:
    """The axis of each input that may be as long as a text, one of free size behind the first; {} where several may."""
    axes: dict[str, int] = {}
    for name, info in inputs.items():
        if info.shape is None or info.is_sequence or info.dtype is None:
            return {}
        free = [axis for axis, size in enumerate(info.shape) if size is None and axis]
        if len(free) > 1:
            return {}
        axes |= {name: free[0]} if free else {}
    return axes


class LengthRuns:
    """Of one executor."""

    def __init__(
        self, runner: ModelRunner, axes: Mapping[str, int], model: Model, build: Callable[[Model], ModelRunner]
    ) -> None:
        """`axes` are those of its inputs that are as long as a text; `build` makes an executor beside it."""
        self._runner, self._axes, self._model, self._build = runner, axes, model, build
        self._kinds: dict[object, _Kind | None] = {}
        self._lock = threads().lock()

    @staticmethod
    def of(runner: ModelRunner, model: Model, build: Callable[[Model], ModelRunner]) -> LengthRuns | None:
        """Those of an executor; None for a net without lengths or attention."""
        axes = axes_of_length(runner.inputs)
        has_attention = any(node.type == FUSED_ATTENTION for node in model.program.op)
        return LengthRuns(runner, axes, model, build) if axes and has_attention else None

    def run(self, feeds: Feeds | npt.ArrayLike, call: Call) -> Outputs | None:
        """Results by the net for its length; None for a run that the net itself has to compute, or refuse."""
        run = self.find(feeds, call)
        if run is None:
            return None
        try:
            return run.results(run.kind.executor._run(run.fed, run.call))
        except (OperatorError, ShapeError) as error:
            self._refuse(run, error)
            return None

    async def run_async(self, feeds: Feeds | npt.ArrayLike, call: Call) -> Outputs | None:
        """The same in a task."""
        arrays = self._arrays(feeds)
        if arrays is None:
            return None
        if self._key(arrays) in self._kinds:
            run = self.find(feeds, call)
        else:
            run = await on_a_thread(f"dagexec-{self._model.name}-lengths", partial(self.find, feeds, call))
        if run is None:
            return None
        try:
            return run.results(await run.kind.executor._run_async(run.fed, run.call))
        except (OperatorError, ShapeError) as error:
            self._refuse(run, error)
            return None

    def _refuse(self, run: LengthRun, error: DagexecError) -> None:
        """The full length may be too much for the net; otherwise the net itself fails likewise, in its own words."""
        logger.info("net %r: %d positions in tensors for %d: %s", self._model.name, run.length, run.full, str(error))
        if run.length != run.full and len(run.kind.refused) < _MOST_REFUSED:
            run.kind.refused[run.full] = None

    def find(self, feeds: Feeds | npt.ArrayLike, call: Call) -> LengthRun | None:
        """The run by a net for its length; None where there is none."""
        arrays = self._arrays(feeds)
        if arrays is None:
            return None
        axes = self._long(arrays)
        lengths = {arrays[name].shape[axis] for name, axis in axes.items()}
        length = lengths.pop() if len(lengths) == 1 else 0
        if length < LEAST:
            return None
        kind = self._kind(arrays, axes)
        full = full_length(length)
        if kind is None or full in kind.refused:
            return None
        names = list(self._runner.outputs if call.outputs is None else call.outputs)
        if not kind.sized.outputs.keys() >= set(names):
            return None
        fed = {name: _whole(array, axes.get(name), full) for name, array in arrays.items()}
        fed[LENGTH_INPUT] = np.array([length])
        return LengthRun(kind, length, full, fed, call._replace(outputs=names, out=None), call.out or {})

    def _long(self, arrays: Mapping[str, Array]) -> dict[str, int]:
        """The axes that have the length in this run: caches may be empty."""
        return {name: axis for name, axis in self._axes.items() if arrays[name].shape[axis]}

    def _arrays(self, feeds: Feeds | npt.ArrayLike) -> Mapping[str, Array] | None:
        """What is fed, of the types of the inputs; None for anything else."""
        inputs = self._runner.inputs
        if isinstance(feeds, np.ndarray) and len(inputs) == 1:
            feeds = dict.fromkeys(inputs, feeds)
        if not isinstance(feeds, Mapping) or feeds.keys() != inputs.keys():
            return None
        arrays: dict[str, Array] = {}
        for name, info in inputs.items():
            array = feeds[name]
            shape, dtype = info.shape, info.dtype
            if not isinstance(array, np.ndarray) or shape is None or dtype is None or array.dtype != dtype.numpy:
                return None
            if len(shape) != array.ndim or any(a not in (None, b) for a, b in zip(shape, array.shape, strict=True)):
                return None
            arrays[name] = array
        return arrays

    def _kind(self, arrays: Mapping[str, Array], axes: Mapping[str, int]) -> _Kind | None:
        key = self._key(arrays)
        with self._lock:
            if key in self._kinds:
                return self._kinds[key]
            kind = self._made(arrays, axes)
            self._kinds[key] = kind
            if len(self._kinds) > _MOST_KINDS:
                del self._kinds[next(iter(self._kinds))]
            return kind

    def _key(self, arrays: Mapping[str, Array]) -> tuple[tuple[int, ...], ...]:
        axes = self._long(arrays)
        return tuple([_without(array.shape, axes.get(name)) for name, array in arrays.items()])

    def _made(self, arrays: Mapping[str, Array], axes: Mapping[str, int]) -> _Kind | None:
        types = {name: TensorType(array.shape, from_numpy(array.dtype)) for name, array in arrays.items()}
        try:
            sized = sized_net(self._model, types, axes)
        except (NotSizedError, DagexecError) as reason:
            logger.info("net %r: each length is prepared: %s", self._model.name, str(reason))
            return None
        for kind in self._kinds.values():
            if kind is not None and _nodes(kind.sized) == _nodes(sized):
                return _Kind(sized, kind.executor, {})
        return _Kind(sized, self._build(sized.model), {})


def _whole(array: Array, axis: int | None, full: int) -> Array:
    """`array` with zeros behind it on an axis."""
    if axis is None or array.shape[axis] == full:
        return array
    whole = np.zeros((*array.shape[:axis], full, *array.shape[axis + 1 :]), array.dtype)
    whole[(*(slice(None),) * axis, slice(array.shape[axis]))] = array
    return whole


def _without(shape: Sequence[int], axis: int | None) -> tuple[int, ...]:
    return tuple(shape) if axis is None else (*shape[:axis], *shape[axis + 1 :])


def _nodes(sized: Sized) -> list[tuple[str, Sequence[str]]]:
    return [(node.type, node.input) for node in sized.model.program.op]
