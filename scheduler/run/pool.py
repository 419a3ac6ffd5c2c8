"""WorkerPool: the threads of one executor, or of several, which carry out what the machines of runs decide.

What is next in a run its machine says (`machine`), which run a worker enters the pool's `roster`; inside a run a worker
follows `executing`. One lock guards all of that. A worker without work waits to be woken, and a worker that leaves work
behind wakes one.

A caller's thread may work on its own run (`run_here`). Workers help there as long as all together are no more than the
pool has workers. The `crew` starts and joins threads.

A worker that dies, by an exception outside any operator, is replaced by a new thread. The run it was in ends with
WorkerLostError; others do not notice. In a child made by `os.fork` a pool has no threads and is closed.
"""

from __future__ import annotations

import _thread
import logging
import os
import threading
from collections.abc import Callable
from contextlib import suppress

from dagexec.errors import ClosedError, ResourceError, SettingError, WorkerLostError
from dagexec.platform.arithmetic import operator_arithmetic
from dagexec.platform.blocking import work as blocking
from dagexec.platform.deadline import Deadline
from dagexec.platform.forking import reset_after_fork
from dagexec.platform.locks import Mutex
from dagexec.platform.processor import available_cores
from dagexec.platform.shutdown import stop_at_exit
from dagexec.platform.threads import ThreadsEndedError, ThreadWait, threads
from dagexec.scheduler.observe.lanes import Lanes
from dagexec.scheduler.run.affinity import CoreWakeUp
from dagexec.scheduler.run.crew import Crew
from dagexec.scheduler.run.engine import Bell
from dagexec.scheduler.run.executing import Executing, NotedExecuting, WatchedExecuting
from dagexec.scheduler.run.fair_share import Share
from dagexec.scheduler.run.helping import HelpingWait
from dagexec.scheduler.run.roster import Roster
from dagexec.scheduler.run.run import Run, finish
from dagexec.scheduler.run.worker import PoolStatistics, Worker

logger = logging.getLogger("dagexec")

rosters: list[Callable[[int, Mutex], Roster]] = [lambda num_workers, _lock: Roster(num_workers)]
"""Make the roster that a pool's lock guards: the last one is used. `scheduler.conformance` adds one that records."""

MAX_WORKERS = 4096
"""A limit, as a net's file may ask for any number."""


