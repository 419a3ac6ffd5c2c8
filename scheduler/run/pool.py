"""WorkerPool: the threads of one executor, or of several. They take ready chains of the runs submitted to them.

One lock guards everything that changes; a worker takes it once a chain, to settle the chain it has run (count down its
children) and to choose the next: the ready child or waiting chain of the highest priority. A ready child that wins
continues in the same worker without passing through the heap. A worker with nothing to do waits to be woken, and
whoever leaves ready chains behind wakes one.

Of several runs the pool serves the one with the highest `priority`; among equal ones that of the user who had least of
the workers (`fair_share`), if there are several; and of one user's the oldest. Workers inside a run of lower priority
leave it at the end of their chain as long as the other has ready chains.

A worker that dies, by something raised in it outside any operator, is replaced by a new thread. The run it was in ends
with WorkerLostError, the others do not notice. In a child made by `os.fork` a pool has no threads and is closed.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
from contextlib import suppress
from heapq import heappop, heappush, heappushpop

from dagexec.errors import ClosedError, ResourceError, SettingError, WorkerLostError
from dagexec.platform import teams
from dagexec.platform.arithmetic import operator_arithmetic
from dagexec.platform.blocking import work as blocking
from dagexec.platform.deadline import Deadline
from dagexec.platform.forking import reset_after_fork
from dagexec.platform.processor import available_cores
from dagexec.platform.shutdown import stop_at_exit
from dagexec.platform.threads import Thread, ThreadsEndedError, ThreadWait, threads
from dagexec.scheduler.run.affinity import CoreWakeUp
from dagexec.scheduler.run.fair_share import Share
from dagexec.scheduler.run.helping import HelpingWait
from dagexec.scheduler.run.run import ChainSteps, Run, finish
from dagexec.scheduler.run.worker import PoolStatistics, Worker, acquire_contended

logger = logging.getLogger("dagexec")

MAX_WORKERS = 4096
"""A net's file may say how many it wants."""


