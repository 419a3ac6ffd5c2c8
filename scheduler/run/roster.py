"""The roster of a pool: which runs wait, which workers sleep or are in which run, and which run a worker enters next.

No threads, locks or clock: the pool asks and tells it under its lock.

The run with the highest `priority` is next; among equal ones, a run without workers inside; then that of the user who
had least of the workers (`fair_share`), if there are several; and of one user's runs the oldest. Workers in a run of
lower priority leave it at the end of their piece as long as the other run has work; and so do workers that are not
alone in a run, for a run without workers.
"""

from __future__ import annotations

from bisect import insort

from dagexec.scheduler.run.engine import NativeRun, PoolMemory
from dagexec.scheduler.run.fair_share import Share
from dagexec.scheduler.run.helping import HelpingWait
from dagexec.scheduler.run.run import Run
from dagexec.scheduler.run.worker import Worker


class Roster:
    """Where runs and workers are.

    Attributes:
        num_workers: how many may be inside runs, callers included, before callers exceed it.
        workers: all living workers, and callers in their runs.
        idle: workers that sleep.
        inside: workers and callers that are in runs.
        helping: waits of operators whose workers help others meanwhile.
        runs: runs that may have work, sorted, as (-priority, start tag, order, run).
        memory: what threads in machine code have to know.
        virtual_time: the largest start tag of runs that a worker has entered.
    """

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self.workers: list[Worker] = []
        self.idle: list[Worker] = []
        self.inside = 0
        self.helping: list[HelpingWait] = []
        self.runs: list[tuple[int, float, int, Run]] = []
        self.memory = PoolMemory()
        self.virtual_time = 0.0
        self._native: list[Run] = []  # with workers inside, in machine code; they may leave work behind unnoticed
        self._prioritized = False  # some run had a priority of its own
        self._admitted = 0

    @property
    def is_empty(self) -> bool:
        """True when no thread is in a run and no run waits."""
        return not (self.inside or self._native or self.runs)

    def admit(self, run: Run) -> None:
        """Add a new run."""
        run.order = self._admitted
        self._admitted += 1
        if isinstance(run.machine, NativeRun):
            run.machine.belong_to(self.memory, min(run.width, self.num_workers))
        if run.priority:
            self._prioritized = True

    def submit(self, run: Run) -> None:
        """Add a new run, for any free worker."""
        self.admit(run)
        if run.share is not None:
            run.start_tag, run.advance = run.share.enter(self.virtual_time)
        self.list_run(run)

    def next_run(self) -> Run | None:
        """The first run that a worker may enter; runs without work leave the list."""
        for run in self._native:
            if not run.listed and run.has_place():
                self.list_run(run)
        runs, best, place = self.runs, None, 0
        has_room = self.inside < self.num_workers
        while place < len(runs):
            run = runs[place][3]
            if not run.has_place():
                del runs[place]
                run.listed = False
                continue
            if best is not None and run.priority < best.priority:
                break
            if not run.active:
                return run
            if best is None and has_room:
                best = run
            place += 1
        return best

    def run_of(self, share: Share) -> Run | None:
        """A run with work that `share` is charged for."""
        return next((run for *_, run in self.runs if run.share is share and run.has_place()), None)

    def list_run(self, run: Run) -> None:
        """Let workers find `run`, which has work and is not listed."""
        run.listed = True
        insort(self.runs, (-run.priority, run.start_tag, run.order, run))
        for wait in self.helping:
            if wait.share is run.share:
                wait.look()
        if self._prioritized:
            for worker in self.workers:
                if worker.run is not None and worker.run.priority < run.priority:
                    worker.run.interrupt(True)
        self.tell()

    def enter(self, worker: Worker, run: Run) -> None:
        """A worker or caller enters a run."""
        run.active += 1  # all counts before anything is called: Ctrl-C comes between calls
        worker.run = run
        worker.depth += 1
        self.inside += worker.depth == 1
        self.counts_changed(run)

    def begin(self, worker: Worker, run: Run) -> float:
        """As `enter`, of the next run. Returns the seconds that its share was charged in advance."""
        self.enter(worker, run)
        self.virtual_time = max(self.virtual_time, run.start_tag)
        advance, run.advance = run.advance, 0.0
        return advance

    def leave(self, worker: Worker, run: Run) -> None:
        """A worker or caller leaves a run."""
        run.active -= 1
        worker.run = None
        worker.depth -= 1
        self.inside -= not worker.depth
        self.counts_changed(run)

    def counts_changed(self, run: Run) -> None:
        """A thread has entered `run` or left it."""
        if isinstance(run.machine, NativeRun):
            run.machine.active(run.active)
            listed = run in self._native
            if run.active and not listed:
                self._native.append(run)
            elif listed and not run.active:
                self._native.remove(run)
        self.tell()

    def died(self, worker: Worker) -> None:
        """A worker has died."""
        self.inside -= worker.depth > 0
        worker.depth = 0

    def sleep(self, worker: Worker) -> bool:
        """A worker has no work; False if there is some now, and it is to look again.

        A worker that has no thread yet is woken after all others.
        """
        self.idle.insert(len(self.idle) if worker.has_thread else 0, worker)
        self.tell()
        return self.next_run() is None

    def woke(self, worker: Worker) -> None:
        """A worker looks for work."""
        if worker in self.idle:  # no waker took it from there: there was work, or a worker died
            self.idle.remove(worker)
            self.tell()

    def wake_all(self, *, closed: bool) -> list[Worker]:
        """The workers to wake, as the thread that was to wake one may be gone: all that have threads.

        Of the others it is one, if there is a run for it; in a `closed` pool the rest is dropped.
        """
        self.idle = [worker for worker in self.idle if not worker.has_thread]
        if self.idle:
            self.helper()
        awake = [worker for worker in self.workers if worker not in self.idle]
        if closed:
            self.workers = awake[:]
            self.idle = []
        self.tell()
        return awake

    def take_idle(self) -> Worker | None:
        """A sleeping worker, if there is one, to be woken once the lock is released."""
        if not self.idle:
            return None
        worker = self.idle.pop()
        self.tell()
        return worker

    def helper(self) -> Worker | None:
        """A sleeping worker, if there is a run for it."""
        return self.take_idle() if self.next_run() is not None else None

    def helper_for(self, run: Run) -> Worker | None:
        """A sleeping worker that may enter `run`, which others may find from now on."""
        if not run.has_place():
            return None
        if not run.listed:
            self.list_run(run)
        return self.take_idle() if self.inside < self.num_workers else None

    def gives_way(self, run: Run) -> bool:
        """True when a run of higher priority has work."""
        first = self.next_run()
        if first is not None and first.priority > run.priority:
            return True
        run.interrupt(False)
        return False

    def tell(self) -> None:
        """Tell the threads in machine code what they may have to know."""
        surplus = self.inside - self.num_workers
        idle = len(self.idle) if surplus < 0 else 0
        waiting = bool(self._native) and (surplus > 0 or self._is_unattended())
        self.memory.tell(idle, waiting, full=surplus >= 0)

    def _is_unattended(self) -> bool:
        """True where some run waits for a worker that should go before those with several."""
        least = 0
        for worker in self.workers:
            if worker.run is not None and worker.run.priority > least:
                least = worker.run.priority
        for *_, run in self.runs:  # noqa: SIM110  # Ctrl-C in a generator that is given up is swallowed
            if not run.active and run.priority >= least and run.has_place():
                return True
        return False
