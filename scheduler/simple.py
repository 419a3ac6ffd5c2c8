"""SimpleNet: operators one after another, in list order. The reference that the other nets must agree with."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import ClassVar

from dagexec.core.arithmetic import operator_arithmetic
from dagexec.core.errors import RunTimeoutError
from dagexec.core.operator import Step
from dagexec.scheduler.net import BaseNet
from dagexec.scheduler.plan import build_sequence
from dagexec.scheduler.preparation import Preparation
from dagexec.scheduler.run import ChainSteps, Run, operator_failure
from dagexec.scheduler.trace import Trace


class SimpleNet(BaseNet):
    """Runs in the calling thread; on a pool, one worker runs all of it."""

    net_type: ClassVar[str] = "simple"

    def new_run(self, finished: Callable[[], object], trace: Trace | None = None) -> Run:
        """A run that keeps list order, every operator waiting for the one before."""
        preparation = self.prepared()
        steps: ChainSteps = [(step,) for step in _steps(preparation, trace)] or [()]  # an empty net has an empty chain
        plan = build_sequence(self.graph)
        return Run(self.name, plan, steps, lambda chain, _step: self.graph.label(chain), finished)

    def _execute(self, preparation: Preparation, timeout: float | None, trace: Trace | None) -> None:
        with operator_arithmetic():  # as on a worker of a pool
            if timeout is None:
                self._execute_all(preparation, trace)
            else:
                self._execute_until(time.monotonic() + timeout, timeout, _steps(preparation, trace))

    def _execute_all(self, preparation: Preparation, trace: Trace | None) -> None:
        step = None
        steps = preparation.in_order if trace is None else _steps(preparation, trace)
        try:
            for step in steps:
                step()
        except Exception as error:
            raise self._failure(step, _steps(preparation, None), steps, error) from error

    def _execute_until(self, deadline: float, timeout: float, steps: list[Step]) -> None:
        for index, step in enumerate(steps):
            if time.monotonic() > deadline:
                raise RunTimeoutError(
                    f"net {self.name!r}: stopped before {self.graph.label(index)}, after {timeout} seconds"
                )
            try:
                step()
            except Exception as error:
                raise self._failure(step, steps, steps, error) from error

    def _failure(self, step: Step | None, plain: list[Step], steps: object, error: Exception) -> Exception:
        assert step is not None
        candidates = plain if step in plain else list(steps)  # type: ignore[call-overload]
        label = self.graph.label(candidates.index(step))
        return operator_failure(self.name, label, error, threading.current_thread().name)


def _steps(preparation: Preparation, trace: Trace | None) -> list[Step]:
    if trace is None:
        return preparation.steps
    return [trace.wrap(index, step) for index, step in enumerate(preparation.steps)]
