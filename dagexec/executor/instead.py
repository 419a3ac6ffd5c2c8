"""Runs that other nets compute in place of the model's: steps of decoders that are fed caches, and any lengths."""

from __future__ import annotations

from typing import NamedTuple

import numpy.typing as npt

from dagexec.binding.io_binding import Outputs
from dagexec.core.feeds import Feeds
from dagexec.executor.lengths import LengthRun, LengthRuns
from dagexec.executor.model_runner import ModelRunner
from dagexec.executor.requests.call import PLAIN, Call
from dagexec.executor.runs.callers import Callers
from dagexec.executor.sessions.fed import FedStep, FedSteps

ANY_LENGTH = "any length"


class InPlace(NamedTuple):
    """What computes a run in place of the model: what its net is for, who runs it, and what that is fed."""

    purpose: str
    executor: ModelRunner
    run: FedStep | LengthRun


class Instead:
    """Of one executor."""

    def __init__(self, steps: FedSteps | None, lengths: LengthRuns | None, callers: Callers) -> None:
        self._steps, self._lengths, self._callers = steps, lengths, callers

    def run(self, feeds: Feeds | npt.ArrayLike, call: Call) -> Outputs | None:
        """The results; None for a run that the model's net has to compute, or refuse."""
        if self._steps is not None:
            feeds = self._named(feeds, call)
            step = self._steps.step(feeds, call)
            if step is not None:
                return step.run()
        return None if self._lengths is None else self._lengths.run(feeds, call)

    async def run_async(self, feeds: Feeds | npt.ArrayLike, call: Call) -> Outputs | None:
        """As `run`, for a task."""
        if self._steps is not None:
            feeds = self._named(feeds, call)
            step = await self._steps.step_async(feeds, call)
            if step is not None:
                return await step.run_async()
        return None if self._lengths is None else await self._lengths.run_async(feeds, call)

    def find(self, feeds: Feeds) -> InPlace | None:
        """What computes a run with these feeds; None where the model's net does."""
        step = None if self._steps is None else self._steps.step(feeds, PLAIN)
        if step is not None:
            return InPlace("a step", step.net.executor, step)
        run = None if self._lengths is None else self._lengths.find(feeds, PLAIN)
        return None if run is None else InPlace(ANY_LENGTH, run.executor, run)

    def _named(self, feeds: Feeds | npt.ArrayLike, call: Call) -> Feeds | npt.ArrayLike:
        return feeds if call.out is None and call.outputs is None else self._callers.asked(feeds, call)[0]
