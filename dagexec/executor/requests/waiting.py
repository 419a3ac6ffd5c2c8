"""How a task waits on its event loop (asyncio or trio) until its request is over; threads have their `ThreadWait`.

The one who ends a request calls `notify`, from any thread; more than once does no harm. A short run may be on the
loop's own thread instead, as waking a worker and being woken takes longer; each turn of the loop has time for some.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from dagexec.platform.lazy import LazyModule
from dagexec.platform.threads import threads

if not TYPE_CHECKING:
    asyncio = LazyModule("asyncio")
    anyio = LazyModule("anyio")
    lowlevel = LazyModule("anyio.lowlevel")
else:
    import asyncio

    import anyio
    from anyio import lowlevel

_Result = TypeVar("_Result")

MAX_TURN = 1e-3
"""Seconds that such runs may take of one turn of the loop, as everybody else on it waits meanwhile."""

MAX_QUEUED = MAX_TURN / 2
"""Seconds of them for runs that have waited in the queue, as those who get their results want their turns, too."""

MAX_ALONE = 2e-3
"""Seconds that the first of them may take, if it is the only request of its executor."""


class _Event(Protocol):
    """What is used of `asyncio.Event` and of `anyio.Event`."""

    def set(self) -> object:
        """Let those who wait go on."""

    async def wait(self) -> object:
        """Return once it is set."""


_Schedule = Callable[[Callable[[], object]], object]


class EventLoop:
    """One event loop: waits that other threads want set on it, and what requests take of its time.

    The loop is woken once for all that are there.
    """

    __slots__ = ("_ended", "_later", "_schedule", "_spent", "_waits", "_woken", "is_asyncio", "loop")

    def __init__(self, loop: Any, is_asyncio: bool) -> None:
        """`loop` is asyncio's event loop or trio's token."""
        self.loop = loop
        self.is_asyncio = is_asyncio
        self._schedule: _Schedule = loop.call_soon_threadsafe if is_asyncio else loop.run_sync_soon
        self._later: _Schedule = loop.call_soon if is_asyncio else loop.run_sync_soon
        self._waits: deque[TaskWait] = deque()
        self._woken = False
        self._spent = 0.0
        self._ended = False

    def is_closed(self) -> bool:
        """Nothing runs on it any more; of trio's that is known once somebody wanted something of it in vain."""
        return self._ended or (self.is_asyncio and self.loop.is_closed())

    def spend(self, seconds: float, most: float = MAX_TURN, *, alone: bool = False) -> bool:
        """Take so much of the loop's turn, on its thread. False, and nothing is taken, where that makes over `most`."""
        if self._spent + seconds > (MAX_ALONE if alone and not self._spent else most):
            return False
        if not self._spent:
            self._later(self._begin_turn)
        self._spent += seconds
        return True

    async def checkpoint(self) -> None:
        """Let the loop take another turn; the task may be cancelled meanwhile."""
        await (asyncio.sleep(0) if self.is_asyncio else lowlevel.checkpoint())

    def _begin_turn(self) -> None:
        self._spent = 0.0

    def call(self, function: Callable[[], object]) -> None:
        """Have `function` called in a later turn, from any thread. Raises RuntimeError when the loop is closed."""
        self._schedule(function)

    def put(self, wait: TaskWait) -> None:
        """Have `wait` set, from any thread."""
        self._waits.append(wait)
        if not self._woken:
            try:
                self._woken = True
                self._schedule(self._empty)
            except RuntimeError:
                self._ended = True
                self._waits.clear()  # with the loop everyone has gone who could wait
            except BaseException:
                self._woken = False  # whoever comes next wakes the loop
                raise

    def _empty(self) -> None:
        self._woken = False  # first: whoever puts one in from here on wakes the loop again
        while self._waits:
            self._waits.popleft().set()


_here = threading.local()