class WorkerPool:
    """`num_workers` threads that execute runs; close it, or use it as a context manager.

    Attributes:
        workers: the identifiers of its threads.
    """

    def __init__(self, num_workers: int, name: str = "dagexec", *, most: int | None = None) -> None:
        """It may `grow` to `most` workers, by default to no more than it starts with.

        Raises SettingError for a number out of range, ResourceError when the system starts no more threads.
        """
        if not 1 <= num_workers <= MAX_WORKERS:
            raise SettingError(f"pool {name!r}: expected 1 to {MAX_WORKERS} workers, found {num_workers}")
        self.num_workers = num_workers
        self._most = most or num_workers
        self.name = name
        self._source = threads()
        self.lock = self._source.owned_lock()
        self.workers: set[int] = set()
        self._workers: list[Worker] = []
        self._idle: list[Worker] = []
        self._helping: list[HelpingWait] = []
        self._runs: list[tuple[int, float, int, Run]] = []  # heap of (-priority, start tag, order, run)
        self._virtual_time = 0.0  # the largest start tag of those that were taken
        self._orders = itertools.count()
        self._numbers = itertools.count()
        self._prioritized = False  # some run had a priority of its own
        self._replaced = 0
        self._closed = ""  # why no run is taken any more
        self._threads: list[Thread] = []
        self._process = os.getpid()
        try:
            self._start_workers(num_workers)
        except ResourceError:
            self.close()
            raise
        reset_after_fork(self, WorkerPool._forked)
        if self._source.concurrent:
            stop_at_exit(self, lambda pool: pool._end)

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def submit(self, run: Run) -> None:
        """Start a run; `run.finished` is called when it is over.

        Raises ClosedError after `close`, and in a child process of the one that made the pool.
        """
        try:
            with self.lock:
                if self._closed:
                    raise ClosedError(f"net {run.name!r}: {self._closed}")
                run.order = next(self._orders)
                run.pool = self
                if run.share is not None:
                    run.start_tag, run.advance = run.share.enter(self._virtual_time)
                if run.priority:
                    self._prioritized = True
                self._list(run)
                helper = self._idle.pop() if self._idle else None
            if helper is not None:
                helper.wake()
        except BaseException:  # KeyboardInterrupt
            self._wake_all()
            raise

    def grow(self, num_workers: int) -> None:
        """Have at least `num_workers`. One caller at a time. Raises ResourceError; those that were started stay."""
        self._start_workers(num_workers - self.num_workers)
        self.num_workers = max(num_workers, self.num_workers)

    def _start_workers(self, count: int) -> None:
        for started in range(count):
            try:
                self._start_worker()
            except RuntimeError as error:
                raise ResourceError(
                    f"{self.name}: {count} workers requested; the system could only start {started}: {error}"
                ) from None

    def run_within(self, run: Run, outer: Run) -> None:
        """Execute `run` for an operator of `outer`, on whose worker this is called; other workers join in.

        The worker runs ready chains until there are none, and then waits for those who have the others, who never wait
        for it: they take what becomes ready themselves. So one worker is enough. `run` is stopped with `outer`.
        """
        worker = self._here()
        end = ThreadWait()
        run.finished = end.notify
        run.priority, run.width = outer.priority, outer.width
        with self.lock:
            run.order = next(self._orders)
            run.pool = self
            outer.inner.append(run)
            if outer.stopped:
                assert outer.error is not None
                run.stop(outer.error)
        try:
            self._help(worker, run)
            end.wait()
        except BaseException as error:  # raised outside of any operator: nobody else may stay behind in the blobs
            with self.lock:
                run.stop(error)
                run.active -= worker.run is run
            if run.active:
                end.wait()
            raise
        finally:
            with self.lock:
                worker.run = blocking.run = outer
                outer.inner.remove(run)

    def _help(self, worker: Worker, run: Run) -> None:
        """Run chains of `run` until it has none that are ready; say that it is over if nobody is in it then."""
        while True:
            with self.lock:
                chain = heappop(run.ready) if run.ready else -1
                if chain < 0:
                    unattended = not run.active and not run.over
                    run.over = run.over or unattended
                    break
                run.active += 1
                worker.run = run
                helper = self._idle.pop() if self._idle and run.has_place() else None
                if run.ready and not run.listed:
                    self._list(run)
            if helper is not None:
                helper.wake()
            self._work(worker, run, chain)
        if unattended:
            finish(run)

    def stop(self, run: Run, error: BaseException) -> None:
        """Let `run` start no further chain and end with `error`. Chains under way finish first.

        A run that nobody works on is over at once: its `finished` is called from here. One that is over, but that
        devices still work for (`on_stop` is set), is told.
        """
        with self.lock:
            on_stop, left = run.on_stop, run.over
            if run.stopped or (left and on_stop is None):
                return
            over = run.over = run.active == 0
            run.stop(error)
            if over and not left and run.share is not None:
                run.share.give_back(run.advance)
        if on_stop is not None:
            on_stop()
        if over and not left:
            finish(run)

    def shut(self) -> None:
        """Take no more runs, and let the threads end once they have no more chains to run. Idempotent."""
        with self.lock:
            self._closed = self._closed or "the worker pool is closed"
        self._wake_all()

    def close(self) -> None:
        """`shut`, and join the threads. Idempotent."""
        self.shut()
        joined: list[Thread] = []
        while True:  # a worker that dies now starts another
            with self.lock:
                left = [thread for thread in self._threads if thread not in joined]
            if not left:
                return
            for thread in left:
                if thread is not threading.current_thread():
                    thread.join()
            joined += left

    def _end(self, deadline: Deadline) -> None:
        """At the end of the process, when its runs are over: `close`, until `deadline`."""
        self.shut()
        for thread in list(self._threads):
            thread.join(max(0.0, deadline.left()))

    def is_worker(self) -> bool:
        """True when the calling thread is one of this pool's."""
        return threading.get_ident() in self.workers

    def works_for(self, share: Share) -> bool:
        """True when the calling thread is one of this pool's, and in a run that `share` is charged for."""
        if not self.is_worker():
            return False
        worker = self._here()
        return any(run is not None and run.share is share for run in (worker.run, *worker.waiting))

    def new_wait(self, share: Share | None) -> ThreadWait:
        """A wait of the calling thread for a run of `share`; a worker of this pool works for it meanwhile."""
        if share is None or not self.is_worker():
            return ThreadWait()
        return HelpingWait(share, self._helping.append, self._help_once, self._helping.remove)

    def _here(self) -> Worker:
        """The worker whose thread is calling."""
        ident = threading.get_ident()
        return next(worker for worker in self._workers if worker.ident == ident)

    def _help_once(self, share: Share) -> bool:
        """For an operator on this worker that waits: work on a run of `share`. False when none has a ready chain."""
        worker = self._here()
        with self.lock:
            run = next((run for *_, run in self._runs if run.share is share and run.has_place()), None)
            if run is None:
                return False
            outer = worker.run
            assert outer is not None
            worker.waiting.append(outer)
            run.active += 1
            worker.run = run
            chain = heappop(run.ready)
        try:
            self._work(worker, run, chain)
        except BaseException as error:
            with suppress(RuntimeError):
                self.lock.release()  # in case it was raised with it
            self._lose(worker, error)
            raise
        finally:
            with self.lock:
                worker.waiting.pop()
                worker.run = blocking.run = outer
                worker.telling = None
        return True

    def statistics(self) -> PoolStatistics:
        """Counts at this moment."""
        with self.lock:
            waiting = [run for *_, run in self._runs if run.ready]
            return PoolStatistics(
                workers=self.num_workers,
                idle=len(self._idle),
                runs_waiting=len(waiting),
                chains_waiting=sum(len(run.ready) for run in waiting),
                busy=sum(worker.run is not None or worker.telling is not None for worker in self._workers),
                replaced=self._replaced,
            )

    def _start_worker(self) -> None:
        """Start one more thread. Raises RuntimeError when the system starts no more."""
        worker = Worker(f"{self.name}-{next(self._numbers)}")
        with self.lock:
            self._workers.append(worker)
        try:
            thread = self._source.start(lambda: self._serve(worker), worker.name)
        except BaseException:
            with self.lock:
                self._workers.remove(worker)
            raise
        with self.lock:
            self._threads = [*(old for old in self._threads if old.is_alive()), thread]

    def _serve(self, worker: Worker) -> None:
        """A worker's life: take a run that has ready chains, work on it until it has none, wait."""
        ident = worker.ident = threading.get_ident()
        self.workers.add(ident)
        try:
            with operator_arithmetic():
                self._serve_runs(worker)
        except ThreadsEndedError:
            raise
        except BaseException as error:
            self._replace(worker, error)
        finally:
            self.workers.discard(ident)

    def _serve_runs(self, worker: Worker) -> None:
        me = CoreWakeUp(placed=self._source.concurrent and 1 < self._most <= available_cores(), source=self._source)
        worker.wake_up = me
        lock = self.lock
        while True:
            lock.acquire()
            run = self._next_run()
            if run is None:
                if self._closed:
                    self._workers.remove(worker)
                    lock.release()
                    me.leave()
                    return
                self._idle.append(worker)
                lock.release()
                teams.leave_to_others()
                me.wait()
                lock.acquire()
                if worker in self._idle:  # nobody took it from there: a worker died
                    self._idle.remove(worker)
                lock.release()
                continue
            run.active += 1
            worker.run = run
            chain = heappop(run.ready)
            self._virtual_time = max(self._virtual_time, run.start_tag)
            advance, run.advance = run.advance, 0.0
            helper = self._idle.pop() if self._idle and run.has_place() else None
            lock.release()
            if helper is not None:
                helper.wake()
            if run.teams > 1:
                try:
                    teams.require(run.teams)
                    teams.enter(worker.wake)
                except ResourceError as error:
                    self._fail(run, error)
            if run.share is None:
                self._work(worker, run, chain)
            else:
                self._work_charged(worker, run, chain, run.share, advance)

    def _work_charged(self, worker: Worker, run: Run, chain: int, share: Share, advance: float) -> None:
        """`_work`, charged to `share`; a worker that dies in it charges nothing."""
        began = self._source.monotonic()
        self._work(worker, run, chain)
        with self.lock:
            share.charge(self._source.monotonic() - began, advance)

    def _wake_all(self) -> None:
        """Have every worker look for work: a thread that was ended may have taken one as idle and not woken it."""
        with self.lock:
            self._idle.clear()
            workers = list(self._workers)
        for worker in workers:
            worker.wake()

    def _next_run(self) -> Run | None:
        """The first run that a worker may enter; others leave the list. Call with the lock held."""
        runs = self._runs
        while runs:
            run = runs[0][3]
            if run.has_place():
                return run
            heappop(runs)
            run.listed = False
        return None

    def _list(self, run: Run) -> None:
        """Let workers find `run`, which has ready chains and is not listed. Call with the lock held."""
        run.listed = True
        heappush(self._runs, (-run.priority, run.start_tag, run.order, run))
        for wait in self._helping:
            if wait.share is run.share:
                wait.look()
        if self._prioritized:
            for worker in self._workers:
                if worker.run is not None and worker.run.priority < run.priority:
                    worker.run.interrupted = True

    def _work(self, worker: Worker, run: Run, chain: int) -> None:
        """Run `chain`, then whatever is ready in this run, until nothing is or the run is stopped.

        This loop is the scheduler's whole cost per operator, hence the local names and the bare lock calls.
        """
        acquire, release = self.lock.acquire, self.lock.release
        wait = not self._source.concurrent  # a controlled schedule decides who gets the lock
        idle = self._idle
        ready, counts, children = run.ready, run.counts, run.plan.children
        steps: ChainSteps = [()] * len(run.steps) if run.stopped else run.steps
        blocking.run = run
        step = None
        while True:
            try:
                for step in steps[chain]:
                    step()
            except ThreadsEndedError:
                raise
            except BaseException as error:  # a worker outlives whatever an operator raises
                self._fail(run, run.failure(chain, step, error))
            if not acquire(wait):
                acquire_contended(acquire)
            if run.interrupted and (run.stopped or self._gives_way(run, chain)):
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
            if ready and idle and run.active < run.width:
                helper = idle.pop()
                if not run.listed:
                    self._list(run)
                release()
                helper.wake()
            else:
                if ready and not run.listed:
                    self._list(run)
                release()
        run.active -= 1
        worker.run = blocking.run = None
        if run.active or ready:
            release()
            return
        worker.telling = run
        run.over = True
        release()
        finish(run)
        worker.telling = None

    def _fail(self, run: Run, failure: BaseException) -> None:
        """An operator of `run`, in which the caller is, has failed."""
        with self.lock:
            run.stop(failure)
        if run.on_stop is not None:
            run.on_stop()

    def _gives_way(self, run: Run, chain: int) -> bool:
        """Settle `chain` and True when a run of higher priority has a ready chain. Call with the lock held."""
        first = self._next_run()
        if first is None or first.priority <= run.priority:
            run.interrupted = False
            return False
        for child in run.plan.children[chain]:
            run.counts[child] -= 1
            if not run.counts[child]:
                heappush(run.ready, child)
        if run.ready and not run.listed:
            self._list(run)
        return True

    def _replace(self, worker: Worker, error: BaseException) -> None:
        """End the run that `worker` died in, and start another worker in its place."""
        logger.error("pool %s: worker %s died and was replaced", self.name, worker.name, exc_info=error)
        with suppress(RuntimeError):
            self.lock.release()  # in case it died with it
        with self.lock:
            self._workers.remove(worker)
            self._replaced += 1
        if worker.wake_up is not None:
            worker.wake_up.leave()
        self._wake_all()
        self._lose(worker, error)
        try:
            self._start_worker()
        except RuntimeError:
            logger.exception("pool %s: no thread can be started, so %s lives on", self.name, worker.name)
            with self.lock:
                self._workers.append(worker)
            worker.run = worker.telling = None
            self._serve(worker)

    def _lose(self, worker: Worker, error: BaseException) -> None:
        """End the run that `worker` died in of `error`, and tell its owner, perhaps once more. The lock is not held."""
        with self.lock:
            run, told = worker.run, worker.telling
            if run is not None:
                run.active -= 1
                lost = WorkerLostError(f"net {run.name!r}: worker {worker.name} died: {type(error).__name__}: {error}")
                lost.__cause__ = error
                run.stop(lost)
                if not run.active:
                    run.over = True
                    told = run
        if run is not None and run.on_stop is not None:
            run.on_stop()
        if told is not None:
            finish(told)

    def _forked(self) -> None:
        """In a child made by `os.fork`: the threads are the parent's, and so is whoever holds the lock."""
        self.lock = self._source.owned_lock()
        self._closed = (
            f"its worker pool was made in process {self._process} and this is process {os.getpid()}: "
            "threads do not survive a fork, so make a new one after it"
        )
        self._workers, self._idle, self._helping, self._runs, self._threads = [], [], [], [], []
        self.workers = set()
