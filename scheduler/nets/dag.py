"""DAGNet: chains on a pool of worker threads, each started when the chains it depends on are done."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, Self

from dagexec.core.graph import Graph
from dagexec.core.program import Program, header_of
from dagexec.core.proto import NetDef
from dagexec.core.workspace import Workspace
from dagexec.errors import ClosedError, RunCancelledError, RunTimeoutError
from dagexec.platform import processor
from dagexec.platform.blocking import calling_when_stopped
from dagexec.platform.lazy import LazyModule
from dagexec.platform.threads import ThreadWait
from dagexec.scheduler.nets.net import BaseNet
from dagexec.scheduler.nets.options import DEFAULT_RUN_OPTIONS, RunOptions
from dagexec.scheduler.observe.observers import Observer
from dagexec.scheduler.plan.plan import Plan, with_policy
from dagexec.scheduler.plan.preparation import Preparation
from dagexec.scheduler.run.overhead import WORTH_SHARING
from dagexec.scheduler.run.pool import WorkerPool
from dagexec.scheduler.run.run import Run, task, waiting_time

if not TYPE_CHECKING:
    catalog = LazyModule("dagexec.scheduling.catalog")
else:
    from dagexec.scheduling import catalog


class DAGNet(BaseNet):
    """Runs chains side by side, on a pool of its own, or on a given one, which it leaves open.

    On a device, a worker launches a chain and waits until it is done.
    """

    net_type: ClassVar[str] = "dag"

    def __init__(
        self,
        definition: NetDef | Program,
        workspace: Workspace,
        *,
        num_workers: int | None = None,
        pool: WorkerPool | None = None,
        graph: Graph | None = None,
        constants: frozenset[str] = frozenset(),
        keep: frozenset[str] | None = None,
        options: RunOptions = DEFAULT_RUN_OPTIONS,
    ) -> None:
        """`num_workers` defaults to the def's own, else to the cores."""
        super().__init__(definition, workspace, graph=graph, constants=constants, keep=keep, options=options)
        if pool is not None:
            self.num_workers = pool.num_workers
        else:
            self.num_workers = num_workers or header_of(definition).num_workers or processor.available_cores()
        self._width = min(self.num_workers, options.num_workers or self.num_workers)
        self.policy = None if options.policy is None else catalog.find_policy(options.policy)
        self._pool = pool
        self._owns_pool = pool is None

    @classmethod
    def from_definition(
        cls, workspace: Workspace, definition: NetDef | Program, num_workers: int | None, policy: object = None
    ) -> Self:
        options = DEFAULT_RUN_OPTIONS if policy is None else RunOptions(policy=catalog.find_policy(policy))
        return cls(definition, workspace, num_workers=num_workers, options=options)

    def close(self) -> None:
        """Join the threads of the net's own pool. Idempotent. Raises DagexecError in a kernel of the net."""
        self.check_kernel("close")
        self._closed = True
        self._wait_for_run()
        if self._owns_pool and self._pool is not None:
            self._pool.close()
        super().close()

    def shares_work(self, preparation: Preparation) -> bool:
        """True when there may be work for several workers in a run of these steps, or a policy decides there.

        The operators together may take too little time for that.
        """
        if self.policy is not None and len(preparation.plan.chains) > 1:
            return True
        is_brief = not preparation.may_wait and sum(preparation.seconds) < WORTH_SHARING
        return self._width > 1 and not is_brief and self._host_work(preparation, None).is_shared

    def _ordered(self, plan: Plan) -> Plan:
        """The plan in the policy's order, for as many workers as may be in a run."""
        return plan if self.policy is None else with_policy(plan, self.policy, self._width)

    def _in_run(self) -> bool:
        """True on the thread that called `run`, and on the workers."""
        return super()._in_run() or (self._pool is not None and self._pool.is_worker())

    def _call_end(self, run: Run, end: Callable[[], object]) -> None:
        """Have `end` called by a worker, or right here when the net was closed meanwhile and has none any more."""
        assert self._pool is not None
        try:
            self._pool.submit(task(f"end of {self.name}", end, run.priority, run.share))
        except ClosedError:
            end()

    def _execute(self, preparation: Preparation, timeout: float | None, trace: Observer | None) -> None:
        end = ThreadWait()
        pool = self._running_pool()
        run = self._run = self.new_run(end.notify, trace)
        try:
            stopped = RunCancelledError(f"net {self.name!r}: what runs it was stopped")
            pool.submit(run)
            with calling_when_stopped(lambda: pool.stop(run, stopped)):
                if not end.wait(waiting_time(timeout)):
                    pool.stop(run, RunTimeoutError(f"net {self.name!r}: stopped after {timeout} seconds"))
                    end.wait()
        except ClosedError:
            raise  # the pool has not taken the run
        except BaseException as interruption:  # KeyboardInterrupt: leave no worker behind in our blobs
            pool.stop(run, interruption)
            end.wait()
            raise
        finally:
            self._run = None
        run.check_complete()
        run.raise_error()

    def _stop(self, run: Run, error: BaseException) -> None:
        """As the pool stops it, under its lock."""
        if self._pool is not None:
            self._pool.stop(run, error)

    def _running_pool(self) -> WorkerPool:
        if self._closed:
            raise ClosedError(f"net {self.name!r} is closed")
        if self._pool is None:
            self._pool = WorkerPool(self.num_workers, name=f"dagexec-{self.name}")
            weakref.finalize(self, self._pool.shut).atexit = False
        return self._pool
