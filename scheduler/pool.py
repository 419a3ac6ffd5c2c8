"""WorkerPool: the threads of an executor. They take ready chains of the runs submitted to them.

One lock guards everything that changes; a worker takes it once a chain, to settle the chain it has run (count down its
children) and to choose the next: the ready child or waiting chain of the highest priority. A ready child that wins
goes on in the same worker without passing through the heap. A worker with nothing to do waits to be woken, and
whoever leaves ready chains behind wakes one.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from dataclasses import dataclass
from heapq import heappop, heappush, heappushpop

from dagexec.core.arithmetic import operator_arithmetic
from dagexec.core.errors import ClosedError, ResourceError
from dagexec.scheduler.intra_op import available_cores
from dagexec.scheduler.placement import WakeUp
from dagexec.scheduler.run import Run

logger = logging.getLogger("dagexec")


@dataclass(frozen=True)
class PoolStatistics:
    """A moment of a pool: `workers` threads, of which `idle` wait; `runs_waiting` runs have chains nobody has taken."""

    workers: int
    idle: int
    runs_waiting: int
    chains_waiting: int


class WorkerPool:
    """`num_workers` threads that execute runs; close it, or use it as a context manager."""

    def __init__(self, num_workers: int, name: str = "dagexec") -> None:
        """Raises ValueError below 1 worker, ResourceError when the system does not start so many threads."""
        if num_workers < 1:
            raise ValueError(f"a pool needs at least 1 worker, not {num_workers}")
        self.num_workers = num_workers
        self.lock = threading.Lock()
        self._idle: list[WakeUp] = []
        self._runs: deque[Run] = deque()
        self._closed = False
        self._threads: list[threading.Thread] = []
        try:
            for number in range(num_workers):
                thread = threading.Thread(target=self._serve, name=f"{name}-{number}", daemon=True)
                thread.start()
                self._threads.append(thread)
        except RuntimeError as error:
            self.close()
            raise ResourceError(
                f"{name}: {num_workers} workers asked for; the system starts {len(self._threads)}: {error}"
            ) from None

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def submit(self, run: Run) -> None:
        """Start a run; `run.finished` is called when it is over. Raises ClosedError after `close`."""
        with self.lock:
            if self._closed:
                raise ClosedError(f"net {run.name!r}: the worker pool is closed")
            run.listed = True
            self._runs.append(run)
            helper = self._idle.pop() if self._idle else None
        if helper is not None:
            helper.wake()

    def stop(self, run: Run, error: BaseException) -> None:
        """Let `run` start no further chain and end with `error`. Chains under way finish first.

        A run that nobody works on is over at once: its `finished` is called from here.
        """
        with self.lock:
            if run.over or run.stopped:
                return
            run.over = run.active == 0
            run.stop(error)
        if run.over:
            _finish(run)

    def close(self) -> None:
        """Stop the threads once they have no more chains to run, and join them. Idempotent."""
        with self.lock:
            self._closed = True
            waiting = list(self._idle)
            self._idle.clear()
        for worker in waiting:
            worker.wake()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def is_worker(self) -> bool:
        """True when the calling thread is one of this pool's."""
        return threading.current_thread() in self._threads

    def statistics(self) -> PoolStatistics:
        """Counts at this moment."""
        with self.lock:
            waiting = [run for run in self._runs if run.ready]
            chains = sum(len(run.ready) for run in waiting)
            return PoolStatistics(self.num_workers, len(self._idle), len(waiting), chains)

    def _serve(self) -> None:
        """A worker's life: take a run that has ready chains, work on it until it has none, wait."""
        with operator_arithmetic():
            self._serve_runs()

    def _serve_runs(self) -> None:
        me = WakeUp(placed=1 < self.num_workers <= available_cores())
        lock = self.lock
        while True:
            lock.acquire()
            run = self._next_run()
            if run is None:
                if self._closed:
                    lock.release()
                    me.leave()
                    return
                self._idle.append(me)
                lock.release()
                me.wait()
                continue
            chain = heappop(run.ready)
            run.active += 1
            helper = self._idle.pop() if run.ready and self._idle else None
            lock.release()
            if helper is not None:
                helper.wake()
            self._work(run, chain)

    def _next_run(self) -> Run | None:
        """The oldest run with a ready chain; runs without one leave the list. Call with the lock held."""
        runs = self._runs
        while runs:
            run = runs[0]
            if run.ready:
                return run
            runs.popleft()
            run.listed = False
        return None

    def _work(self, run: Run, chain: int) -> None:
        """Run `chain`, then whatever is ready in this run, until nothing is.

        This loop is the scheduler's whole cost per operator, hence the local names and the bare lock calls.
        """
        acquire, release = self.lock.acquire, self.lock.release
        idle, runs = self._idle, self._runs
        ready, counts, children, steps = run.ready, run.counts, run.plan.children, run.steps
        step = None
        while True:
            try:
                for step in steps[chain]:
                    step()
            except BaseException as error:  # a worker outlives whatever an operator raises
                failure = run.failure(chain, step, error, threading.current_thread().name)
                with self.lock:
                    run.stop(failure)
            acquire()
            if run.stopped:
                break
            following = -1
            for child in children[chain]:
                count = counts[child] - 1
                counts[child] = count
                if not count:
                    if following < 0:
                        following = child
                    else:
                        heappush(ready, child)
            if following >= 0:
                chain = heappushpop(ready, following) if ready else following
            elif ready:
                chain = heappop(ready)
            else:
                break
            if ready and idle:
                helper = idle.pop()
                if not run.listed:
                    run.listed = True
                    runs.append(run)
                release()
                helper.wake()
            else:
                if ready and not run.listed:
                    run.listed = True
                    runs.append(run)
                release()
        run.active -= 1
        over = run.over = run.active == 0
        release()
        if over:
            _finish(run)


def _finish(run: Run) -> None:
    """Tell the run's owner, once and with no lock held. The thread that tells must survive whatever the owner does.

    The run lets go of its owner first: it would keep a finished request and its results alive in a reference cycle.
    """
    finished, run.finished = run.finished, _told
    try:
        finished()
    except Exception:
        logger.exception("net %s: the callback at the end of a run raised", run.name)


def _told() -> None:
    """The owner of a run has been told."""
