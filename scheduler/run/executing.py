"""What a worker or caller does in a run that it has entered: in machine code where the run's tasks are, else in Python.

It takes what the run's machine gives it until there is nothing, the run is stopped, or another run has to go first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

from dagexec.core.native import recover
from dagexec.core.operator import Step
from dagexec.errors import PolicyError
from dagexec.platform.blocking import work as blocking
from dagexec.platform.locks import Mutex
from dagexec.platform.threads import ThreadsEndedError, is_interruptible, threads
from dagexec.scheduler.observe.lanes import Lanes
from dagexec.scheduler.run.engine import NativeRun, Participant
from dagexec.scheduler.run.engine_layout import Mode, Outcome
from dagexec.scheduler.run.fair_share import Share
from dagexec.scheduler.run.machine import Machine
from dagexec.scheduler.run.roster import Roster
from dagexec.scheduler.run.run import Run, finish
from dagexec.scheduler.run.worker import Worker, acquire_contended


class Doing(NamedTuple):
    """A piece of a task that a worker begins or, with `done`, has done."""

    run: Run
    task: int
    steps: Sequence[Step]
    done: bool = False


class Executing:
    """The work of the threads of a pool in its runs."""

    def __init__(self, lock: Mutex, roster: Roster, *, concurrent: bool) -> None:
        """`lock` guards the `roster`; threads that are not `concurrent` continue as a controlled schedule decides."""
        self._lock = lock
        self._roster = roster
        self._concurrent = concurrent

    def work(self, worker: Worker, run: Run, *, stays: bool = False) -> None:
        """Work in a run that the worker has entered, until there is nothing to do or the run is stopped.

        A worker that `stays` has no other run to turn to. The worker that finds the run at its end tells its owner.
        """
        blocking.run = run
        from_last = not stays and (run.has_caller or worker.number % 2 == 1)
        if isinstance(run.machine, NativeRun):
            self._natively(run, run.machine, worker, stays, from_last)
        else:
            try:
                self._in_python(run, run.machine, from_last)
            except PolicyError as error:  # of the machine, which was asked with the lock
                self._lock.release()
                self._fail(run, error)
                self._acquire()
        self._roster.leave(worker, run)  # with the lock still held
        blocking.run = None
        if not run.listed and run.has_place():  # it gave way, or was the last that may be inside
            self._roster.list_run(run)
        if run.over or not run.has_ended():
            self._lock.release()
            return
        worker.telling = run
        run.over = True
        self._lock.release()
        if isinstance(run.machine, NativeRun) and not run.stopped:
            run.machine.tasks.learn(run.machine)
        finish(run)
        worker.telling = None

    def _natively(self, run: Run, machine: NativeRun, worker: Worker, stays: bool, from_last: bool) -> None:
        """Work in machine code, except where Python has to act. Returns with the lock held."""
        looks = stays and is_interruptible()
        helps = run.has_caller and not stays
        me = Participant(machine, worker.number, stays=stays, looks=looks, helps=helps, from_last=from_last)
        mode = Mode.PICK
        while True:
            outcome = me.enter(mode)
            if outcome == Outcome.PYTHON or outcome == Outcome.WAKE:
                if self._roster.idle:
                    with self._lock:
                        helper = self._roster.helper_for(run)
                    if helper is not None:
                        helper.wake(as_helper=True)
                mode = Mode.CONTINUE
                if outcome == Outcome.PYTHON:
                    for task in me.calls():
                        if not self._call(run, task, run.work.calls[task]):
                            break
                    mode = Mode.CALLED
            elif outcome == Outcome.FAILED:
                self._recover(run, me)
                mode = Mode.DONE
            elif outcome == Outcome.LOOK:
                mode = Mode.PICK
            else:
                self._acquire()
                if outcome != Outcome.STOPPED or run.stopped or self._roster.gives_way(run):
                    return
                self._lock.release()
                mode = Mode.PICK

    def _in_python(self, run: Run, machine: Machine, from_last: bool) -> None:
        """Execute one piece after another. Returns with the lock held."""
        roster, steps = self._roster, run.work.steps
        self._acquire()
        taken = None if run.stopped else machine.take(from_last=from_last)
        while taken is not None:
            helper = None
            if (roster.idle or not run.listed) and machine.available:
                helper = roster.helper_for(run)
            self._lock.release()
            if helper is not None:
                helper.wake(as_helper=True)
            task, piece = taken
            self._call(run, task, steps[task][piece])
            self._acquire()
            machine.end(task, piece)
            if run.interrupted and (run.stopped or roster.gives_way(run)):
                break
            taken = machine.take(task, from_last=from_last)

    def _call(self, run: Run, task: int, steps: Sequence[Step]) -> bool:
        """Call steps of a task, and fail the run where one fails. False when it is stopped."""
        step = None
        try:
            for step in steps:
                if run.stopped:
                    return False
                step()
        except ThreadsEndedError:
            raise
        except BaseException as error:  # a worker outlives whatever an operator raises
            self._fail(run, run.failure(task, step, error))
            return False
        return True

    def _recover(self, run: Run, me: Participant) -> None:
        """A native call has failed: make the remaining calls of the piece, or fail the run."""
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

    def _fail(self, run: Run, failure: BaseException) -> None:
        """An operator of `run`, which the calling thread is in, has failed."""
        with self._lock:
            run.stop(failure)
        if run.on_stop is not None:
            run.on_stop()

    def _acquire(self) -> None:
        if not self._lock.acquire(not self._concurrent):  # a controlled schedule decides who gets the lock
            acquire_contended(self._lock.acquire)


class NotedExecuting(Executing):
    """The same in a controlled schedule, whose story may be told."""

    def _call(self, run: Run, task: int, steps: Sequence[Step]) -> bool:
        threads().note(Doing(run, task, steps))
        done = super()._call(run, task, steps)
        if done:
            threads().note(Doing(run, task, steps, done=True))
        return done


class WatchedExecuting(Executing):
    """The same with `lanes` told what each thread works for.

    Attributes:
        labels: what users of the pool are called there, by their shares.
        label: what the only user is called.
    """

    def __init__(self, lock: Mutex, roster: Roster, lanes: Lanes, stop: Callable[[], object]) -> None:
        """`stop` is called where nobody looks any more."""
        super().__init__(lock, roster, concurrent=True)
        self._lanes = lanes
        self._stop = stop
        self.labels: WeakKeyDictionary[Share, str] = WeakKeyDictionary()
        self.label = ""

    def work(self, worker: Worker, run: Run, *, stays: bool = False) -> None:
        """As `Executing.work`; what a worker does within another run counts as that one's."""
        if worker.depth > 1:
            super().work(worker, run, stays=stays)
            return
        label = self.label if run.share is None else self.labels.get(run.share, "")
        self._lanes.began(worker.name, label or run.name, run.name)
        try:
            super().work(worker, run, stays=stays)
        finally:
            self._lanes.ended(worker.name)
        if not self._lanes.is_watched:
            self._stop()
