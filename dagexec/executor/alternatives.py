"""An executor that compiles further nets of its model when runs first need them; all share its workers."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from types import MappingProxyType

from dagexec.core.model import Model
from dagexec.errors import ClosedError
from dagexec.executor.batching.axes import BatchAxes
from dagexec.executor.dispatch.statistics import OUTCOMES, ExecutorStatistics
from dagexec.executor.executor import Executor
from dagexec.executor.requests.waiting import on_a_thread
from dagexec.executor.source.origin import Origin
from dagexec.executor.source.types import GivenTypes
from dagexec.options import CompileOptions
from dagexec.platform.forking import reset_after_fork
from dagexec.platform.locks import new_lock
from dagexec.scheduler.run.run import waiting_time

_COUNTS = ("replicas", "running", "queued", "awaiting_admission", *OUTCOMES)


class ExecutorWithAlternatives(Executor):
    """An Executor with others beside it, one for each key that a run may have."""

    def __init__(
        self,
        model: Model,
        options: CompileOptions,
        given: Model | None,
        given_types: Callable[[], GivenTypes] | None,
        batch_axes: BatchAxes | None = None,
        origin: Origin | None = None,
    ) -> None:
        """See `Executor`."""
        self._alternatives: Mapping[Hashable, Executor] = MappingProxyType({})
        self._compiling = new_lock()
        self._is_open = True
        reset_after_fork(self, ExecutorWithAlternatives._renew_lock)
        super().__init__(model, options, given, given_types=given_types, batch_axes=batch_axes, origin=origin)

    def _once(self, make: Callable[[], Executor]) -> Executor:
        """What `make` makes, which notes it in `_alternatives`, when no other is being made and this one is open."""
        self._dispatcher.check_caller("run")
        with self._compiling:
            if not self._is_open:
                raise ClosedError(f"net {self.model.name!r}: the executor is closed")
            return make()

    def _note(self, key: Hashable, executor: Executor) -> Executor:
        self._alternatives = MappingProxyType({**self._alternatives, key: executor})
        return executor

    def statistics(self) -> ExecutorStatistics:
        """As `Executor.statistics`; requests of alternatives are counted, but their times left out."""
        total = super().statistics()
        for other in self._alternatives.values():
            more = other.statistics()
            total = replace(total, **{name: getattr(total, name) + getattr(more, name) for name in _COUNTS})
        return total

    def drain(self, timeout: float | None = None) -> bool:
        """As `Executor.drain`."""
        remaining = self._countdown(timeout)
        in_time = [other.drain(remaining()) for other in self._closing()]
        return super().drain(remaining()) and all(in_time)

    async def drain_async(self, timeout: float | None = None) -> bool:
        """As `Executor.drain_async`."""
        remaining = self._countdown(timeout)
        others = await on_a_thread(f"dagexec-{self.model.name}-closing", self._closing)
        in_time = [await other.drain_async(remaining()) for other in others]
        return await super().drain_async(remaining()) and all(in_time)

    def close(self, *, drain: bool = False) -> None:
        """As `Executor.close`."""
        try:
            for other in self._closing():
                other.close(drain=drain)
        finally:
            super().close(drain=drain)

    async def aclose(self, *, drain: bool = False) -> None:
        """As `Executor.aclose`."""
        try:
            for other in await on_a_thread(f"dagexec-{self.model.name}-closing", self._closing):
                await other.aclose(drain=drain)
        finally:
            await super().aclose(drain=drain)

    def reopen(self) -> None:
        """As `Executor.reopen`."""
        super().reopen()
        for other in self._alternatives.values():
            other.reopen()
        self._is_open = True

    def _countdown(self, timeout: float | None) -> Callable[[], float | None]:
        """Returns the rest of `timeout` seconds at each call, None for no limit. Raises what `waiting_time` raises."""
        waiting_time(timeout)
        deadline = None if timeout is None else self._now() + timeout
        return lambda: None if deadline is None else max(0.0, deadline - self._now())

    def _closing(self) -> tuple[Executor, ...]:
        """Compile no more, and admit no requests; returns all compiled executors."""
        if not self._dispatcher.forked:
            self._shutdown.admit_no_more()
        with self._compiling:
            self._is_open = False
            return tuple(self._alternatives.values())

    def _renew_lock(self) -> None:
        self._compiling = new_lock()  # a thread of the parent may hold the old one forever
