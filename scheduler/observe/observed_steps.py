"""The steps of operators, and of pieces that workers share, which report to an observer."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from dagexec.core.conversion import Conversion, ConvertedStep
from dagexec.core.native import grouped, phases_of, piece_step
from dagexec.core.operator import Step, parts_of
from dagexec.core.profiled import Profiled, ProfiledStep
from dagexec.scheduler.observe.observed_bodies import telling_of_bodies
from dagexec.scheduler.observe.observers import Observer, ObserverGroup
from dagexec.scheduler.plan.dynamic import CheckedStep

if TYPE_CHECKING:
    from dagexec.scheduler.observe.observed_run import ObservedRun

_now = time.perf_counter_ns


class ObservedOperator:
    """The step of an operator, which reports to the observer."""

    __slots__ = ("_profiled", "_run", "_step", "index")

    def __init__(self, run: ObservedRun, index: int, step: Step) -> None:
        self._run = run
        self.index = index
        self._step = step
        self._profiled = _profiling(step, run.observer)

    def __call__(self) -> None:
        """Run or launch the operator once."""
        run, index, step = self._run, self.index, self._step
        worker = threading.current_thread().name
        run.observer.operator_started(run, index, worker)
        error: BaseException | None = None
        start = _now()
        try:
            current = step.current() if isinstance(step, CheckedStep) else step
            if isinstance(current, ConvertedStep):
                self._convert(worker, current.before)
                if self._profiled is None:
                    current.step()
                else:
                    self._profile(worker, self._profiled)
                self._convert(worker, current.after)
            elif self._profiled is not None:
                self._profile(worker, self._profiled)
            elif run.graph.schemas[index].sub_nets:
                with telling_of_bodies(partial(run.observer.inner_stopped, run, index)):
                    current()
            else:
                current()
        except BaseException as caught:
            error = caught
            raise
        finally:
            run.observer.operator_stopped(run, index, worker, start, _now(), error)
            del error  # its traceback has this frame

    def _profile(self, worker: str, profiled: Profiled) -> None:
        for part in profiled():
            self._run.observer.inner_stopped(self._run, self.index, part.label, worker, part.start, part.end, None)

    def _convert(self, worker: str, conversions: Sequence[Conversion]) -> None:
        for conversion in conversions:
            start = _now()
            conversion.copy()
            self._run.observer.converted(self._run, self.index, worker, conversion, start, _now())


class SharedOperator:
    """An operator whose pieces workers share: a step before them, one for each, and one after them.

    Attributes:
        phases: the pieces.
    """

    def __init__(self, run: ObservedRun, index: int, step: Step, most: int) -> None:
        """The operator of this number and step, with up to `most` pieces of a phase."""
        self.index = index
        self.run = run
        self.began: list[int] = []
        self.ended: list[int] = []
        self.error: BaseException | None = None
        self._under_way = False
        self.phases: list[list[Step]] = []
        for part in parts_of(step):
            native = phases_of(part)
            for phase in (
                [[part]] if native is None else [list(map(piece_step, grouped(group, most))) for group in native]
            ):
                number = len(self.phases)
                self.phases.append([ObservedPiece(self, number, piece, body) for piece, body in enumerate(phase)])

    def start(self) -> None:
        """Say that the operator starts."""
        self._under_way = True
        self.run.observer.operator_started(self.run, self.index, threading.current_thread().name)

    def stop(self) -> None:
        """Say that the operator has ended."""
        self._under_way = False
        now = _now()
        start, end = min(self.began, default=now), max(self.ended, default=now)
        worker = threading.current_thread().name
        self.run.observer.operator_stopped(self.run, self.index, worker, start, end, self.error)
        self.error = None

    def give_up(self, error: BaseException | None) -> None:
        """The run is over, which ends the operator, too."""
        if self._under_way:
            self.error = self.error or error
            self.stop()


class ObservedPiece:
    """The step of a piece, which reports to the observer."""

    __slots__ = ("_operator", "_phase", "_piece", "_step", "index")

    def __init__(self, operator: SharedOperator, phase: int, piece: int, step: Step) -> None:
        self.index = operator.index
        self._operator, self._phase, self._piece, self._step = operator, phase, piece, step

    def __call__(self) -> None:
        """Execute the piece once."""
        operator, worker = self._operator, threading.current_thread().name
        run, observer, place = operator.run, operator.run.observer, (self.index, self._phase, self._piece)
        observer.piece_started(run, *place, worker)
        error: BaseException | None = None
        start = _now()
        operator.began.append(start)
        try:
            self._step()
        except BaseException as caught:
            error = operator.error = caught
            raise
        finally:
            end = _now()
            operator.ended.append(end)
            observer.piece_stopped(run, *place, worker, start, end, error)
            del error


def _profiling(step: Step, observer: Observer) -> Profiled | None:
    """Runs a step that can report its parts, if the observer wants to hear of them."""
    inner = step.step if isinstance(step, ConvertedStep) else step
    if not isinstance(inner, ProfiledStep) or not _hears_of_parts(observer):
        return None
    return inner.profiling()


def _hears_of_parts(observer: Observer) -> bool:
    if isinstance(observer, ObserverGroup):
        return any(map(_hears_of_parts, observer.observers))
    return type(observer).inner_stopped is not Observer.inner_stopped
