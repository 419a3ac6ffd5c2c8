"""Mistakes in who waits for whom, in whose rows are whose, and in whose memory results are written to."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_JOINED = ("tests/executor/test_joined_requests.py",)
_BLOCKS = ("tests/executor/test_row_blocks.py",)

MUTANTS = (
    Mutant(
        "the youngest request decides when a group is due",
        "dagexec/executor/batching/queue.py",
        "oldest = next(iter(group.requests)).created",
        "oldest = next(reversed(group.requests)).created",
        _JOINED,
    ),
    Mutant(
        "rows of members that left before the run shift the rest",
        "dagexec/executor/requests/request.py",
        "        for member in self.joined:\n            if member.taken:",
        "        for member in self.members:\n            if member.taken:",
        _JOINED,
    ),
    Mutant(
        "rows of members that left during the run do not count",
        "dagexec/executor/requests/request.py",
        "            start += member.rows\n",
        "                start += member.rows\n",
        _JOINED,
    ),
    Mutant(
        "requests with other inputs for all rows are joined",
        "dagexec/executor/batching/joining.py",
        "key = (tuple(request.names), *types, *shared)",
        "key = (tuple(request.names), *types)",
        _JOINED,
    ),
    Mutant(
        "the group of the request before is taken although an input is for all rows",
        "dagexec/executor/batching/joining.py",
        "if request.group is not None and not shared:",
        "if request.group is not None:",
        _JOINED,
    ),
    Mutant(
        "each part that fills a block up counts as one row",
        "dagexec/executor/requests/blocked_run.py",
        "            missing -= self._rows\n",
        "            missing -= 1\n",
        _BLOCKS,
    ),
    Mutant(
        "a block is filled up once, however many rows it lacks",
        "dagexec/executor/requests/blocked_run.py",
        "        while missing > 0:",
        "        if missing > 0:",
        _BLOCKS,
    ),
    Mutant(
        "a pool that refuses to be closed is closed",
        "scheduler/workers/pool.py",
        "self._closed = self._closed or not taken",
        "self._closed = True",
        ("tests/executor/test_pool.py",),
    ),
    Mutant(
        "an event loop counts as woken until it has set all waits",
        "dagexec/executor/requests/waiting.py",
        "        self._woken = False  # first, so that later calls of `put` wake the loop again\n"
        "        while self._waits:\n            self._waits.popleft().set()\n",
        "        while self._waits:\n            self._waits.popleft().set()\n        self._woken = False\n",
        ("tests/executor/test_event_loop.py",),
    ),
    Mutant(
        "a strided array is given to a step to write to",
        "dagexec/binding/io_binding.py",
        "                elif not _is_plain(target):\n                    continue\n",
        "",
        ("tests/binding/test_io_binding.py",),
    ),
    Mutant(
        "an array counts as plain when it is only packed",
        "dagexec/binding/io_binding.py",
        "return bool(flags.c_contiguous and flags.aligned)",
        "return bool(flags.c_contiguous)",
        ("tests/binding/test_io_binding.py",),
    ),
)
