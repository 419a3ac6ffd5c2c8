"""Run: one execution of a plan. Everything that changes while a net runs is here, or in the blobs.

The lock of its pool guards the state of a run. `finished` is called once, by the last worker to leave the run, with no
lock held.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from numbers import Real
from typing import Protocol

from dagexec.core.operator import Step, nothing_to_do
from dagexec.errors import DagexecError, RunCancelledError
from dagexec.platform.locks import Mutex
from dagexec.platform.threads import ThreadWait, is_interruptible
from dagexec.scheduler.plan.culprit import Failed, NameStep, needs_no_culprit, operator_failure
from dagexec.scheduler.run.engine import NativeRun
from dagexec.scheduler.run.fair_share import Share
from dagexec.scheduler.run.machine import Machine
from dagexec.scheduler.run.policy_machine import machine_of
from dagexec.scheduler.run.work import SingleChain, Work, chain_work

logger = logging.getLogger("dagexec")


class Helping(Protocol):
    """The part of a pool for bodies that its workers execute, and for failing a run from elsewhere."""

    lock: Mutex

    def run_within(self, run: Run, outer: Run) -> None:
        """Execute `run` for an operator of `outer`, on whose worker this is called."""


class Run:
    """One execution: the machine that decides in it, the workers inside, and the error if there is one.

    Attributes:
        work: what is executed.
        machine: decides; the rest of the work.
        active: workers inside this run.
        width: the most workers that may be inside at once.
        priority: the run with the highest is served first.
        share: of the user of the pool that it is charged to; None for a pool with one user.
        start_tag: among runs of one priority, the smallest is served first (see `fair_share`); set by the pool.
        advance: seconds that its share was charged before it ran.
        has_caller: a thread that waits for its end is in it; set by the pool.
        order: among equal tags, the smallest is served first; set by the pool.
        stopped: nothing further is begun (failure or cancellation).
        interrupted: workers inside check after each piece whether the run is stopped, or another has to go first.
        over: it has ended, or no worker is inside or will be; `finished` is being called or was.
        listed: the pool knows that this run has work.
        inner: runs of bodies that operators of this one wait for; they are stopped with it.
        pool: the pool that executes it, once it was submitted; None before.
        side_by_side: its chains may run side by side, so those of bodies in it may, too.
        waits: those of operators that block, to be ended when the run is stopped (see `dagexec.platform.blocking`).
        on_stop: called with no lock held whenever the run is stopped, even if no worker is inside any more, as devices
            may still be at work for it. None when nobody asks, or it is too late.
    """

    __slots__ = (
        "active", "advance", "error", "finished", "has_caller", "inner", "interrupted", "listed", "machine", "name",
        "name_step", "on_stop", "order", "over", "pool", "priority", "secondary", "share", "side_by_side", "start_tag",
        "stopped", "waits", "width", "work",
    )  # fmt: skip

    def __init__(
        self,
        name: str,
        work: Work,
        name_step: NameStep,
        finished: Callable[[], object],
        priority: int = 0,
    ) -> None:
        """`name_step(chain, step)` gives the label of the operator a step belongs to, for errors.

        `finished` is called at the end of the run; a second time if the worker that called it died in the call.
        """
        self.name = name
        self.work = work
        self.machine: Machine | NativeRun = machine_of(work.graph) if work.native is None else work.native.new_run()
        self.name_step = name_step
        self.finished = finished
        self.active = 0
        self.width = sys.maxsize
        self.priority = priority
        self.share: Share | None = None
        self.start_tag = self.advance = 0.0
        self.has_caller = False
        self.order = 0
        self.stopped = False
        self.interrupted = False
        self.over = False
        self.listed = False
        self.on_stop: Callable[[], object] | None = None
        self.error: BaseException | None = None
        self.secondary: list[BaseException] = []
        self.waits: list[ThreadWait] = []
        self.inner: list[Run] = []
        self.pool: Helping | None = None
        self.side_by_side = True

    def interrupt(self, interrupted: bool) -> None:
        """Have workers check after each piece, or no longer."""
        self.interrupted = interrupted
        if isinstance(self.machine, NativeRun):
            self.machine.interrupt(interrupted)

    def has_place(self) -> bool:
        """True when there is work for one more worker."""
        return self.machine.available > 0 and self.active < self.width and not self.over

    def has_ended(self) -> bool:
        """True when no worker has anything left to do."""
        return not self.machine.remaining or (self.stopped and not self.active)

    def stop(self, error: BaseException) -> None:
        """Begin nothing further; keep the first error, attach and log later ones. Call with the pool's lock held."""
        self.stopped = True
        for wait in tuple(self.waits):
            wait.notify()
        self.interrupted = True
        self.machine.stop()
        for inner in self.inner:
            inner.stop(RunCancelledError(f"net {inner.name!r}: the run that it is part of was stopped"))
        if self.error is None:
            self.error = error
        elif error is not self.error:
            self.secondary.append(error)

    def fail(self, error: BaseException) -> None:
        """As `stop`, for a caller without the lock of the pool, if the run is on one."""
        with nullcontext() if self.pool is None else self.pool.lock:
            self.stop(error)

    def failure(self, task: int, failed: Failed | None, cause: BaseException) -> BaseException:
        """The error to report when `failed`, a step or native call of `task`, raised `cause` in the calling thread."""
        signaled = not isinstance(cause, Exception) and is_interruptible()
        if failed is None or signaled or needs_no_culprit(cause):
            return cause
        chain = self.work.graph.chains[task]
        label = self.name_step(chain, getattr(cause, "failed_call", failed))
        return operator_failure(self.name, label, cause, chain)

    def native_seconds(self) -> float | None:
        """Time of its pieces, all threads together; None where Python calls some, which may wait for anything."""
        if not isinstance(self.machine, NativeRun) or any(self.work.steps):
            return None
        return sum(self.machine.task_seconds())

    def raise_error(self) -> None:
        """Raise the first error, if any; errors of other workers are attached as notes and logged.

        The run lets go of it. Its traceback has the frames that have the run: as a cycle they would stay until the
        garbage collector comes by, with all that their variables refer to.
        """
        error = self.error
        if error is None:
            return
        for other in self.secondary:
            if not isinstance(other, RunCancelledError):
                error.add_note(f"secondary error: {other}")
                logger.warning("net %s: secondary error: %s", self.name, other)
        self.error = None
        self.secondary.clear()
        try:
            raise error
        finally:
            del error

    def check_complete(self) -> None:
        """Raise DagexecError unless all was done. A check on the scheduler itself, after a run without error."""
        if self.error is None and self.machine.remaining:
            raise DagexecError(f"net {self.name!r}: the run ended with {self.machine.remaining} tasks not done")


def task(name: str, function: Step, priority: int = 0, share: Share | None = None) -> Run:
    """A run that calls `function` on a worker, for work that belongs beside the nets', such as feeding inputs."""
    work = chain_work(SingleChain(), [(function,)])
    run = Run(name, work, lambda _chain, _step: name, lambda: None, priority)
    run.share = share
    run.width = 1
    return run


def finish(run: Run) -> None:
    """Tell the run's owner, with no lock held. The thread that tells must survive whatever the owner does.

    The run releases its owner: it would keep a finished request and its results alive in a reference cycle.
    """
    try:
        run.finished()
    except Exception:
        logger.exception("net %s: the callback at the end of a run raised", run.name)
    run.finished = nothing_to_do


def waiting_time(timeout: float | None) -> float:
    """`timeout` in the form of locks: -1 for None, the longest for an infinite one.

    Raises ValueError for a negative number, TypeError for no number.
    """
    if timeout is None:
        return -1
    if not isinstance(timeout, Real):
        raise TypeError(f"a timeout must be a number of seconds or None, found {timeout!r:.80}")
    if not timeout >= 0:
        raise ValueError(f"a timeout must be at least 0 seconds, found {timeout}")
    return min(timeout, threading.TIMEOUT_MAX)
