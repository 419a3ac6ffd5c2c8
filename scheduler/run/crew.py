"""Crew: starts and joins the threads of a pool's workers.

They are started at once, or each when its worker is first woken: most nets of a process are so small that none of their
runs has work for a worker.
"""

from __future__ import annotations

import itertools
import logging
import threading
from typing import Protocol

from dagexec.errors import ResourceError
from dagexec.platform.locks import Mutex
from dagexec.platform.threads import Thread, threads
from dagexec.scheduler.run.roster import Roster
from dagexec.scheduler.run.run import Run
from dagexec.scheduler.run.worker import FirstWakeUp, Worker

logger = logging.getLogger("dagexec")


class Employer(Protocol):
    """What a crew needs of a pool."""

    def serve(self, worker: Worker) -> None:
        """The life of a worker, on its thread."""

    def stop(self, run: Run, error: BaseException) -> None:
        """Have a run end with `error`."""


class Crew:
    """The threads of a pool's workers.

    Attributes:
        threads: of workers, and some that have ended.
    """

    def __init__(self, name: str, lock: Mutex, roster: Roster, pool: Employer, *, at_once: bool) -> None:
        """The pool's `lock` guards this and the `roster`. Threads are started `at_once`, or when needed."""
        self.threads: list[Thread] = []
        self._name = name
        self._lock = lock
        self._roster = roster
        self._pool = pool
        self._at_once = at_once
        self._source = threads()
        self._numbers = itertools.count()

    def add(self, count: int) -> None:
        """Add so many workers. Raises ResourceError; those that were started stay."""
        for started in range(count):
            if not self._at_once:
                self._add_sleeping()
                continue
            try:
                self.start_one()
            except RuntimeError as error:
                raise ResourceError(
                    f"{self._name}: {count} workers requested; the system could only start {started}: {error}"
                ) from None

    def start_one(self) -> None:
        """Start one more thread. Raises RuntimeError when the system starts no more."""
        worker = self._new_worker()
        worker.has_thread = True
        try:
            thread = self._source.start(lambda: self._pool.serve(worker), worker.name)
        except BaseException:
            with self._lock:
                self._roster.workers.remove(worker)
            raise
        with self._lock:
            self._keep(thread)

    def join(self) -> None:
        """Wait until all threads but the calling one have ended."""
        joined: list[Thread] = []
        while True:  # a worker that dies now starts another
            with self._lock:
                living = [thread for thread in self.threads if thread not in joined]
            if not living:
                return
            for thread in living:
                if thread is not threading.current_thread():
                    thread.join()
            joined += living

    def _new_worker(self) -> Worker:
        number = next(self._numbers)
        worker = Worker(f"{self._name}-{number}", number)
        with self._lock:
            self._roster.workers.append(worker)
        return worker

    def _keep(self, thread: Thread) -> None:
        self.threads = [*(old for old in self.threads if old.is_alive()), thread]

    def _add_sleeping(self) -> None:
        worker = self._new_worker()
        worker.wake_up = FirstWakeUp(lambda: self._start_sleeping(worker))
        with self._lock:
            self._roster.sleep(worker)

    def _start_sleeping(self, worker: Worker) -> None:
        """Start the thread of a woken worker. Where the system starts no more, the worker sleeps on."""
        with self._lock:
            if worker.has_thread or worker not in self._roster.workers:
                return
            try:
                self._keep(self._source.start(lambda: self._serve_first(worker), worker.name))
                return
            except RuntimeError as error:
                problem = ResourceError(f"{self._name}: no thread for a run: {error}")
                self._roster.sleep(worker)
                served = any(other.has_thread for other in self._roster.workers)
                waiting = [] if served else [run for *_, run in self._roster.runs if not run.active]
        logger.warning("%s", problem)
        for run in waiting:
            self._pool.stop(run, problem)

    def _serve_first(self, worker: Worker) -> None:
        """The life of a worker, if this is its thread: Ctrl-C may have come just after another was started."""
        with self._lock:
            if worker.has_thread:
                return
            worker.has_thread = True
        self._pool.serve(worker)
