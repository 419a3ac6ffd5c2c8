"""Session: runs of a model that follow one another, where outputs of one are inputs of the next.

Caches of a decoder, states of a recurrent net, samples that a streaming convolution still needs: a session keeps them
between its runs. A run that fails or is cancelled leaves them as they were.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dagexec.binding.io_binding import Array, Outputs
from dagexec.compiler.stepping import CACHE, LENGTH
from dagexec.core.caches import Caches
from dagexec.core.dtypes import FLOAT32, STRING, from_numpy
from dagexec.core.feeds import Feeds, as_arrays, check_feeds, named_feeds
from dagexec.core.model import InputInfo
from dagexec.core.schema import TensorType
from dagexec.core.spelling import did_you_mean
from dagexec.errors import FeedError, SessionBusyError
from dagexec.executor.model_runner import ModelRunner
from dagexec.executor.requests.call import PLAIN, Call
from dagexec.executor.requests.waiting import on_a_thread
from dagexec.executor.sessions.memory import SessionMemory
from dagexec.executor.sessions.names import states_by_name
from dagexec.executor.sessions.sizes import LEAST_BOUND, MOST_AT_ONCE, Growth, StepSizes, learned, longer
from dagexec.executor.sessions.states import States
from dagexec.executor.sessions.steps import StepNet, StepNets
from dagexec.executor.source.types import GivenTypes
from dagexec.platform.records import dataclass
from dagexec.platform.threads import threads


@dataclass(frozen=True)
class _Run:
    """A run of the executor, or of a net of a step.

    Attributes:
        executor: who runs it.
        fed: all that it is fed.
        names: the outputs for the caller.
        call: what the executor is asked for.
        states: those that it begins with.
        used: the inputs that are states, now and before.
        asked: what the session was asked for.
        sizes: of a step; None of a run whose results tell.
    """

    executor: ModelRunner
    fed: Mapping[str, Array]
    names: Sequence[str]
    call: Call
    states: States
    used: frozenset[str]
    asked: Call
    sizes: StepSizes | None = None


class Step(NamedTuple):
    """A step: who runs it, and what that is fed."""

    executor: ModelRunner
    fed: Mapping[str, Array]


class Session(ModelRunner):
    """One sequence of runs; `Executor.session` makes it.

        with executor.session() as session:
            for token in prompt:
                scores = session.run({"token": token})["scores"]

    Inputs that a run is not fed are states: zeros at first, then what the outputs that belong to them were in the run
    before. An axis along which such an output is longer than its input, as a cache's, begins with length 0. To feed a
    state is to replace it. What `reset` says of other inputs holds until the next one. One run at a time; different
    sessions run at the same time, as the executor's requests do.

    Where attention reads caches, a run that adds a few positions is a *step*: they are put behind those that are there,
    in memory of the session with room to grow, and it is prepared for all lengths at once (`compiler.stepping`).
    """

    def __init__(
        self,
        executor: ModelRunner,
        types: GivenTypes,
        nets: StepNets,
        memory: SessionMemory,
        states: Mapping[str, str] | None,
    ) -> None:
        """See `Executor.session`. `types` are of the model that `executor` runs, `nets` those of its steps."""
        self.model = executor.model
        self._executor = executor
        self._types = types
        self._nets = nets
        self._memory = memory
        self._needed = self.model.needed_inputs()
        outputs = executor.outputs
        self._pairs = states_by_name(self.inputs, outputs) if states is None else dict(states)
        for name, output in self._pairs.items():
            for what, kind, among in ((name, "input", self.inputs), (output, "output", outputs)):
                if what not in among:
                    raise FeedError(f"{self._label}: states: {what!r} is no {kind}{did_you_mean(what, among)}")
        self._constants: dict[str, Array] = {}
        self._states = States({})
        self._used: frozenset[str] = frozenset()
        self._sizes: StepSizes | None = None
        self._is_new = False
        self._last: _Run | None = None
        self._net: StepNet | None = None
        self._net_ran: StepSizes | None = None  # the run that it was last looked up for, which may not have ended well
        self._bound = 0
        self._growth: Growth = {}
        self._padded: dict[str, Array] = {}
        self._turn = threads().lock()
        self.last_run = 0
        memory.add(self)

    @property
    def _label(self) -> str:
        return f"net {self.model.name!r}: session"

    @property
    def _length(self) -> int:
        """How many positions there are in caches."""
        return 0 if self._sizes is None else self._sizes.end

    @property
    def state(self) -> Mapping[str, Array]:
        """What the next run is fed, by input: read-only, and copies of what is in caches.

        Raises SessionBusyError during a run.
        """
        with self._alone():
            arrays = {**self._constants, **self._states.whole(self._length)}
            in_place = {**self._constants, **self._states.arrays}
        return {name: _read_only(array if name in in_place else array.copy()) for name, array in arrays.items()}

    @property
    def caches(self) -> Caches | None:
        """Those that it has, or shares with forks; None where there are none."""
        return self._states.caches

    @property
    def nbytes(self) -> int:
        """Bytes of its states: with the room for more positions, and with what it shares with forks."""
        caches = self.caches
        arrays = *self._constants.values(), *self._states.arrays.values()
        return sum(array.nbytes for array in arrays) + (caches.nbytes if caches else 0)

    def cut_caches(self) -> int:
        """Have no room for more positions than there are; the bytes saved, none during a run or where others share."""
        if not self._turn.acquire(blocking=False):
            return 0
        try:
            return self._states.cut(self._length)
        finally:
            self._turn.release()

    def reset(self, state: Mapping[str, npt.ArrayLike] | None = None) -> None:
        """Begin anew: from zeros, or from copies of these arrays, by input.

        An input that no output belongs to, as what a decoder reads of its encoder, is the same in each run then that is
        not fed it. Raises FeedError for what is no input, or no array of its type; SessionBusyError during a run.
        """
        arrays = {name: np.array(array) for name, array in (state or {}).items()}
        for name in arrays:
            if name not in self.inputs:
                raise FeedError(f"{self._label}: {name!r} is no input{did_you_mean(name, self.inputs)}")
        check_feeds(self.model, arrays, frozenset())
        with self._alone():
            self._begin(arrays)

    def _begin(self, arrays: Mapping[str, Array]) -> None:
        """See `reset`; nobody else writes to the arrays."""
        states = {name: array for name, array in arrays.items() if name in self._pairs}
        self._states.leave()
        self._constants = {name: array for name, array in arrays.items() if name not in self._pairs}
        self._states, self._used, self._sizes, self._is_new = States(states), frozenset(states), None, True
        self._last = None

    @property
    def states(self) -> Mapping[str, str]:
        """The output that each input which is a state is fed in the next run."""
        return self._pairs

    def step_for(self, feeds: Feeds) -> Step | None:
        """What a run with these feeds would run, if it is a step. Raises what `run` does before anything runs."""
        with self._alone():
            run = self._next(feeds, PLAIN)
        return None if run.sizes is None else Step(run.executor, run.fed)

    def fork(self) -> Session:
        """Another session that goes on from here; what came before is shared. Raises SessionBusyError during a run."""
        other = self._another()
        with self._alone():
            other._constants = self._constants
            other._states, other._used, other._sizes = self._states.fork(), self._used, self._sizes
            other._net, other._net_ran = self._net, self._net_ran
            other._bound, other._growth = self._bound, self._growth
        return other

    def _another(self) -> Session:
        """A new one of the same executor."""
        return Session(self._executor, self._types, self._nets, self._memory, self._pairs)

    def close(self) -> None:
        """Let go of the state; the executor stays open. Raises SessionBusyError during a run."""
        self.reset()

    async def aclose(self) -> None:
        """Like `close`."""
        self.reset()

    def _run(self, feeds: Feeds | npt.ArrayLike, call: Call) -> Outputs:
        with self._alone():
            run = self._next(feeds, call)
            try:
                return self._advanced(run, run.executor._run(run.fed, run.call))
            except BaseException:
                run.states.renew()
                raise

    async def _run_async(self, feeds: Feeds | npt.ArrayLike, call: Call) -> Outputs:
        with self._alone():
            if self._net is None and (self._sizes is not None or self._is_new or not self._used):  # it may be made
                run = await on_a_thread(f"dagexec-{self.model.name}-session", partial(self._next, feeds, call))
            else:
                run = self._next(feeds, call)
            try:
                return self._advanced(run, await run.executor._run_async(run.fed, run.call))
            except BaseException:
                run.states.renew()
                raise

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._turn.acquire(blocking=False):
            self._memory.wait()  # its caches may be cut, which is no run
            if not self._turn.acquire(blocking=False):
                raise SessionBusyError(f"{self._label}: a run of it is under way; it has one at a time")
        try:
            self.last_run = self._memory.next_run()
            yield
        finally:
            self._turn.release()

    def _next(self, feeds: Feeds | npt.ArrayLike, call: Call) -> _Run:
        """What is run for a caller: a step, where that is possible."""
        again = self._next_alike(feeds, call)
        if again is not None:
            return again
        asked_for = self._needed - self._pairs.keys() - self._constants.keys()
        named = {**self._constants, **as_arrays(self.model.name, named_feeds(self.model.name, feeds, asked_for))}
        left_out = self._needed - named.keys()
        strangers = sorted(left_out - self._pairs.keys())
        if strangers:
            raise FeedError(
                f"{self._label}: input {strangers[0]!r} is neither fed nor known as a state; "
                f"session(states={{{strangers[0]!r}: OUTPUT}}) says which of the outputs {list(self.outputs)} it is fed"
            )
        used = self._used | left_out
        held = {self._pairs[name] for name in used}
        names = [name for name in self.outputs if name not in held] if call.outputs is None else list(call.outputs)
        states, sizes = self._states, self._sizes
        missing = left_out - states.names()
        if missing:
            states = self._begun(missing, named)
        is_first = bool(missing) or self._is_new
        if is_first:
            sizes = self._first_sizes(_types_of(named), states)
        if sizes is not None and sizes.axes.keys() <= left_out and call.out is None and held.isdisjoint(names):
            step = self._step(sizes, states, named, is_first=is_first)
            if step is not None:
                net, fed, sizes = step
                others = {self._pairs[name] for name in used - sizes.axes.keys()}
                asked = call._replace(outputs=[*names, *sorted(others)])
                return _Run(net.executor, fed, names, asked, states, used, call, sizes)
        states.leave_caches(self._length)
        self._net = None
        asked = call._replace(outputs=[*names, *sorted(held.difference(names))])
        return _Run(self._executor, {**states.arrays, **named}, names, asked, states, used, call)

    def _next_alike(self, feeds: Feeds | npt.ArrayLike, call: Call) -> _Run | None:
        """As `_next`, of a step like the last one, as most steps of a decoder are: little is left to find out."""
        last, net = self._last, self._net
        if last is None or last.sizes is None or net is None or net.executor is not last.executor:
            return None
        if call is not last.asked or feeds.__class__ is not dict:
            return None
        sizes = last.sizes.following()
        if self._growth or self._bound < sizes.end or feeds.keys() != sizes.types.keys():
            return None
        for name, kind in sizes.types.items():
            array = feeds[name]
            if array.__class__ is not np.ndarray or array.shape != kind.shape or array.dtype != kind.meta.numpy:
                return None
        fed = self._fed(net, sizes, feeds, self._states)
        return _Run(net.executor, fed, last.names, last.call, self._states, last.used, call, sizes)

    def _step(
        self, last: StepSizes, states: States, named: Mapping[str, Array], *, is_first: bool
    ) -> tuple[StepNet, dict[str, Array], StepSizes] | None:
        """A step behind the `last` run: its net, what that is fed, and its sizes.

        None where it adds many positions, or the net has no steps.
        """
        types = _types_of(named)
        following = last.next(types, lambda: self._learned(types, states))
        if following is None:
            return None
        sizes, growth, is_alike = following
        if sizes.added > MOST_AT_ONCE:
            return None
        is_last = self._net is not None and self._net_ran is last and is_alike
        self._net_ran = sizes
        if not is_last or self._bound < sizes.end or growth != self._growth:
            self._bound = max(LEAST_BOUND, 1 << (sizes.end - 1).bit_length())
            self._net, self._padded = None, {}
            for one in self._first_growths(sizes, states) if is_first else [growth]:
                self._growth, self._net = one, self._found(sizes, states, one, self._bound - sizes.added)
                if self._net is not None:
                    break
        net = self._net
        if net is None:
            return None
        fed = self._fed(net, sizes, named, states)
        for name, (axis, more) in self._growth.items():
            fed[name] = self._filled(name, named[name], axis, self._bound - sizes.added + more)
        return net, fed, sizes

    def _fed(self, net: StepNet, sizes: StepSizes, named: Mapping[str, Array], states: States) -> dict[str, Array]:
        """What a step is fed, with what its caller feeds."""
        caches = states.with_room(net.net.layers, sizes.length, sizes.end, self._memory)
        return {**states.arrays, **named, CACHE: np.array([caches.number]), LENGTH: np.array([sizes.length])}

    def _found(self, sizes: StepSizes, states: States, growth: Growth, full: int) -> StepNet | None:
        """The net of steps of these sizes, with up to `full` positions before them; None where there is none."""
        types = {**sizes.types, **_types_of(states.whole(sizes.length))}
        axes = {**growth, **{name: (axis, 0) for name, axis in sizes.axes.items()}}
        for name, (axis, more) in axes.items():
            shape = types[name].shape
            types[name] = TensorType((*shape[:axis], full + more, *shape[axis + 1 :]), types[name].meta)
        return self._nets.find({name: self._pairs[name] for name in sizes.axes}, types, axes, full)

    def _filled(self, name: str, array: Array, axis: int, size: int) -> Array:
        """What the caller fed of an input that grows along `axis`, in an array for full caches."""
        whole = self._padded.get(name)
        if whole is None:
            shape = (*array.shape[:axis], size, *array.shape[axis + 1 :])
            whole = self._padded[name] = np.zeros(shape, array.dtype)
        whole[(*(slice(None),) * axis, slice(array.shape[axis]))] = array
        return whole

    def _begun(self, names: Set[str], named: Mapping[str, Array]) -> States:
        """States with zeros for those of these names. Raises FeedError for those whose sizes cannot be told."""
        types, known = _types_of(named), self._states.whole(self._length)
        free = [size for name, kind in types.items() for size in _free_sizes(self.inputs.get(name), kind)]
        batch = next((size for axis, size in free if axis == 0), 1)
        zeros: dict[str, Array] = {}
        for other in dict.fromkeys((0, batch, *(size for _, size in free), 1)):  # of free axes behind the first
            kinds = {name: _free_type(self.inputs[name], batch, other) for name in names}
            results = self._types.blobs({**types, **_types_of(known), **kinds}) or {}
            zeros = {
                name: array
                for name, kind in kinds.items()
                if (array := _zeros(self.inputs[name], kind, results.get(self._pairs[name]))) is not None
            }
            if len(zeros) == len(names):
                break
        for name in sorted(names - zeros.keys()):
            info = self.inputs[name]
            raise FeedError(f"{self._label}: how state {name!r}, {info}, begins: reset({{{name!r}: ARRAY}}) says")
        return States({**known, **zeros})

    def _first_sizes(self, types: Mapping[str, TensorType], states: States) -> StepSizes | None:
        """Those of a run like one with inputs of these types, as if it had been before that."""
        first = self._learned(types, states)
        return first and StepSizes(types, first.length - first.added, first.added, first.axes)

    def _first_growths(self, sizes: StepSizes, states: States) -> Iterator[Growth]:
        """What may be as long as the caches in a first run, the likelier first.

        That is an input of their length of which longer caches need more, or have use for more: they grow by as much.
        The first of several axes is that of the batch.
        """
        types = {**sizes.types, **_types_of(states.whole(sizes.length))}
        types |= {name: longer(types[name], axis, 1) for name, axis in sizes.axes.items()}
        growths: Iterator[Growth] = (
            {name: (axis, sizes.added)}
            for name, kind in sizes.types.items()
            for axis, size in _free_sizes(self.inputs.get(name), kind)
            if size == sizes.end and (axis > 0 or len(kind.shape) == 1)
            if self._added({**types, name: longer(kind, axis, 1)}, sizes) == sizes.added
        )
        yield from islice(growths, 1)
        if self._added(types, sizes) == sizes.added:
            yield {}

    def _added(self, types: Mapping[str, TensorType], sizes: StepSizes) -> int:
        """How many positions a run with all inputs of these types adds to the caches; 0 where inference refuses it."""
        results = self._types.blobs(types) or {}
        told = learned(
            types,
            {name: types[name] for name in sizes.axes},
            {name: results.get(self._pairs[name]) for name in sizes.axes},
        )
        return told.added if told is not None and told.axes == sizes.axes else 0

    def _learned(self, types: Mapping[str, TensorType], states: States) -> StepSizes | None:
        """What inference tells of a run with inputs of these types."""
        before = {name: kind for name, kind in _types_of(states.whole(self._length)).items() if name not in types}
        results = self._types.blobs({**types, **before}) or {}
        return learned(types, before, {name: results.get(self._pairs[name]) for name in before})

    def _advanced(self, run: _Run, results: Outputs) -> Outputs:
        """What the caller gets of a run that is over; the rest is the state."""
        kept = {name: self._pairs[name] for name in run.used if self._pairs[name] in results}
        self._states, self._used, self._sizes, self._is_new, self._last = run.states, run.used, run.sizes, False, run
        if run.sizes is None and any(results[output].shape != run.fed[name].shape for name, output in kept.items()):
            types = _types_of(run.fed)
            before = {name: types.pop(name) for name in kept}
            self._sizes = learned(types, before, {name: _type_of(results[output]) for name, output in kept.items()})
        self._states.arrays |= {name: results[output] for name, output in kept.items()}
        shared = set(kept.values())
        return {name: results[name].copy() if name in shared else results[name] for name in run.names}


def _type_of(array: Array) -> TensorType:
    return TensorType(array.shape, from_numpy(array.dtype))


def _types_of(arrays: Mapping[str, Array]) -> dict[str, TensorType]:
    return {name: _type_of(array) for name, array in arrays.items()}


def _free_type(info: InputInfo, first: int, others: int) -> TensorType:
    """The type of a state whose axes of free size have these."""
    sizes = enumerate(info.shape or ())
    shape = tuple((others if axis else first) if size is None else size for axis, size in sizes)
    return TensorType(shape, info.dtype or FLOAT32)


def _zeros(info: InputInfo, kind: TensorType, result: TensorType | None) -> Array | None:
    """A state's first array, where one of type `kind` becomes `result`: free axes that get longer begin with 0.

    None where it cannot be told.
    """
    is_free = info.shape is not None and None in info.shape
    after = kind.shape if result is None else result.shape
    if info.shape is None or kind.meta is STRING or len(after) != len(kind.shape) or (is_free and result is None):
        return None
    triples = list(zip(info.shape, kind.shape, after, strict=True))
    if any(size is None and own == grown == 0 for size, own, grown in triples):
        return None
    return np.zeros([0 if size is None and grown != own else own for size, own, grown in triples], kind.meta.numpy)


def _free_sizes(info: InputInfo | None, kind: TensorType) -> list[tuple[int, int]]:
    """Axes of free size of an input, and how long they are in a run."""
    shape = None if info is None else info.shape
    if shape is None or len(shape) != len(kind.shape):
        return []
    return [(axis, size) for axis, size in enumerate(kind.shape) if shape[axis] is None]


def _read_only(array: Array) -> Array:
    view = array.view()
    view.flags.writeable = False
    return view
