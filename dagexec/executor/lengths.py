"""Runs of inputs whose lengths vary: on a net for any length up to a full one, of which there are few.

A text, say, is put into tensors that are somewhat longer, and only attention is told where it ends
(`dagexec.compiler.lengths`). So a new length costs next to nothing beyond a known one. Which full length a run has
follows from its own length alone, so that results do not depend on what ran before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

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

_MOST_KINDS = 1 << 12
"""Of sizes of all inputs that are remembered, and of sizes beside the length."""

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
        axes: of the inputs that have the length.
        sized: their net.
        executor: runs it.
        tail: runs what follows at the length that there is; None for nothing.
        computed: full lengths that it has computed.
    """

    axes: Mapping[str, int]
    sized: Sized
    executor: ModelRunner
    tail: ModelRunner | None
    computed: set[int]

    def of_tail(self, names: Iterable[str]) -> list[str]:
        """Those of these outputs that the tail computes."""
        return [name for name in names if name not in self.sized.outputs] if self.tail is not None else []


class _Sizes(NamedTuple):
    """What follows from the sizes of all inputs: how long they are, and the tensors."""

    kind: _Kind
    length: int
    full: int


class _Tail(NamedTuple):
    """What follows on a net: who runs it, what that is fed, and what it is asked for."""

    executor: ModelRunner
    fed: Mapping[str, Array]
    call: Call


