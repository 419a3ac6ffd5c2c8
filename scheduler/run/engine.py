"""Runs in machine code: the tasks of a preparation as memory that `engine_code` reads, and the state of one run.

What is fixed is made once for a preparation; a run begins with a copy of the state. Threads that are late for a run
look at its own copy, so the next run may begin before they have left.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import field
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.core.native import NativeCall, Piece, call_rows, table_code
from dagexec.core.native_tables import JoinedCalls
from dagexec.platform.addresses import address_of
from dagexec.platform.locks import new_lock
from dagexec.platform.records import dataclass
from dagexec.scheduler.plan.task_graph import TaskGraph
from dagexec.scheduler.run.engine_code import Enter, engine_code
from dagexec.scheduler.run.engine_layout import Header, Kind, Mode, PoolWords, Record, Slot, Task
from dagexec.scheduler.run.waiting_code import clock_code, listening_code, pausing_code

Array = npt.NDArray[Any]

SPIN_SECONDS = 100e-6
"""How long a worker looks for work in a run before it leaves: about as long as it takes to wake it."""

_LISTENING = 3
"""Times `SPIN_SECONDS` for which a worker listens outside of runs. Between two tokens of a text its caller takes more
than 100 us: a token of 4 layers of 256 channels took 1.40 ms in place of 1.68 (AVX2, two threads, beside others)."""

WAKE_SECONDS = 60e-6
"""The least remaining work for which a worker is woken: it takes that long to start."""

_GRACE = 0.1
"""The part of `SPIN_SECONDS` for which a thread leaves the interpreter lock to a thread that must have it first."""

_LEARNED_RUNS = 3
"""Runs after which a task is expected to take as long as in the latest of them."""

LOOK_SECONDS = 20e-3
"""For how long a thread that has to look for signals stays in machine code, apart from the piece that it is in."""

_TRIAL_PAUSES = 4000
_CLOCK_TRIAL_SECONDS = 2e-3
_CLOCK_READINGS = 5


def can_run() -> bool:
    """True where runs in machine code are possible."""
    return engine_code() is not None and table_code() is not None


class PoolMemory:
    """The words that all runs of a pool share."""

    __slots__ = ("_fence", "_words", "address")

    def __init__(self) -> None:
        self._fence = new_lock()
        self._words = np.zeros(8, np.int64)
        self.address = address_of(self._words)

    def tell(self, idle: int, waiting: bool, *, full: bool = False) -> None:
        """How many workers sleep, whether a run without threads waits for one, and whether all places are taken."""
        self._words[PoolWords.IDLE] = idle
        self._words[PoolWords.WAITING] = waiting
        self._words[PoolWords.FULL] = full
        with self._fence:  # before the next look at what a run has left to take
            pass


class Bell:
    """Wakes a worker that has nothing to do: it listens for a while, without the interpreter lock, before it sleeps.

    Listening is polling a number: a sleeping thread takes 60 to 100 us to start.
    """

    __slots__ = ("_listen", "_number", "_pool")

    def __init__(self, pool: PoolMemory) -> None:
        self._pool = pool
        self._number = np.zeros(1, np.int64)
        self._listen = listening_code()

    def ring(self) -> None:
        """Call the worker."""
        self._number[0] = 1

    def listen(self) -> None:
        """Wait until it is rung, for a while, and while a worker may enter some run."""
        if self._listen is not None:
            spins = _spins()
            self._listen(address_of(self._number), self._pool.address, _LISTENING * spins, max(1, int(_GRACE * spins)))
        self._number[0] = 0


@dataclass(frozen=True, eq=False)
class NativeTasks:
    """Tasks as memory.

    Attributes:
        graph: the tasks.
        tables: the rows of calls of each task and piece.
        calls: for each of these rows, its call.
    """

    graph: TaskGraph
    tables: Sequence[Sequence[Array]]
    calls: Sequence[Sequence[Sequence[NativeCall]]]
    _template: Array
    _ticks: Array
    _kept: object
    _runs: list[int] = field(default_factory=lambda: [0])

    def rows(self, state: Array) -> Array:
        """The part of a state with the numbers of each task."""
        return _rows(state, len(self.tables))

    def without_calls(self) -> NativeTasks:
        """The same tasks, with pieces that do nothing."""
        kinds = [Kind(int(kind)) for kind in self.rows(self._template)[:, Task.KIND]]
        return native_tasks(self.graph, [[()] * len(row) or kind for row, kind in zip(self.tables, kinds, strict=True)])

    def learn(self, run: NativeRun) -> None:
        """A run has ended: expect the next ones to take as long."""
        if self._runs[0] < _LEARNED_RUNS:
            self._runs[0] += 1
            took = run.ticks()
            np.copyto(self._ticks, took, where=took > 0)
            _expect(self._template, self.graph, self._ticks)

    def new_run(self, *, traced: bool = False) -> NativeRun:
        """The state of a run that has not begun, for one thread until it belongs to a pool."""
        state = self._template.copy()
        run = NativeRun(self, state, _records(self.graph) if traced else None)
        start = address_of(state)
        tasks, tops = len(self.graph.pieces), int(state[Header.TOPS])
        words = -(-tasks // 64)
        place = len(Header) + tasks * Task.SIZE
        state[Header.TASKS] = start + 8 * len(Header)
        for header, length in (
            (Header.FRESH_TOP, tops), (Header.FRESH, words), (Header.OPEN_TOP, tops), (Header.OPEN, words),
        ):  # fmt: skip
            state[header] = start + 8 * place
            place += length
        run.belong_to(_NO_POOL, 1)
        return run


_NO_POOL = PoolMemory()


def _records(graph: TaskGraph) -> Array:
    return np.zeros(1 + Record.SIZE * sum(graph.pieces), np.int64)


class NativeRun:
    """The state of a run.

    Attributes:
        tasks: the tasks of the run.
    """

    __slots__ = ("_address", "_pool", "_records", "_state", "tasks")

    def __init__(self, tasks: NativeTasks, state: Array, records: Array | None) -> None:
        self.tasks = tasks
        self._state = state
        self._address = address_of(state)
        self._records = records
        if records is not None:
            records[0] = address_of(records) + 8
            state[Header.TRACE] = address_of(records)

    @property
    def code(self) -> Enter | None:
        """The code that its threads enter."""
        return engine_code()

    def belong_to(self, pool: PoolMemory, width: int) -> None:
        """Let up to `width` threads of a pool work on it."""
        self._pool = pool
        self._state[Header.POOL] = pool.address
        self._state[Header.WIDTH] = width

    @property
    def available(self) -> int:
        """Tasks that have a piece to take."""
        return 0 if self._state[Header.STOP] == 1 else int(self._state[Header.AVAILABLE])  # 2: it goes on later

    @property
    def remaining(self) -> int:
        """Tasks that have not ended."""
        return int(self._state[Header.REMAINING])

    def stop(self) -> None:
        """Let no thread take anything any more."""
        self._state[Header.STOP] = 1

    def interrupt(self, interrupted: bool) -> None:
        """Have all threads leave at the end of their pieces, or let them stay from now on."""
        if self._state[Header.STOP] != 1:
            self._state[Header.STOP] = 2 if interrupted else 0

    def active(self, threads: int) -> None:
        """Note how many threads are inside."""
        self._state[Header.ACTIVE] = threads

    def ticks(self) -> Array:
        """Ticks of the processor's clock for each task, all its pieces together; 0 for a task in Python."""
        return self.tasks.rows(self._state)[:, Task.TICKS]

    def task_seconds(self) -> list[float]:
        """The same in seconds."""
        return [int(ticks) * seconds_per_tick() for ticks in self.ticks()]

    def records(self) -> list[tuple[int, int, int, int, int]]:
        """Which thread executed which piece, and when; see `Record`. Of a traced run."""
        if self._records is None:
            return []
        written = (int(self._records[0]) - address_of(self._records) - 8) // (8 * Record.SIZE)
        rows = self._records[1 : 1 + written * Record.SIZE].reshape(-1, Record.SIZE)
        return [tuple(map(int, row)) for row in rows]  # type: ignore[misc]


