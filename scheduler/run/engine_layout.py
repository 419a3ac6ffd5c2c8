"""The memory of runs in machine code: the layout of a run's state, a task, a thread's slot, and a pool's words.

`engine` writes it, `engine_code` reads and changes it. All are 64-bit numbers.
"""

from __future__ import annotations

from enum import IntEnum


class Header(IntEnum):
    """The places of a run's own numbers in its state."""

    LOCK = 0  # 1 while a thread changes the state
    STOP = 1  # not 0: no thread takes a further piece
    REMAINING = 2  # tasks that have not ended
    AVAILABLE = 3  # tasks that have a piece to take
    ACTIVE = 4  # threads inside, by the pool's count
    WIDTH = 5  # threads that may be inside
    POOL = 6  # address of what all runs of a pool share, `PoolWords`
    TASKS = 7  # address of the first `Task`
    FRESH_TOP = 8  # addresses of the set of tasks that are ready and not begun: a bit for each word of the next
    FRESH = 9
    OPEN_TOP = 10  # likewise of those that were begun and have pieces left
    OPEN = 11
    TOPS = 12  # words in the tops of these sets
    SPINS = 13  # how often to look for work before leaving
    TABLE_CODE = 14  # address of the code that executes a table of native calls
    TRACE = 15  # address of the address of the next `Record`; 0 without a trace
    EXPECTED = 16  # ticks of tasks that have a piece to take
    WORTH_WAKING = 17  # ticks of work for which a worker is woken
    LOG = 18  # address of a log, where the code that keeps one runs


class PoolWords(IntEnum):
    """What a pool tells the threads in its runs."""

    IDLE = 0  # workers that sleep
    WAITING = 1  # runs that want a worker
    FULL = 2  # not 0: as many threads are in runs as the pool has workers


class Task(IntEnum):
    """The 64-bit numbers of a task."""

    LEFT = 0  # tasks that it waits for
    TAKEN = 1  # pieces that threads have taken
    DONE = 2  # pieces that have ended
    COUNT = 3  # pieces
    KIND = 4  # see `Kind`
    PIECES = 5  # address of the first piece: a table of native calls, and its rows
    CHILDREN = 6  # address of the numbers of tasks that wait for it
    CHILDREN_END = 7
    TICKS = 8  # of the processor's clock, that its pieces took
    EXPECTED = 9  # ticks that they, and those that a worker which comes for them finds after them, may take
    TAKEN_LAST = 10  # pieces that were taken from the last one on
    SIZE = 11


class Kind(IntEnum):
    """Who executes a task."""

    NATIVE = 0
    PYTHON = 1
    SHORT_PYTHON = 2  # a step that takes no longer than handing it out


class Slot(IntEnum):
    """The 64-bit numbers of a thread in a run."""

    TASK = 0
    PIECE = 1
    ROWS_LEFT = 2  # of the table of a piece whose call failed
    WORKER = 3  # a number for the trace
    STAYS = 4  # not 0: it has no other run to turn to
    UNTIL = 5  # on the processor's clock, when it leaves to let Python look for signals; 0 for never
    GRACE = 6  # looks for which it lets the caller of a run go first when the run is over; 0 for none
    FROM_LAST = 7  # not 0: it takes the last piece that is left, not the first
    CALLS = 8  # tasks that are steps of Python, which it has taken together
    FIRST_CALL = 9  # their numbers
    SIZE = 41


class Record(IntEnum):
    """The 64-bit numbers of a record: which worker executed a piece, and when on the processor's clock."""

    TASK = 0
    PIECE = 1
    WORKER = 2
    BEGAN = 3
    ENDED = 4
    SIZE = 5


class Logged(IntEnum):
    """What is written to a log, in the order in which the state of the run changes."""

    TAKE = 1  # a piece, of a new task or of the one that the thread goes on with
    GO_ON = 2  # the next piece that it takes is of the task that it is in
    NOTHING = 3  # there is nothing to take
    EXECUTE = 4  # a table
    END = 5  # of a piece


class Entry(IntEnum):
    """The 64-bit numbers of a line of a log."""

    EVENT = 0
    WORKER = 1
    TASK = 2
    PIECE = 3
    FROM_LAST = 4
    TABLE = 5  # address of the table that is executed
    LOCK = 6  # of the run, at that time
    SIZE = 7


class Mode(IntEnum):
    """How a thread enters."""

    PICK = 0  # to take something
    DONE = 1  # having ended the piece in its slot
    CONTINUE = 2  # to execute the piece in its slot
    CALLED = 3  # having called the steps of the tasks in its slot


class Outcome(IntEnum):
    """Why a thread leaves."""

    FINISHED = 0  # it has ended the last piece of the run
    OVER = 1  # another thread had
    PYTHON = 2  # the tasks in its slot are steps of Python
    FAILED = 3  # a call of the piece in its slot failed
    IDLE = 4  # there is nothing to take, or another run needs the thread more
    WAKE = 5  # there is more to take than the piece in its slot, and a worker that sleeps
    STOPPED = 6
    LOOK = 7  # its time to look for signals has come