@dataclass(frozen=True)
class LengthRun:
    """One such run.

    Attributes:
        key: shapes and element types of the inputs.
        sizes: what follows from them.
        arrays: what the caller feeds.
        fed: what the net is fed.
        call: what the caller asks for.
        names: the outputs for the caller, and in `of_net` those that the net is asked for.
        begun: when the run began.
    """

    key: Hashable
    sizes: _Sizes
    arrays: Mapping[str, Array]
    fed: Mapping[str, Array]
    call: Call
    names: Sequence[str]
    of_net: Sequence[str] | None
    begun: float

    @property
    def executor(self) -> ModelRunner:
        """It runs the net."""
        return self.sizes.kind.executor

    @property
    def call_of_net(self) -> Call:
        """What the net is asked for."""
        if self.of_net is None and not self.call.out:
            return self.call
        return self.call._replace(outputs=self.of_net, out=None)

    def after_net(self, outputs: Outputs) -> tuple[Outputs, _Tail | None]:
        """The first positions of these outputs of the net, and what follows; None where nothing does.

        Raises FeedError for an array of the caller that does not fit.
        """
        self.sizes.kind.computed.add(self.sizes.full)
        results = {name: self._result(name, array) for name, array in outputs.items()}
        return results, self._tail(results)

    def whole(self, results: Outputs, others: Outputs) -> Outputs:
        """The outputs that were asked for, of those of the net and of its tail."""
        both = {**results, **others}
        return {name: both[name] for name in self.names}

    def _result(self, name: str, array: Array) -> Array:
        axes = self.sizes.kind.sized.outputs[name]
        first = array[tuple([slice(self.sizes.length if axis in axes else None) for axis in range(array.ndim)])]
        target = (self.call.out or {}).get(name)
        if target is None:
            return np.ascontiguousarray(first)
        check_result(self.executor.model.name, name, first, target)
        target[...] = first
        return target

    def _tail(self, results: Outputs) -> _Tail | None:
        kind = self.sizes.kind
        names = kind.of_tail(self.names)
        if not names or kind.tail is None:
            return None
        fed = {name: results[name] if name in results else self.arrays[name] for name in kind.tail.inputs}
        out = {name: array for name, array in (self.call.out or {}).items() if name in names}
        left = None if self.call.timeout is None else max(0.0, self.call.timeout - (threads().monotonic() - self.begun))
        return _Tail(kind.tail, fed, Call(names, out or None, left, self.call.priority))


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
        self._sizes: dict[Hashable, _Sizes | None] = {}
        self._kinds: dict[Hashable, _Kind | None] = {}
        self._executors: dict[Hashable, ModelRunner] = {}  # by the operators of their nets
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
            outputs = run.executor._run(run.fed, run.call_of_net)
        except (OperatorError, ShapeError) as error:
            self._refuse(run, error)
            return None
        results, tail = run.after_net(outputs)
        return results if tail is None else run.whole(results, tail.executor._run(tail.fed, tail.call))

    async def run_async(self, feeds: Feeds | npt.ArrayLike, call: Call) -> Outputs | None:
        """The same in a task."""
        arrays, key = self._arrays(feeds)
        if not arrays:
            return None
        if key in self._sizes:
            run = self.find(feeds, call)
        else:
            run = await on_a_thread(f"dagexec-{self._model.name}-lengths", partial(self.find, feeds, call))
        if run is None:
            return None
        try:
            outputs = await run.executor._run_async(run.fed, run.call_of_net)
        except (OperatorError, ShapeError) as error:
            self._refuse(run, error)
            return None
        results, tail = run.after_net(outputs)
        return results if tail is None else run.whole(results, await tail.executor._run_async(tail.fed, tail.call))

    def _refuse(self, run: LengthRun, error: DagexecError) -> None:
        """The full length may be too much for the net; otherwise the net itself fails likewise, in its own words."""
        sizes = run.sizes
        logger.info("net %r: %d positions in %d places: %s", self._model.name, sizes.length, sizes.full, str(error))
        if sizes.full not in sizes.kind.computed:
            self._sizes[run.key] = None

    def find(self, feeds: Feeds | npt.ArrayLike, call: Call) -> LengthRun | None:
        """The run by a net for its length; None where there is none."""
        arrays, key = self._arrays(feeds)
        if not arrays:
            return None
        sizes = self._sizes[key] if key in self._sizes else self._found(arrays, key)
        if sizes is None:
            return None
        kind, length, full = sizes
        names = self._runner.outputs if call.outputs is None else list(call.outputs)
        if not set(self._runner.outputs) >= set(names):
            return None
        of_net = (
            None if call.outputs is None and kind.tail is None else [one for one in names if one in kind.sized.outputs]
        )
        if of_net is not None and kind.of_tail(names) and kind.sized.tail is not None:
            of_net += [name for name in kind.sized.tail.blobs if name not in of_net]
        fed = {name: _whole(array, kind.axes.get(name), full) for name, array in arrays.items()}
        fed[LENGTH_INPUT] = np.array([length])
        begun = 0.0 if call.timeout is None else threads().monotonic()
        return LengthRun(key, sizes, arrays, fed, call, names, of_net, begun)

    def _arrays(self, feeds: Feeds | npt.ArrayLike) -> tuple[Mapping[str, Array], Hashable]:
        """What is fed to all inputs, and its shapes and element types; nothing for anything but arrays."""
        inputs = self._runner.inputs
        if isinstance(feeds, np.ndarray) and len(inputs) == 1:
            feeds = dict.fromkeys(inputs, feeds)
        if not isinstance(feeds, Mapping) or feeds.keys() != inputs.keys():
            return {}, None
        arrays: dict[str, Array] = {}
        for name in inputs:
            array = feeds[name]
            if not isinstance(array, np.ndarray):
                return {}, None
            arrays[name] = array
        return arrays, tuple([(array.shape, array.dtype) for array in arrays.values()])

    def _found(self, arrays: Mapping[str, Array], key: Hashable) -> _Sizes | None:
        """What follows from the sizes of the inputs, which is remembered; None for none, or unsuitable ones."""
        with self._lock:
            found = self._of_sizes(arrays)
            if len(self._sizes) >= _MOST_KINDS:
                self._sizes = {}
            self._sizes[key] = found
            return found

    def _of_sizes(self, arrays: Mapping[str, Array]) -> _Sizes | None:
        for name, info in self._runner.inputs.items():
            shape, own = info.shape or (), arrays[name].shape
            if info.dtype is None or arrays[name].dtype != info.dtype.numpy or len(shape) != len(own):
                return None
            if any(stated not in (None, size) for stated, size in zip(shape, own, strict=True)):
                return None
        axes = {name: axis for name, axis in self._axes.items() if arrays[name].shape[axis]}  # caches may be empty
        lengths = {arrays[name].shape[axis] for name, axis in axes.items()}
        length = lengths.pop() if len(lengths) == 1 else 0
        kind = self._kind(arrays, axes) if length >= LEAST else None
        return None if kind is None else _Sizes(kind, length, full_length(length))

    def _kind(self, arrays: Mapping[str, Array], axes: Mapping[str, int]) -> _Kind | None:
        key = tuple([_without(array.shape, axes.get(name)) for name, array in arrays.items()])
        if key not in self._kinds:
            if len(self._kinds) >= _MOST_KINDS:
                self._kinds = {}
            self._kinds[key] = self._made(arrays, axes)
        return self._kinds[key]

    def _made(self, arrays: Mapping[str, Array], axes: Mapping[str, int]) -> _Kind | None:
        types = {name: TensorType(array.shape, from_numpy(array.dtype)) for name, array in arrays.items()}
        try:
            sized = sized_net(self._model, types, axes)
        except (NotSizedError, DagexecError) as reason:
            logger.info("net %r: each length is prepared: %s", self._model.name, str(reason))
            return None
        tail = None if sized.tail is None else self._executor(sized.tail.model)
        return _Kind(axes, sized, self._executor(sized.model), tail, set())

    def _executor(self, model: Model) -> ModelRunner:
        """One that runs this net, or one of the same operators."""
        form = model.outputs, tuple([(node.type, node.input) for node in model.program.op])
        if form not in self._executors:
            self._executors[form] = self._build(model)
        return self._executors[form]


def _whole(array: Array, axis: int | None, full: int) -> Array:
    """`array` with zeros behind it on an axis."""
    if axis is None or array.shape[axis] == full:
        return array
    whole = np.zeros((*array.shape[:axis], full, *array.shape[axis + 1 :]), array.dtype)
    whole[(*(slice(None),) * axis, slice(array.shape[axis]))] = array
    return whole


def _without(shape: Sequence[int], axis: int | None) -> tuple[int, ...]:
    return tuple(shape) if axis is None else (*shape[:axis], *shape[axis + 1 :])