def event_loop() -> EventLoop:
    """The one that runs in this thread. Raises anyio.NoEventLoopError outside of an event loop."""
    asyncio_loop = asyncio._get_running_loop()
    loop = asyncio_loop or lowlevel.current_token().native_token
    known: EventLoop | None = getattr(_here, "event_loop", None)
    if known is None or known.loop is not loop:
        known = _here.event_loop = EventLoop(loop, asyncio_loop is not None)
    return known


class TaskWait:
    """The wait of a task, which leaves its event loop free.

    On asyncio it is made of asyncio alone: importing anyio on the loop would hold it up for tens of milliseconds.
    """

    __slots__ = ("_event", "_over", "loop")

    def __init__(self) -> None:
        """To be made by the task. Raises anyio.NoEventLoopError outside of an event loop."""
        self.loop = event_loop()
        self._event: _Event = asyncio.Event() if self.loop.is_asyncio else anyio.Event()
        self._over = False

    def notify(self) -> None:
        """Let the task go on."""
        self.loop.put(self)

    def set(self) -> None:
        """`notify`, on the thread of the loop."""
        self._over = True
        self._event.set()

    async def wait(self, timeout: float | None = None) -> bool:
        """Return when `notify` is called; False when it was not within `timeout` seconds.

        A coroutine that is thrown away while it waits is left with GeneratorExit, perhaps where no event loop runs any
        more: then the loop's own bookkeeping is left alone.
        """
        if timeout is None:
            await self._event.wait()
        elif self.loop.is_asyncio:
            await self._woken_within(timeout)
        else:
            with ExitStack() as stack:
                stack.enter_context(anyio.move_on_after(timeout))
                try:
                    await self._event.wait()
                except GeneratorExit:
                    stack.pop_all()
                    raise
        return self._over

    async def _woken_within(self, timeout: float) -> None:
        timer = self.loop.loop.call_later(timeout, self._event.set)
        try:
            await self._event.wait()
        finally:
            timer.cancel()
            if not self._over:  # whoever waits on, a task that was cancelled too, is woken by `notify` alone
                self._event = asyncio.Event()

    async def wait_out(self) -> None:
        """Return when `notify` is called, and not before, whoever cancels the task meanwhile.

        A scope's cancellation waits outside, as the scope here is a shield; asyncio's own `Task.cancel()` minds no
        shield, and is raised at the end.
        """
        if self.loop.is_asyncio and "anyio" not in sys.modules:  # so nobody has a scope
            await self._wait_out(asyncio.CancelledError)
            return
        with anyio.CancelScope(shield=True):
            await self._wait_out(anyio.get_cancelled_exc_class())

    async def _wait_out(self, cancelled: type[BaseException]) -> None:
        late: BaseException | None = None
        while not self._over:
            try:
                await self._event.wait()
            except cancelled as error:
                late = error
        if late is not None:
            raise late


async def to_the_end(call: Callable[[], Coroutine[Any, Any, _Result]]) -> _Result:
    """What `call()` gives or raises; a cancellation is raised when it has ended, asyncio's own `Task.cancel()` too."""
    results: list[_Result] = []
    late: BaseException | None = None
    with anyio.CancelScope(shield=True):
        if event_loop().is_asyncio:
            task = asyncio.create_task(call())
            while not task.done():
                try:
                    await asyncio.wait((task,))
                except asyncio.CancelledError as error:
                    late = error
            results.append(task.result())
        else:
            results.append(await call())
    if late is not None:
        raise late
    return results[0]


async def on_a_thread(name: str, call: Callable[[], _Result]) -> _Result:
    """What `call` returns or raises, on a thread of its own, as it may block; not interrupted by a cancellation."""
    wait = TaskWait()
    results: list[_Result] = []
    failures: list[BaseException] = []

    def body() -> None:
        try:
            results.append(call())
        except BaseException as error:
            failures.append(error)
        wait.notify()

    thread = threads().start(body, name=name)
    try:
        await wait.wait_out()
    finally:
        thread.join()
    if failures:
        raise failures[0]
    return results[0]
