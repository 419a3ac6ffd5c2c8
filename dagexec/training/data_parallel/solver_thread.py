"""SolverThread: a thread that does one job after another for whoever hands them over."""

from __future__ import annotations

from collections.abc import Callable

from dagexec.errors import ClosedError
from dagexec.platform.forking import LEFT_BEHIND, reset_after_fork
from dagexec.platform.threads import ThreadWait, threads

Job = Callable[[], object]


class SolverThread:
    """A thread with at most one job at a time."""

    def __init__(self, name: str) -> None:
        """Start it; it waits for a job."""
        self._lock = threads().lock()
        self._job: Job | None = None
        self._closed = False
        self._why = ""
        self._wanted = ThreadWait()
        self._done = ThreadWait()
        self._done.notify()
        self._thread = threads().start(self._run, name)
        reset_after_fork(self, SolverThread._forked)

    def begin(self, job: Job) -> None:
        """Have the thread do `job`, which raises nothing. Raises ClosedError after `close`."""
        with self._lock:
            if self._closed:
                raise ClosedError(f"thread {self._thread.name} is closed{self._why}")
            self._job = job
            self._done = ThreadWait()
            self._wanted.notify()

    def wait(self) -> None:
        """Block until the job is done, if there is one."""
        self._done.wait()

    def close(self) -> None:
        """End the thread, behind a job under way. Idempotent."""
        with self._lock:
            self._closed = True
            self._wanted.notify()
        self._thread.join()

    def _forked(self) -> None:
        """In a child made by `os.fork`: nobody does jobs."""
        self._lock = threads().lock()
        self._closed, self._why = True, f": {LEFT_BEHIND}"
        self._done = ThreadWait()
        self._done.notify()

    def _run(self) -> None:
        while True:
            self._wanted.wait()
            with self._lock:
                job, self._job = self._job, None
                done, closed = self._done, self._closed
                self._wanted = ThreadWait()
                if closed:
                    self._wanted.notify()
            if job is not None:
                job()
                done.notify()
            elif closed:
                return