class Participant:
    """A thread in a run in machine code."""

    __slots__ = ("_enter", "_looks", "_run", "_slot", "_slot_address", "_state_address")

    def __init__(
        self,
        run: NativeRun,
        worker: int = 0,
        *,
        stays: bool = False,
        looks: bool = False,
        helps: bool = False,
        from_last: bool = False,
    ) -> None:
        """`worker` is its number in a trace. With `stays` it has no other run to turn to.

        One that `looks` leaves from time to time, so that Python may handle signals. One that `helps` a thread that
        stays lets it have the interpreter lock first when the run is over. `from_last` as in `Machine.take`.
        """
        self._looks = looks
        code = run.code
        assert code is not None, "no machine code runs here"
        self._enter = code
        self._run = run
        self._slot = np.zeros(Slot.SIZE, np.int64)
        self._slot[Slot.WORKER] = worker
        self._slot[Slot.STAYS] = stays
        self._slot[Slot.FROM_LAST] = from_last
        self._slot[Slot.GRACE] = int(_GRACE * _spins()) if helps else 0
        self._slot_address = address_of(self._slot)
        self._state_address = run._address

    def enter(self, mode: Mode) -> int:
        """Execute pieces until Python has to act, as the returned `Outcome` says."""
        if self._looks:
            self._slot[Slot.UNTIL] = now_in_ticks() + LOOK_SECONDS / seconds_per_tick()
        return self._enter(self._state_address, self._slot_address, mode)

    def calls(self) -> list[int]:
        """The Python tasks that it is to call."""
        tasks: list[int] = self._slot[Slot.FIRST_CALL : Slot.FIRST_CALL + int(self._slot[Slot.CALLS])].tolist()
        return tasks

    @property
    def task(self) -> int:
        """The task that it is in."""
        return int(self._slot[Slot.TASK])

    def failed_call(self) -> NativeCall:
        """The call of its piece that failed."""
        calls = self._run.tasks.calls[self.task][int(self._slot[Slot.PIECE])]
        return calls[len(calls) - int(self._slot[Slot.ROWS_LEFT])]

    def continue_piece(self) -> bool:
        """Make the calls after the failed one, which has recovered; False when there is another `failed_call`."""
        rows = int(self._slot[Slot.ROWS_LEFT]) - 1
        table = self._run.tasks.tables[self.task][int(self._slot[Slot.PIECE])]
        rows = self._slot[Slot.ROWS_LEFT] = call_rows(table[len(table) - rows :])
        return not rows


