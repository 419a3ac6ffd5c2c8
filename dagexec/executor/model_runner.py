"""ModelRunner: runs a model for many callers at once, as an executor in this process or a deployment in others."""

from __future__ import annotations

import operator
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Self

import numpy.typing as npt

from dagexec.binding.io_binding import Array, Outputs
from dagexec.core.feeds import Feeds
from dagexec.core.model import InputInfo, Model
from dagexec.executor.requests.call import PLAIN, Call
from dagexec.platform.closing import Closing
from dagexec.scheduler.observe.observers import Observer


class ModelRunner(Closing):
    """The common interface of executors and deployments.

    Attributes:
        model: what it runs.
    """

    model: Model

    @abstractmethod
    async def aclose(self) -> None:
        """Like `close`, for a task."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    @property
    def inputs(self) -> Mapping[str, InputInfo]:
        """Name, dtype and shape of each input."""
        return self.model.inputs

    @property
    def outputs(self) -> Sequence[str]:
        """Names of the results that a run returns by default."""
        return self.model.outputs

    def run(
        self,
        feeds: Feeds | npt.ArrayLike,
        *,
        outputs: Iterable[str] | None = None,
        out: Mapping[str, Array] | None = None,
        timeout: float | None = None,
        priority: int = 0,
        trace: Observer | None = None,
    ) -> Outputs:
        """Run the model once, and block until it is done. Operators may run in the calling thread.

        Args:
            feeds: an array for every input, by name; or just the array, if the net has a single input.
            outputs: names of the blobs to return, by default the model's outputs.
            out: arrays for these results, by name. Each has the dtype and shape of its result, no two elements in one
                place, and no memory in common with inputs, parameters and the other arrays. After a run that failed
                its contents are undefined.
            timeout: seconds until the run is cancelled, including the wait for a replica.
            priority: among the waiting requests the one with the highest priority goes first, and among equals the
                oldest; chains of its run precede those of others. A request that has been the oldest while 32 others
                were taken goes next, whatever its priority.
            trace: a `Trace` or another observer of what runs when.

        Returns arrays that belong to the caller: those of `out` where given. Raises FeedError, OperatorError,
        RunTimeoutError, ClosedError, QueueFullError, ValueError for a negative `timeout`, TypeError for a priority that
        is no integer, and DagexecError when an operator calls it on the executor that runs it. An operator may call
        it on another one; if both have one pool, the operator's worker runs it meanwhile.
        """
        plain = outputs is out is None and timeout is None and trace is None and type(priority) is int and not priority
        call = PLAIN if plain else Call(outputs, out, timeout, operator.index(priority), trace)
        return self._run(feeds, call)

    async def run_async(
        self,
        feeds: Feeds | npt.ArrayLike,
        *,
        outputs: Iterable[str] | None = None,
        out: Mapping[str, Array] | None = None,
        timeout: float | None = None,
        priority: int = 0,
        trace: Observer | None = None,
    ) -> Outputs:
        """Run the model once, blocking the task but not the event loop (asyncio or trio).

        A short run may use the loop's own thread, which has time for some in each turn. Arguments and results are
        those of `run`. Do not touch the arrays fed, or those of `out`, until it returns. A cancelled await stops the
        run before its next operator or piece, and returns once no worker uses the replica any more.
        """
        plain = outputs is out is None and timeout is None and trace is None and type(priority) is int and not priority
        call = PLAIN if plain else Call(outputs, out, timeout, operator.index(priority), trace)
        return await self._run_async(feeds, call)

    @abstractmethod
    def _run(self, feeds: Feeds | npt.ArrayLike, call: Call) -> Outputs:
        """See `run`."""

    @abstractmethod
    async def _run_async(self, feeds: Feeds | npt.ArrayLike, call: Call) -> Outputs:
        """See `run_async`."""
