"""Observers: told when runs, chains and operators start and stop, on the host and on the streams of devices.

An `ObservedRun` (`observed_run`) tells them. `trace` collects events for a file, `trace_lines` prints them, and
`counting` keeps counts and mean times.

Ends are reported also for failures, with the error. Times on the host are nanoseconds of `time.perf_counter_ns`. An
observer is called by the worker that does the work, several at once: it must be quick and must guard its state; an
exception of its own ends the run as if the operator had raised it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dagexec.core.conversion import Conversion
    from dagexec.core.stream import Event, Kernel, Stream
    from dagexec.scheduler.observe.observed_run import ObservedRun


class Observer:
    """Lets your code follow a run: override the methods for the events you want; by default they do nothing.

        class Slow(Observer):
            def operator_stopped(self, run, operator, worker, start, end, error):
                if end - start > 10_000_000:  # nanoseconds
                    print(run.graph.label(operator), "on", worker)

        executor.run(feeds, trace=Slow())

    `run` identifies the run and its net; operators are indices into its graph, chains into its chains. An Observer is
    also a `core.runtime.StreamObserver`.
    """

    def run_started(self, run: ObservedRun) -> None:
        """`run` was created; its first chains are ready."""

    def run_stopped(self, run: ObservedRun, end: int, error: BaseException | None) -> None:
        """`run` has ended; `error` is what it raises."""

    def chain_started(self, run: ObservedRun, chain: int, worker: str, ready: int, start: int) -> None:
        """`worker` starts `chain`, which became ready at `ready` and waited in the queue since then."""

    def event_waited(self, run: ObservedRun, chain: int, worker: str, start: int, end: int) -> None:
        """`chain` had to wait for events of its parents; for another kind of device the worker itself blocked."""

    def operator_started(self, run: ObservedRun, operator: int, worker: str) -> None:
        """`worker` starts `operator`: it computes it, or launches it on a stream."""

    def converted(
        self, run: ObservedRun, operator: int, worker: str, conversion: Conversion, start: int, end: int
    ) -> None:
        """`operator`, which is under way, had the layout of a tensor converted."""

    def inner_stopped(
        self,
        run: ObservedRun,
        operator: int,
        inner: str,
        worker: str,
        start: int,
        end: int,
        error: BaseException | None,
    ) -> None:
        """`operator`, which is under way, did its part `inner`: an operator of a net that it runs, or of an island."""

    def piece_started(self, run: ObservedRun, operator: int, phase: int, piece: int, worker: str) -> None:
        """`worker` starts a piece of `operator`, which is under way and which several workers may share."""

    def piece_stopped(
        self,
        run: ObservedRun,
        operator: int,
        phase: int,
        piece: int,
        worker: str,
        start: int,
        end: int,
        error: BaseException | None,
    ) -> None:
        """`worker` is done with a piece of `operator`, or met `error`."""

    def operator_stopped(
        self, run: ObservedRun, operator: int, worker: str, start: int, end: int, error: BaseException | None
    ) -> None:
        """`worker` is done with `operator`: has computed it, or launched it, or met `error`.

        Where workers shared it, from the first of its pieces to the last, and `worker` is one of them.
        """

    def chain_stopped(
        self, run: ObservedRun, chain: int, worker: str, start: int, end: int, error: BaseException | None
    ) -> None:
        """`worker` is done with `chain`, or met `error` in it."""

    def launched(self, stream: Stream, kernel: Kernel) -> None:
        """`kernel` was put on `stream`."""

    def recorded(self, stream: Stream, event: Event) -> None:
        """`event` was recorded at the present end of `stream`."""

    def waits(self, stream: Stream, event: Event) -> None:
        """What follows on `stream` waits for `event`."""

    def host_waited(self, event: Event | Stream) -> None:
        """The calling thread has found `event`, or all of a stream, done."""

    def executed(self, stream: Stream, kernel: Kernel, start: float, end: float) -> None:
        """`kernel` has run, from `start` to `end` in seconds of the device's clock."""

    def waited(self, stream: Stream, event: Event, start: float, end: float) -> None:
        """`stream` stood still for `event` from `start` to `end` in seconds of the device's clock."""


_TOLD = tuple(name for name in vars(Observer) if not name.startswith("_"))


class ObserverGroup(Observer):
    """Passes every event on to several observers, in order."""

    def __init__(self, observers: Iterable[Observer]) -> None:
        self.observers = tuple(observers)
        for name in _TOLD:
            setattr(self, name, _call_each([getattr(observer, name) for observer in self.observers]))


def _call_each(methods: Sequence[Callable[..., object]]) -> Callable[..., None]:
    def call(*what: object) -> None:
        for method in methods:
            method(*what)

    return call


def together(*observers: Observer | None) -> Observer | None:
    """Combine observers into one; None if none is given."""
    present = [observer for observer in observers if observer is not None]
    return ObserverGroup(present) if len(present) > 1 else present[0] if present else None
