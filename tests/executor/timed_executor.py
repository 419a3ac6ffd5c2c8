"""An executor on a clock of its own, by which its runs take as long as a test says."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import dagexec
from dagexec.executor.requests.request import Request
from tests.held import PATIENCE, doubled_model, rows


class Timed:
    """An executor whose runs take as long as it says.

    Attributes:
        seconds: how long the next runs take.
        handed_over: how many requests were not run at once.
        in_turns: how many of these were run in a turn of an event loop.
    """

    def __init__(self, executor: dagexec.Executor, seconds: float) -> None:
        self.executor = executor
        self.seconds = seconds
        self.handed_over = self.in_turns = 0
        self._submit, self._run_here = executor._pooled.submit, executor._pooled.run_here
        executor._pooled.submit = self._note  # type: ignore[method-assign]
        executor._pooled.run_here = self._note_turn  # type: ignore[method-assign]
        assert executor._inline is not None
        executor._dispatcher._now, executor._inline._now = self._clock(), self._clock()
        if executor._turns is not None:
            executor._turns._now = self._clock()

    def _clock(self) -> Callable[[], float]:
        """One on which `seconds` pass between two looks."""
        moments = itertools.accumulate(iter(lambda: self.seconds, None))
        return lambda: next(moments)

    def _note(self, *arguments: Any, **options: Any) -> None:
        self.handed_over += 1
        self._submit(*arguments, **options)

    def _note_turn(self, request: Request) -> None:
        self.in_turns += 1
        self._run_here(request)

    def measure(self, seconds: float) -> None:
        """Have the next runs take `seconds`, as the last ones did."""
        self.seconds = seconds
        for _ in range(2):
            self.executor.run({"x": rows(1)}, timeout=PATIENCE)
        self.handed_over = self.in_turns = 0

    async def is_here(self, **options: Any) -> bool:
        """Whether a run is on the thread of the event loop."""
        before = self.handed_over
        assert (await self.executor.run_async({"x": rows(3)}, **options))["y"].flat[0] == 6
        return self.handed_over == before


@contextmanager
def timed(op_type: str = "Relu", *, seconds: float, **options: Any) -> Iterator[Timed]:
    model = doubled_model(op_type)
    with dagexec.compile(
        model, optimize=False, net_type="simple", warm_start={"x": rows(0).shape}, **options
    ) as executor:
        found = Timed(executor, seconds)
        found.measure(seconds)
        yield found