def native_tasks(
    graph: TaskGraph, pieces: Sequence[Sequence[Piece | JoinedCalls] | Kind], seconds: Sequence[float] = ()
) -> NativeTasks:
    """The tasks of `graph` as memory; `pieces` are the native calls of each, or a kind of Python task.

    Until a run has shown how long a task takes, it is expected to take its `seconds`.
    """
    count = len(graph.pieces)
    words = -(-count // 64)
    tops = -(-words // 64)
    state = np.zeros(len(Header) + count * Task.SIZE + 2 * (tops + words), np.int64)
    children = np.array([child for row in graph.children for child in row] or [0], np.int64)
    calls = [[] if isinstance(row, Kind) else [_joined(piece) for piece in row] for row in pieces]
    tables = [[piece.table for piece in row] for row in calls]
    places = np.array([(address_of(table), len(table)) for row in tables for table in row] or [(0, 0)], np.int64)
    tasks = _rows(state, count)
    tasks[:, Task.LEFT] = graph.parent_counts
    tasks[:, Task.COUNT] = graph.pieces
    tasks[:, Task.KIND] = [row if isinstance(row, Kind) else Kind.NATIVE for row in pieces]
    tasks[:, Task.PIECES] = address_of(places) + 16 * _starts(tables)[:-1]
    ends = address_of(children) + 8 * _starts(graph.children)
    tasks[:, Task.CHILDREN], tasks[:, Task.CHILDREN_END] = ends[:-1], ends[1:]
    fresh = len(Header) + count * Task.SIZE
    ready = [number for number in range(count) if not graph.parent_counts[number]]
    for number in ready:
        state[fresh + tops + number // 64] |= _bit(number)
        state[fresh + number // 4096] |= _bit(number // 64)
    state[Header.REMAINING] = count
    state[Header.AVAILABLE] = len(ready)
    ticks = (np.array(seconds or [0.0] * count) / seconds_per_tick()).astype(np.int64)
    _expect(state, graph, ticks)
    state[Header.WORTH_WAKING] = WAKE_SECONDS / seconds_per_tick()
    state[Header.TOPS] = tops
    state[Header.SPINS] = _spins()
    state[Header.TABLE_CODE] = table_code() or 0
    return NativeTasks(graph, tables, calls, state, ticks, (pieces, children, places))


def _joined(piece: Piece | JoinedCalls) -> JoinedCalls:
    return piece if isinstance(piece, JoinedCalls) else JoinedCalls([piece])


def _starts(rows: Sequence[Sequence[object]]) -> Array:
    """Where each row begins if they lie one after another, and where the last one ends."""
    starts: Array = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(np.fromiter(map(len, rows), np.int64, len(rows)), out=starts[1:])
    return starts


def _rows(state: Array, count: int) -> Array:
    """The part of a state with the numbers of each of `count` tasks."""
    rows: Array = state[len(Header) : len(Header) + count * Task.SIZE].reshape(-1, Task.SIZE)
    return rows


def _expect(state: Array, graph: TaskGraph, ticks: Array) -> None:
    """Set the work expected for a worker that comes for a task: the task, and those of several pieces that follow it.

    It goes to sleep again in a task of one piece that takes longer than it looks for work.
    """
    patience = SPIN_SECONDS / seconds_per_tick()
    took: list[int] = ticks.tolist()
    shared = [0] * len(took)
    expected = [0] * len(took)
    children, parent_counts, pieces = graph.children, graph.parent_counts, graph.pieces
    for task in reversed(range(len(took))):
        after = 0
        if len(children[task]) == 1 and parent_counts[children[task][0]] == 1:
            after = shared[children[task][0]]
        expected[task] = took[task] + after
        if pieces[task] > 1:
            shared[task] = took[task] + after
        elif took[task] <= patience:
            shared[task] = after
    rows = _rows(state, len(took))
    rows[:, Task.EXPECTED] = expected
    state[Header.EXPECTED] = rows[rows[:, Task.LEFT] == 0, Task.EXPECTED].sum()


def _bit(number: int) -> np.int64:
    return np.uint64(1 << number % 64).astype(np.int64)


def now_in_ticks() -> int:
    """The time on the processor's clock."""
    clock = clock_code()
    assert clock is not None, "no machine code runs here"
    return clock()


@cache
def seconds_per_tick() -> float:
    """The period of the processor's clock."""
    began, first = _now()
    while time.perf_counter() - began < _CLOCK_TRIAL_SECONDS:
        pass
    ended, last = _now()
    return (ended - began) / (last - first)


def _now() -> tuple[float, float]:
    """Seconds and ticks at one time: of some readings, the one least disturbed by other threads."""
    readings = [(now_in_ticks(), time.perf_counter(), now_in_ticks()) for _ in range(_CLOCK_READINGS)]
    before, seconds, after = min(readings, key=lambda reading: reading[2] - reading[0])
    return seconds, (before + after) / 2


@cache
def _spins() -> int:
    """How often a thread looks for work in `SPIN_SECONDS`."""
    code = pausing_code()
    if code is None:
        return 1
    began = time.perf_counter()
    code(_TRIAL_PAUSES)
    took = time.perf_counter() - began
    return max(1, int(SPIN_SECONDS * _TRIAL_PAUSES / took))
