"""DAGNet: chains on a pool of worker threads, each started when the chains it depends on are done."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import ClassVar, Self

from dagexec.core.errors import ClosedError, RunTimeoutError
from dagexec.core.graph import Graph
from dagexec.core.operator import Step
from dagexec.core.proto import NetDef
from dagexec.core.workspace import Workspace
from dagexec.scheduler import intra_op
from dagexec.scheduler.net import BaseNet
from dagexec.scheduler.pool import WorkerPool
from dagexec.scheduler.preparation import Preparation
from dagexec.scheduler.run import ChainSteps, Run, waiting_time
from dagexec.scheduler.trace import Trace


class DAGNet(BaseNet):
    """Runs chains side by side; with a pool of its own, or on one that it is given and leaves open."""

    net_type: ClassVar[str] = "dag"

    def __init__(
        self,
        definition: NetDef,
        workspace: Workspace,
        *,
        num_workers: int | None = None,
        pool: WorkerPool | None = None,
        graph: Graph | None = None,
        constants: frozenset[str] = frozenset(),
        intra_op_threads: int = 1,
    ) -> None:
        """`num_workers` defaults to the def's own, else to the cores divided by `intra_op_threads`."""
        super().__init__(definition, workspace, graph=graph, constants=constants, intra_op_threads=intra_op_threads)
        cores = intra_op.available_cores()
        self.num_workers = num_workers or definition.num_workers or max(1, cores // intra_op_threads)
        self._pool = pool
        self._owns_pool = pool is None

    @classmethod
    def from_definition(cls, workspace: Workspace, definition: NetDef, num_workers: int | None) -> Self:
        """What `Workspace.create_net` calls."""
        return cls(definition, workspace, num_workers=num_workers)

    def close(self) -> None:
        """Join the threads of the net's own pool. Idempotent."""
        super().close()
        if self._owns_pool and self._pool is not None:
            self._pool.close()

    def new_run(self, finished: Callable[[], object], trace: Trace | None = None) -> Run:
        """A run of the chains, highest priority first."""
        preparation = self.prepared()
        steps = preparation.chain_steps if trace is None else preparation.wrapped(trace.wrap)
        return self._make_run(preparation, steps, finished)

    def _make_run(self, preparation: Preparation, steps: ChainSteps, finished: Callable[[], object]) -> Run:
        def name_step(chain: int, step: Step) -> str:
            return self.graph.label(_culprit(preparation, steps[chain], chain, step))

        return Run(self.name, preparation.plan, steps, name_step, finished)

    def _execute(self, preparation: Preparation, timeout: float | None, trace: Trace | None) -> None:
        gate = threading.Lock()
        gate.acquire()
        run = self.new_run(gate.release, trace)
        pool = self._running_pool()
        pool.submit(run)
        try:
            over = gate.acquire(timeout=waiting_time(timeout))
        except BaseException as interruption:  # KeyboardInterrupt: leave no worker behind in our blobs
            pool.stop(run, interruption)
            gate.acquire()
            raise
        if not over:
            pool.stop(run, RunTimeoutError(f"net {self.name!r}: stopped after {timeout} seconds"))
            gate.acquire()
        run.check_complete()
        run.raise_error()

    def _running_pool(self) -> WorkerPool:
        if self._closed:
            raise ClosedError(f"net {self.name!r} is closed")
        if self._pool is None:
            self._pool = WorkerPool(self.num_workers, name=f"dagexec-{self.name}")
            weakref.finalize(self, self._pool.close)
        return self._pool


def _culprit(preparation: Preparation, steps: Sequence[Step], chain: int, step: Step) -> int:
    """The operator of a failed step: steps of a chain are its operators' in order, views left out unless wrapped."""
    operators = preparation.plan.chains[chain]
    exact = [index for index in operators if preparation.steps[index] is step]
    if exact:
        return exact[0]
    return operators[min(list(steps).index(step), len(operators) - 1)]
