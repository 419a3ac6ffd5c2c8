"""An executor whose runs may be fed other values for parameters: ONNX's initializers that are inputs too.

Runs that override nothing use a net in which all parameters are constants, packed and folded. The first run that
overrides some compiles the model once more with these as inputs, for it and later runs that override no others. Both
share the worker pool. Runs that override parameters are not joined.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy.typing as npt

from dagexec.binding.io_binding import Array, Outputs
from dagexec.core.feeds import Feeds
from dagexec.core.model import InputInfo, Model, Overridable
from dagexec.errors import ClosedError, DagexecError
from dagexec.executor.batching.axes import BatchAxes
from dagexec.executor.dispatch.statistics import OUTCOMES, ExecutorStatistics
from dagexec.executor.executor import Executor
from dagexec.executor.requests.call import Call
from dagexec.executor.requests.waiting import on_a_thread
from dagexec.executor.source.types import GivenTypes
from dagexec.options import CompileOptions
from dagexec.platform.forking import reset_after_fork
from dagexec.platform.records import dataclass
from dagexec.scheduler.run.run import waiting_time
from dagexec.scheduler.workers.place import Place, beside

Build = Callable[[Model, CompileOptions, Place], Executor]

_COUNTS = ("replicas", "running", "queued", "awaiting_admission", *OUTCOMES)
_MAX_NAMED = 8

_MOST = 3
"""Nets for runs that override parameters: the last one has all overridable ones as inputs."""


class OverridableExecutor(Executor):
    """An Executor of a model with parameters that may be fed (`overridable`)."""

    def __init__(
        self,
        model: Model,
        options: CompileOptions,
        given: Model | None,
        given_types: Callable[[], GivenTypes] | None,
        overridable: Overridable,
        build: Build,
        batch_axes: BatchAxes | None = None,
    ) -> None:
        """`build` makes the executor of a model with some of `overridable` as inputs, on this one's pool."""
        self._overridable = overridable
        self._build = build
        self._others: tuple[_Other, ...] = ()
        self._compiling = threading.Lock()
        self._is_open = True
        reset_after_fork(self, OverridableExecutor._renew_lock)
        super().__init__(model, options, given, given_types=given_types, batch_axes=batch_axes)

    @property
    def overridable(self) -> Mapping[str, InputInfo]:
        """The parameters that may be fed, by name; by default they have the model's values."""
        return self._overridable.inputs

    def _run(self, feeds: Feeds | npt.ArrayLike, call: Call) -> Outputs:
        """As `Executor._run`. Feeds may have some of `overridable`; the first such run compiles a net."""
        run = super()._run
        if isinstance(feeds, Mapping) and (names := self._overridden(feeds)):
            other = self._other(names)
            feeds, run = other.completed(feeds), other.executor._run
        return run(feeds, call)

    async def _run_async(self, feeds: Feeds | npt.ArrayLike, call: Call) -> Outputs:
        """As `_run`, for a task."""
        run = super()._run_async
        if isinstance(feeds, Mapping) and (names := self._overridden(feeds)):
            other = self._known(names)
            if other is None:
                other = await on_a_thread(f"dagexec-{self.model.name}-compiling", lambda: self._other(names))
            feeds, run = other.completed(feeds), other.executor._run_async
        return await run(feeds, call)

    def warm_up(self, feeds: Feeds | npt.ArrayLike | None = None) -> None:
        """As `Executor.warm_up`; feeds that override parameters warm up the net for these."""
        if isinstance(feeds, Mapping) and (names := self._overridden(feeds)):
            other = self._other(names)
            other.executor.warm_up(other.completed(feeds))
        else:
            super().warm_up(feeds)

    def statistics(self) -> ExecutorStatistics:
        """As `Executor.statistics`; requests that override parameters are counted, but their times left out."""
        total = super().statistics()
        for other in self._others:
            more = other.executor.statistics()
            total = replace(total, **{name: getattr(total, name) + getattr(more, name) for name in _COUNTS})
        return total

    def drain(self, timeout: float | None = None) -> bool:
        """As `Executor.drain`."""
        remaining = self._countdown(timeout)
        in_time = [other.executor.drain(remaining()) for other in self._closing()]
        return super().drain(remaining()) and all(in_time)

    async def drain_async(self, timeout: float | None = None) -> bool:
        """As `Executor.drain_async`."""
        remaining = self._countdown(timeout)
        others = await on_a_thread(f"dagexec-{self.model.name}-closing", self._closing)
        in_time = [await other.executor.drain_async(remaining()) for other in others]
        return await super().drain_async(remaining()) and all(in_time)

    def close(self, *, drain: bool = False) -> None:
        """As `Executor.close`."""
        try:
            for other in self._closing():
                other.executor.close(drain=drain)
        finally:
            super().close(drain=drain)

    async def aclose(self, *, drain: bool = False) -> None:
        """As `Executor.aclose`."""
        try:
            for other in await on_a_thread(f"dagexec-{self.model.name}-closing", self._closing):
                await other.executor.aclose(drain=drain)
        finally:
            await super().aclose(drain=drain)

    def reopen(self) -> None:
        """As `Executor.reopen`."""
        super().reopen()
        for other in self._others:
            other.executor.reopen()
        self._is_open = True

    def _overridden(self, feeds: Feeds) -> frozenset[str]:
        """The overridable parameters among `feeds`."""
        inputs = self._overridable.inputs
        return frozenset() if inputs.keys().isdisjoint(feeds) else frozenset(inputs.keys() & feeds.keys())

    def _known(self, names: frozenset[str]) -> _Other | None:
        return next((other for other in self._others if names <= other.names), None)

    def _other(self, names: frozenset[str]) -> _Other:
        """The executor for feeds with `names`, compiled now if need be."""
        match = self._known(names)
        if match is not None:
            return match
        self._dispatcher.check_caller("run")
        with self._compiling:
            match = self._known(names)
            if match is None:
                if not self._is_open:
                    raise ClosedError(f"net {self.model.name!r}: the executor is closed")
                match = self._compiled(names.union(*(other.names for other in self._others)))
                self._others = (*self._others, match)
        return match

    def _compiled(self, names: frozenset[str]) -> _Other:
        if len(self._others) == _MOST - 1:
            names = frozenset(self._overridable.inputs)
        options = replace(
            self._options,
            net_type=self.net_type,
            num_workers=self.num_workers,
            tuning_seconds=0.0,
            warm_start=False,
            max_batch=1,
            batch_padding=None,
        )
        try:
            executor = self._build(self._overridable.model_with(names), options, beside(self._place))
        except DagexecError as error:
            error.add_note(f"while the model was compiled for runs that override {sorted(names)[:_MAX_NAMED]}")
            raise
        return _Other(names, {name: self._overridable.values[name] for name in names}, executor)

    def _countdown(self, timeout: float | None) -> Callable[[], float | None]:
        """Returns the rest of `timeout` seconds at each call, None for no limit. Raises what `waiting_time` raises."""
        waiting_time(timeout)
        deadline = None if timeout is None else self._now() + timeout
        return lambda: None if deadline is None else max(0.0, deadline - self._now())

    def _closing(self) -> tuple[_Other, ...]:
        """Compile no more, and admit no requests; returns all compiled executors."""
        if not self._dispatcher.forked:
            self._shut()
        with self._compiling:
            self._is_open = False
            return self._others

    def _renew_lock(self) -> None:
        self._compiling = threading.Lock()  # a thread of the parent may hold the old one forever


@dataclass(frozen=True)
class _Other:
    """The executor of runs that override parameters.

    Attributes:
        names: parameters that are its inputs.
        values: their values where a run does not override them.
    """

    names: frozenset[str]
    values: Mapping[str, Array]
    executor: Executor

    def completed(self, feeds: Feeds) -> Feeds:
        """The feeds, completed by the values of the parameters that they leave out."""
        return {**self.values, **feeds}
