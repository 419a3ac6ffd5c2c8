"""Bugs of what streams share, and of whose stream it is."""

from __future__ import annotations

from dagexec.core.exclusive import LibraryState, StreamMutex, TurnLock
from dagexec.scheduler.run.launching import DeviceChain, DeviceStreams
from tests.planted import scenes
from tests.planted.bug import Bug, Edit
from tests.planted.scenes import CROSS

TURNS, TAILS = "turns released early", "stale stream tails"

BUGS = (
    Bug(
        "a turn that does not follow the last one",
        TURNS,
        "working memory goes to a stream while a kernel on another one still uses it",
        (Edit(StreamMutex.turn, "stream.follow(end)", "pass"),),
        scenes.turns_detected(shared_buffer=1),
        "detector",
        "shared buffer of sim:0",
        modeled_on="pytorch/pytorch#188655: memory that a collective on another stream still works on was freed, and "
        "the next allocation got it without waiting for that stream",
    ),
    Bug(
        "a turn's lock that is let go early",
        TURNS,
        "the lock of a turn is let go when the waits are in the stream, before the kernel is",
        (
            Edit(
                StreamMutex.turn,
                "            try:\n                yield stream\n            finally:\n",
                "            self._lock.__exit__(None, None, None)\n            try:\n                yield stream\n"
                "            finally:\n                self._lock.__enter__()\n",
            ),
        ),
        scenes.turns_detected(shared_buffer=1),
        "detector",
        "shared buffer of sim:0",
    ),
    Bug(
        "a turn that nobody has to take",
        TURNS,
        "the lock of what is used in turns is not taken",
        (
            Edit(TurnLock.__enter__, "        self._lock.acquire()\n        turns:", "        return\n        turns:"),
            Edit(TurnLock.__exit__, "        turns: WatchedTurns", "        return\n        turns: WatchedTurns"),
        ),
        scenes.turns_detected(shared_buffer=1),
        "detector",
        "shared buffer of sim:0",
    ),
    Bug(
        "a user that does not wait for the library",
        TURNS,
        "the stream of whoever uses a library state goes on before the state's stream is done",
        (Edit(LibraryState.use, "stream.wait(after)", "pass"),),
        scenes.turns_detected(engine="CUDNN", cudnn_state=1),
        "detector",
        "RAW on blob",
    ),
    Bug(
        "streams of one worker are taken for one",
        TAILS,
        "a chain does not wait for an event on another stream of its own worker, as if it were the tail of its own",
        (
            Edit(
                DeviceChain.begin,
                "if event.stream is not stream:",
                "if event.stream not in (self._choose.__self__.own.all or ()):",
            ),
        ),
        scenes.detected(CROSS, streams=2),
        "detector",
        "RAW on blob",
    ),
    Bug(
        "a stream that was given back",
        TAILS,
        "a thread remembers the stream that it had before the net gave all of them back",
        (
            Edit(
                DeviceStreams.give_back,
                "        self.own = _OwnStreams()\n",
                "",
            ),
        ),
        scenes.streams_given_back,
        "schedules",
        "a stream has two users",
        modeled_on="pytorch/pytorch#66936: the caching allocator kept references to streams of others, and recorded "
        "events on them after these were destroyed",
    ),
    Bug(
        "streams of an ended thread for two",
        TAILS,
        "between finding the streams of a thread that has ended and taking them, another thread takes them",
        (
            Edit(
                DeviceStreams._lease,
                "            if left is not None:\n                self._leased",
                "        with self._lock:\n            if left is not None:\n                self._leased",
            ),
        ),
        scenes.streams_of_the_dead,
        "schedules",
        "two threads have one stream",
        modeled_on="robertknight/rten#828: the lock of a pool of buffers was let go between finding a buffer and "
        "taking it out, so another one could be taken",
    ),
)
