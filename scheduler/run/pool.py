"""WorkerPool: the threads of one executor, or of several. They carry out what the machines of runs decide.

What is done next in a run its machine says (`machine`), which is in machine code where the run's operators are: then
workers are in there together, without the interpreter lock, until there is something for Python to do. One lock guards
everything else that changes. A worker with nothing to do waits to be woken, and whoever leaves something behind wakes
one.

Of several runs the pool serves the one with the highest `priority`; among equal ones one that no worker is in; then
that of the user who had least of the workers (`fair_share`), if there are several; and of one user's the oldest.
Workers inside a run of lower priority leave it at the end of their piece as long as the other has something to do; and
so do those that are not alone in a run, for a run that nobody is in.

A caller's thread may work for its own run (`run_here`). Workers help there as far as all together are no more than the
pool has workers.

A worker that dies, by something raised in it outside any operator, is replaced by a new thread. The run it was in ends
with WorkerLostError, the others do not notice. In a child made by `os.fork` a pool has no threads and is closed.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
from bisect import insort
from collections.abc import Sequence
from contextlib import suppress

from dagexec.core.native import recover
from dagexec.errors import ClosedError, ResourceError, SettingError, WorkerLostError
from dagexec.platform.arithmetic import operator_arithmetic
from dagexec.platform.blocking import work as blocking
from dagexec.platform.deadline import Deadline
from dagexec.platform.forking import reset_after_fork
from dagexec.platform.processor import available_cores
from dagexec.platform.shutdown import stop_at_exit
from dagexec.platform.threads import Thread, ThreadsEndedError, ThreadWait, is_interruptible, threads
from dagexec.scheduler.run.affinity import CoreWakeUp
from dagexec.scheduler.run.engine import Bell, NativeRun, Participant, PoolMemory
from dagexec.scheduler.run.engine_code import Mode, Outcome
from dagexec.scheduler.run.fair_share import Share
from dagexec.scheduler.run.helping import HelpingWait
from dagexec.scheduler.run.machine import Machine
from dagexec.scheduler.run.run import Run, finish
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
        self._runs: list[tuple[int, float, int, Run]] = []  # sorted, of (-priority, start tag, order, run)
        self._native: list[Run] = []  # with workers inside, in machine code; they may leave something behind unseen
        self._inside = 0  # workers and callers that are in runs
        self._memory = PoolMemory()
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
                self._take_in(run)
                if run.share is not None:
                    run.start_tag, run.advance = run.share.enter(self._virtual_time)
                self._list(run)
                helper = self._take_idle()
            if helper is not None:
                helper.wake()
        except BaseException:  # KeyboardInterrupt
            self._wake_all()
            raise

    def _take_in(self, run: Run) -> None:
        """A run has come. Call with the lock held."""
        run.order = next(self._orders)
        run.pool = self
        run.take_in(self._memory, self.num_workers)
        if run.priority:
            self._prioritized = True

    def run_here(self, run: Run) -> None:
        """Execute a run on the calling thread, no worker's, with the help of workers that are idle, until it is over.

        `run.finished` is called on the thread that ends it. Raises what interrupts the calling thread, when nobody
        works for the run any more, and ClosedError after `close`.
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
                self._take_in(run)
                run.start_tag, run.has_caller = self._virtual_time, True
                self._workers.append(caller)
                self._enter(caller, run)
            self._work(caller, run, stays=True)
            with self.lock:
                self._workers.remove(caller)
                helper = self._take_idle() if self._next_run() is not None else None
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
        """`error`, Ctrl-C perhaps, came to a caller's thread at any point of its `run`: nobody goes on with that."""
        with suppress(RuntimeError):
            self.lock.release()  # in case it was raised with it
        with self.lock:
            run.stop(error)
            if caller.run is run:
                self._exit(caller, run)
            self._counts_changed(run)  # perhaps it came before that was told
            ends = caller.telling is run or (run.has_ended() and not run.over)
            run.over = run.over or ends
            if caller in self._workers:
                self._workers.remove(caller)
        self._wake_all()
        if ends:
            finish(run)

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
            self._take_in(run)
            outer.inner.append(run)
            if outer.stopped:
                assert outer.error is not None
                run.stop(outer.error)
            self._enter(worker, run)
        try:
            self._work(worker, run)
            end.wait()
        except BaseException as error:  # raised outside of any operator: nobody else may stay behind in the blobs
            with self.lock:
                run.stop(error)
                if worker.run is run:
                    self._exit(worker, run)
            if run.active:
                end.wait()
            raise
        finally:
            with self.lock:
                worker.run = blocking.run = outer
                outer.inner.remove(run)

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
        return next(worker for worker in reversed(self._workers) if worker.ident == ident)

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
            self._enter(worker, run)
        try:
            self._work(worker, run)
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
            waiting = [run for *_, run in self._runs if run.machine.available]
            return PoolStatistics(
                workers=self.num_workers,
                idle=len(self._idle),
                runs_waiting=len(waiting),
                chains_waiting=sum(run.machine.available for run in waiting),
                busy=sum(
                    worker.is_of_pool and (worker.run is not None or worker.telling is not None)
                    for worker in self._workers
                ),
                replaced=self._replaced,
            )

    def _start_worker(self) -> None:
        """Start one more thread. Raises RuntimeError when the system starts no more."""
        number = next(self._numbers)
        worker = Worker(f"{self.name}-{number}", number)
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
        fits = self._source.concurrent and 1 < self._most <= available_cores()
        me = CoreWakeUp(placed=fits, source=self._source, bell=Bell(self._memory) if fits else None)
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
                self._tell()
                if self._next_run() is None:
                    lock.release()
                    me.wait()
                    lock.acquire()
                if worker in self._idle:  # nobody took it from there: there was something, or a worker died
                    self._idle.remove(worker)
                    self._tell()
                lock.release()
                continue
            self._enter(worker, run)
            self._virtual_time = max(self._virtual_time, run.start_tag)
            advance, run.advance = run.advance, 0.0
            helper = self._take_idle() if self._next_run() is not None else None
            lock.release()
            if helper is not None:
                helper.wake()
            if run.share is None:
                self._work(worker, run)
            else:
                self._work_charged(worker, run, run.share, advance)

    def _work_charged(self, worker: Worker, run: Run, share: Share, advance: float) -> None:
        """`_work`, charged to `share`; a worker that dies in it charges nothing."""
        began = self._source.monotonic()
        self._work(worker, run)
        with self.lock:
            share.charge(self._source.monotonic() - began, advance)

    def _wake_all(self) -> None:
        """Have every worker look for work: a thread that was ended may have taken one as idle and not woken it."""
        with self.lock:
            self._idle.clear()
            self._tell()
            workers = list(self._workers)
        for worker in workers:
            worker.wake()

    def _next_run(self) -> Run | None:
        """The first run that a worker may enter; others leave the list. Call with the lock held."""
        for run in self._native:
            if not run.listed and run.has_place():
                self._list(run)
        runs, found, place = self._runs, None, 0
        has_room = self._inside < self.num_workers
        while place < len(runs):
            run = runs[place][3]
            if not run.has_place():
                del runs[place]
                run.listed = False
                continue
            if found is not None and run.priority < found.priority:
                break
            if not run.active:
                return run
            if found is None and has_room:
                found = run
            place += 1
        return found

    def _list(self, run: Run) -> None:
        """Let workers find `run`, which has something to do and is not listed. Call with the lock held."""
        run.listed = True
        insort(self._runs, (-run.priority, run.start_tag, run.order, run))
        for wait in self._helping:
            if wait.share is run.share:
                wait.look()
        if self._prioritized:
            for worker in self._workers:
                if worker.run is not None and worker.run.priority < run.priority:
                    worker.run.interrupt(True)
        self._tell()

    def _enter(self, worker: Worker, run: Run) -> None:
        """A worker or caller goes into a run. Call with the lock held."""
        run.active += 1  # all counts before anything is called: Ctrl-C comes between calls
        worker.run = run
        worker.depth += 1
        self._inside += worker.depth == 1
        self._counts_changed(run)

    def _exit(self, worker: Worker, run: Run) -> None:
        """It leaves. Call with the lock held."""
        run.active -= 1
        worker.run = blocking.run = None
        worker.depth -= 1
        self._inside -= not worker.depth
        self._counts_changed(run)

    def _counts_changed(self, run: Run) -> None:
        """Somebody went into `run` or left it. Call with the lock held."""
        if isinstance(run.machine, NativeRun):
            run.machine.active(run.active)
            listed = run in self._native
            if run.active and not listed:
                self._native.append(run)
            elif listed and not run.active:
                self._native.remove(run)
        self._tell()

    def _take_idle(self) -> Worker | None:
        """A worker that sleeps, to be woken with the lock let go, if there is one. Call with the lock held."""
        if not self._idle:
            return None
        found = self._idle.pop()
        self._tell()
        return found

    def _tell(self) -> None:
        """Tell those who are in machine code what they may have to know. Call with the lock held."""
        surplus = self._inside - self.num_workers
        idle = len(self._idle) if surplus < 0 else 0
        waiting = bool(self._native) and (surplus > 0 or self._is_unattended())
        self._memory.tell(idle, waiting, full=surplus >= 0)

    def _is_unattended(self) -> bool:
        """True where some run waits for a worker that should go before those with several. Call with the lock held."""
        least = max((worker.run.priority for worker in self._workers if worker.run is not None), default=0)
        return any(not run.active and run.priority >= least and run.has_place() for *_, run in self._runs)

    def _helper_for(self, run: Run) -> Worker | None:
        """A worker that sleeps and may go into `run`, which others may find from now on. Call with the lock held."""
        if not run.has_place():
            return None
        if not run.listed:
            self._list(run)
        return self._take_idle() if self._inside < self.num_workers else None

    def _work(self, worker: Worker, run: Run, *, stays: bool = False) -> None:
        """Do what there is to do in a run that the worker has entered, until there is nothing or the run is stopped.

        One that `stays` has no other run to turn to.
        """
        blocking.run = run
        from_last = not stays and (run.has_caller or worker.number % 2 == 1)
        if isinstance(run.machine, NativeRun):
            self._work_natively(run, run.machine, worker, stays, from_last)
        else:
            self._work_in_python(run, run.machine, from_last)
        self._exit(worker, run)  # with the lock, which was kept
        if not run.listed and run.has_place():  # it gave way, or was the most that may be inside
            self._list(run)
        if run.over or not run.has_ended():
            self.lock.release()
            return
        worker.telling = run
        run.over = True
        self.lock.release()
        if isinstance(run.machine, NativeRun) and not run.stopped:
            run.machine.tasks.learn(run.machine)
        finish(run)
        worker.telling = None

    def _work_natively(self, run: Run, machine: NativeRun, worker: Worker, stays: bool, from_last: bool) -> None:
        """In machine code, but for what Python has to do. Returns with the lock held."""
        looks = stays and is_interruptible()
        helps = run.has_caller and not stays
        me = Participant(machine, worker.number, stays=stays, looks=looks, helps=helps, from_last=from_last)
        mode = Mode.PICK
        while True:
            outcome = me.enter(mode)
            if outcome == Outcome.PYTHON or outcome == Outcome.WAKE:
                if self._idle:
                    with self.lock:
                        helper = self._helper_for(run)
                    if helper is not None:
                        helper.wake(as_helper=True)
                mode = Mode.CONTINUE
                if outcome == Outcome.PYTHON:
                    self._call_tasks(run, me.calls())
                    mode = Mode.CALLED
            elif outcome == Outcome.FAILED:
                self._recover(run, me)
                mode = Mode.DONE
            elif outcome == Outcome.LOOK:
                mode = Mode.PICK
            else:
                self._acquire()
                if outcome != Outcome.STOPPED or run.stopped or self._gives_way(run):
                    return
                self.lock.release()
                mode = Mode.PICK

    def _recover(self, run: Run, me: Participant) -> None:
        """A native call has failed: have the rest of the piece done, or fail the run."""
        call = None
        try:
            while True:
                call = me.failed_call()
                recover(call)
                if me.continue_piece():
                    return
        except ThreadsEndedError:
            raise
        except BaseException as error:
            self._fail(run, run.failure(me.task, call, error))

    def _call_tasks(self, run: Run, tasks: Sequence[int]) -> None:
        """Call the steps of tasks, up to one that fails, which fails the run."""
        calls, task, step = run.work.calls, -1, None
        try:
            for task in tasks:
                for step in calls[task]:
                    if run.stopped:
                        return
                    step()
        except ThreadsEndedError:
            raise
        except BaseException as error:  # a worker outlives whatever an operator raises
            self._fail(run, run.failure(task, step, error))

    def _call_steps(self, run: Run, task: int, piece: int) -> None:
        """Call the steps of a piece, and fail the run where one fails."""
        step = None
        try:
            for step in run.work.steps[task][piece]:
                if run.stopped:
                    return
                step()
        except ThreadsEndedError:
            raise
        except BaseException as error:  # a worker outlives whatever an operator raises
            self._fail(run, run.failure(task, step, error))

    def _work_in_python(self, run: Run, machine: Machine, from_last: bool) -> None:
        """One piece after another. Returns with the lock held."""
        self._acquire()
        found = None if run.stopped else machine.take(from_last=from_last)
        while found is not None:
            helper = self._helper_for(run) if machine.available and self._idle else None
            if machine.available and not run.listed:
                self._list(run)
            self.lock.release()
            if helper is not None:
                helper.wake(as_helper=True)
            task, piece = found
            self._call_steps(run, task, piece)
            self._acquire()
            machine.end(task)
            if run.interrupted and (run.stopped or self._gives_way(run)):
                break
            found = machine.take(task, from_last=from_last)

    def _acquire(self) -> None:
        if not self.lock.acquire(not self._source.concurrent):  # a controlled schedule decides who gets the lock
            acquire_contended(self.lock.acquire)

    def _fail(self, run: Run, failure: BaseException) -> None:
        """An operator of `run`, in which the caller is, has failed."""
        with self.lock:
            run.stop(failure)
        if run.on_stop is not None:
            run.on_stop()

    def _gives_way(self, run: Run) -> bool:
        """True when a run of higher priority has something to do. Call with the lock held."""
        first = self._next_run()
        if first is not None and first.priority > run.priority:
            return True
        run.interrupt(False)
        return False

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
        with self.lock:
            self._inside -= worker.depth > 0
            worker.depth = 0
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
                self._exit(worker, run)
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
        """In a child made by `os.fork`: the threads are the parent's, and so is whoever holds the lock."""
        self.lock = self._source.owned_lock()
        self._closed = (
            f"its worker pool was made in process {self._process} and this is process {os.getpid()}: "
            "threads do not survive a fork, so make a new one after it"
        )
        self._workers, self._idle, self._helping, self._runs, self._threads = [], [], [], [], []
        self._native, self._inside = [], 0
        self.workers = set()