class WorkerPool:
    """`num_workers` threads that execute runs; close it, or use it as a context manager.

    Attributes:
        workers: the identifiers of its threads.
    """

    _executing: Executing

    def __init__(
        self, num_workers: int, name: str = "dagexec", *, most: int | None = None, at_once: bool = True
    ) -> None:
        """It may `grow` to `most` workers, by default the initial number. They have threads `at_once`, or when there is
        work for them.

        Raises SettingError for a number out of range, ResourceError when the system starts no more threads. If threads
        come later, the run that would need the first one ends with that error.
        """
        if not 1 <= num_workers <= MAX_WORKERS:
            raise SettingError(f"pool {name!r}: expected 1 to {MAX_WORKERS} workers, found {num_workers}")
        self.num_workers = num_workers
        self._most = most or num_workers
        self._at_once = at_once
        self.name = name
        self._source = threads()
        self.lock = self._source.owned_lock()
        self.workers: set[int] = set()
        self._begin()
        self._replaced = 0
        self._closed = ""  # why no further run is accepted
        self._process = os.getpid()
        try:
            self._crew.add(num_workers)
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
                run.pool = self
                self._source.note(run)
                self._roster.submit(run)
                helper = self._roster.take_idle()
            if helper is not None:
                helper.wake()
        except BaseException:  # KeyboardInterrupt
            self._wake_all()
            raise

    def submit_from_finalizer(self, run: Run) -> None:
        """As `submit`, at any point of any thread. A closed pool does nothing.

        `threading` starts threads with a lock that the calling thread may hold. Then another thread submits.
        """

        def submit() -> None:
            with suppress(ClosedError):
                self.submit(run)

        if self._source.concurrent and any(
            worker.is_of_pool and not worker.has_thread for worker in list(self._roster.workers)
        ):
            _thread.start_new_thread(submit, ())
        else:
            submit()

    def run_here(self, run: Run) -> None:
        """Execute a run on the calling thread, which is no worker's, with the help of idle workers, until it is over.

        `run.finished` is called on the thread that ends it. Raises what interrupts the calling thread, once no worker
        is in the run any more, and ClosedError after `close`.
        """
        caller = Worker(threading.current_thread().name)
        caller.ident = threading.get_ident()
        finished, end, before = run.finished, ThreadWait(), blocking.run

        def ended() -> None:
            try:
                finished()
            finally:
                end.notify()

        run.finished = ended
        try:
            with self.lock:
                if self._closed:
                    raise ClosedError(f"net {run.name!r}: {self._closed}")
                if run.over:  # stopped before it began
                    return
                run.pool = self
                self._roster.admit(run)
                run.start_tag, run.has_caller = self._roster.virtual_time, True
                self._roster.workers.append(caller)
                self._roster.enter(caller, run)
            self._executing.work(caller, run, stays=True)
            with self.lock:
                self._roster.workers.remove(caller)
                helper = self._roster.helper()
            if helper is not None:
                helper.wake()
            end.wait()
        except ThreadsEndedError:
            raise
        except BaseException as error:
            self._leave_early(caller, run, error)
            end.wait()
            raise
        finally:
            blocking.run = before

    def _leave_early(self, caller: Worker, run: Run, error: BaseException) -> None:
        """End the caller's `run` on `error`, such as Ctrl-C, which may have come at any point of it."""
        with suppress(RuntimeError):
            self.lock.release()  # in case it was raised with it
        with self.lock:
            run.stop(error)
            if caller.run is run:
                self._roster.leave(caller, run)
            self._roster.counts_changed(run)  # the error may have come before the roster was told
            ends = caller.telling is run or (run.has_ended() and not run.over)
            run.over = run.over or ends
            if caller in self._roster.workers:
                self._roster.workers.remove(caller)
        self._wake_all()
        if ends:
            finish(run)

    def grow(self, num_workers: int) -> None:
        """Have at least `num_workers`. One caller at a time. Raises ResourceError; those that were started stay."""
        self._crew.add(num_workers - self.num_workers)
        self.num_workers = self._roster.num_workers = max(num_workers, self.num_workers)

    def run_within(self, run: Run, outer: Run) -> None:
        """Execute `run` for an operator of `outer`, on whose worker this is called; other workers join in.

        The worker runs ready chains until none is left, and then waits for the workers that run the rest. They never
        wait for it, as they take the chains that become ready themselves; so one worker is enough. `run` is stopped
        with `outer`.
        """
        worker = self._here()
        end = ThreadWait()
        run.finished = end.notify
        run.priority, run.width = outer.priority, outer.width
        with self.lock:
            run.pool = self
            self._roster.admit(run)
            outer.inner.append(run)
            if outer.stopped:
                assert outer.error is not None
                run.stop(outer.error)
            self._roster.enter(worker, run)
        try:
            self._executing.work(worker, run)
            end.wait()
        except BaseException as error:  # raised outside any operator: no worker may stay behind in the blobs
            with self.lock:
                run.stop(error)
                if worker.run is run:
                    self._roster.leave(worker, run)
            if run.active:
                end.wait()
            raise
        finally:
            with self.lock:
                worker.run = blocking.run = outer
                outer.inner.remove(run)

    def stop(self, run: Run, error: BaseException) -> None:
        """Let `run` start no further chain and end with `error`. Chains under way finish first.

        A run without workers inside is over at once: its `finished` is called from here. One that is over, but that
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
        self._crew.join()

    def _end(self, deadline: Deadline) -> None:
        """At the end of the process, once its runs are over: `close`, until `deadline`."""
        self.shut()
        for thread in list(self._crew.threads):
            thread.join(max(0.0, deadline.left()))

    @property
    def has_threads(self) -> bool:
        """True once a worker had work, where threads are not started at once."""
        return bool(self._crew.threads)

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
        return HelpingWait(share, self._roster.helping.append, self._help_once, self._roster.helping.remove)

    def _here(self) -> Worker:
        """The worker whose thread is calling."""
        ident = threading.get_ident()
        return next(worker for worker in reversed(self._roster.workers) if worker.ident == ident)

    def _help_once(self, share: Share) -> bool:
        """For an operator that waits on this worker: work on a run of `share`. False when none has a ready chain."""
        worker = self._here()
        with self.lock:
            run = self._roster.run_of(share)
            if run is None:
                return False
            outer = worker.run
            assert outer is not None
            worker.waiting.append(outer)
            self._roster.enter(worker, run)
        try:
            self._executing.work(worker, run)
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

    def watch(self, lanes: Lanes, share: Share | None, label: str) -> None:
        """Tell `lanes` what workers do, for `share` as `label`, until nobody looks at them any more."""
        with self.lock:
            lanes.have([worker.name for worker in self._roster.workers if worker.is_of_pool])
            watched = self._executing
            if not isinstance(watched, WatchedExecuting):
                if not self._source.concurrent:
                    return
                watched = self._executing = WatchedExecuting(self.lock, self._roster, lanes, self._stop_watching)
            if share is None:
                watched.label = label
            else:
                watched.labels[share] = label

    def _stop_watching(self) -> None:
        self._executing = Executing(self.lock, self._roster, concurrent=True)

    def statistics(self) -> PoolStatistics:
        """Counts at this moment."""
        with self.lock:
            waiting = [run for *_, run in self._roster.runs if run.machine.available]
            return PoolStatistics(
                workers=self.num_workers,
                idle=len(self._roster.idle),
                runs_waiting=len(waiting),
                chains_waiting=sum(run.machine.available for run in waiting),
                busy=sum(
                    worker.is_of_pool and (worker.run is not None or worker.telling is not None)
                    for worker in self._roster.workers
                ),
                replaced=self._replaced,
            )

    def serve(self, worker: Worker) -> None:
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
        fits = self._source.concurrent and 1 < self._most <= available_cores()
        me = CoreWakeUp(placed=fits, source=self._source, bell=Bell(self._roster.memory) if fits else None)
        worker.wake_up = me
        lock, roster = self.lock, self._roster
        while True:
            lock.acquire()
            run = roster.next_run()
            if run is None:
                if self._closed:
                    roster.workers.remove(worker)
                    lock.release()
                    me.leave()
                    return
                if roster.sleep(worker):
                    lock.release()
                    me.wait()
                    lock.acquire()
                roster.woke(worker)
                lock.release()
                continue
            advance = roster.begin(worker, run)
            helper = roster.helper()
            lock.release()
            if helper is not None:
                helper.wake()
            if run.share is None:
                self._executing.work(worker, run)
            else:
                self._work_charged(worker, run, run.share, advance)

    def _work_charged(self, worker: Worker, run: Run, share: Share, advance: float) -> None:
        """As `Executing.work`, charged to `share`; a worker that dies in it is charged nothing."""
        began = self._source.monotonic()
        self._executing.work(worker, run)
        with self.lock:
            share.charge(self._source.monotonic() - began, advance)

    def _wake_all(self) -> None:
        """Have every worker look for work: a thread that died may have picked an idle one and not woken it."""
        with self.lock:
            workers = self._roster.wake_all(closed=bool(self._closed))
        for worker in workers:
            worker.wake()

    def _replace(self, worker: Worker, error: BaseException) -> None:
        """End the run that `worker` died in, and start another worker in its place."""
        logger.error("pool %s: worker %s died and was replaced", self.name, worker.name, exc_info=error)
        with suppress(RuntimeError):
            self.lock.release()  # in case it died with it
        with self.lock:
            self._roster.workers.remove(worker)
            self._replaced += 1
        if worker.wake_up is not None:
            worker.wake_up.leave()
        self._wake_all()
        self._lose(worker, error)
        with self.lock:
            self._roster.died(worker)
        try:
            self._crew.start_one()
        except RuntimeError:
            logger.exception("pool %s: no thread can be started, so %s lives on", self.name, worker.name)
            with self.lock:
                self._roster.workers.append(worker)
            worker.run = worker.telling = None
            self.serve(worker)

    def _lose(self, worker: Worker, error: BaseException) -> None:
        """End the run that `worker` died in of `error`, and tell its owner, perhaps again. The lock is not held."""
        with self.lock:
            run, told = worker.run, worker.telling
            if run is not None:
                self._roster.leave(worker, run)
                lost = WorkerLostError(f"net {run.name!r}: worker {worker.name} died: {type(error).__name__}: {error}")
                lost.__cause__ = error
                run.stop(lost)
                if not run.active and not run.over:
                    run.over = True
                    told = run
        if run is not None and run.on_stop is not None:
            run.on_stop()
        if told is not None:
            finish(told)

    def _forked(self) -> None:
        """In a child made by `os.fork`: threads and lock holders are the parent's."""
        self.lock = self._source.owned_lock()
        self._closed = (
            f"its worker pool was made in process {self._process} and this is process {os.getpid()}: "
            "threads do not survive a fork, so make a new one after it"
        )
        self._begin()
        self.workers = set()

    def _begin(self) -> None:
        """Begin without workers."""
        self._roster = rosters[-1](self.num_workers, self.lock)
        executing = Executing if self._source.concurrent else NotedExecuting
        self._executing = executing(self.lock, self._roster, concurrent=self._source.concurrent)
        self._crew = Crew(self.name, self.lock, self._roster, self, at_once=self._at_once)
