"""How a task waits on its event loop (asyncio or trio) until its request is over; threads have their `ThreadWait`.

Whoever ends a request calls `notify`, from any thread; calling it again does no harm. A short run may use the loop's
own thread instead, as waking a worker and being woken takes longer; each turn of the loop has time for some.
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
"""Seconds of such runs in one turn of the loop, as all other tasks wait meanwhile."""

MAX_QUEUED = MAX_TURN / 2
"""Seconds of them for runs that have waited in the queue, as tasks that get results need their turns, too."""

MAX_ALONE = 2e-3
"""Seconds of the first of them, if it is the only request of its executor."""


class _Event(Protocol):
    """The common part of `asyncio.Event` and `anyio.Event`."""

    def set(self) -> object:
        """Let those who wait go on."""

    async def wait(self) -> object:
        """Return once it is set."""


_Schedule = Callable[[Callable[[], object]], object]


class EventLoop:
    """An event loop: waits that other threads want to set on it, and the time that requests take of its turns.

    The loop is woken once for all pending waits.
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
        """It is closed; trio's loops show that only when a call fails."""
        return self._ended or (self.is_asyncio and self.loop.is_closed())

    def spend(self, seconds: float, limit: float = MAX_TURN, *, alone: bool = False) -> bool:
        """Take `seconds` of the loop's turn, on its thread. False, and none are taken, where that exceeds `limit`."""
        if self._spent + seconds > (MAX_ALONE if alone and not self._spent else limit):
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
                self._waits.clear()  # without a loop nobody waits
            except BaseException:
                self._woken = False  # whoever comes next wakes the loop
                raise

    def _empty(self) -> None:
        self._woken = False  # first, so that later calls of `put` wake the loop again
        while self._waits:
            self._waits.popleft().set()


_here = threading.local()


def event_loop() -> EventLoop:
    """The event loop of this thread. Raises anyio.NoEventLoopError outside of one."""
    asyncio_loop = asyncio._get_running_loop()
    loop = asyncio_loop or lowlevel.current_token().native_token
    event_loop_here: EventLoop | None = getattr(_here, "event_loop", None)
    if event_loop_here is None or event_loop_here.loop is not loop:
        event_loop_here = _here.event_loop = EventLoop(loop, asyncio_loop is not None)
    return event_loop_here


class TaskWait:
    """The wait of a task, which leaves its event loop free.

    On asyncio it needs asyncio alone: importing anyio on the loop would delay it by tens of milliseconds.
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

        A coroutine that is dropped while it waits ends with GeneratorExit, perhaps after its event loop: then it does
        not touch the loop's bookkeeping.
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
            if not self._over:  # a task that waits on, even if it was cancelled, is woken by `notify` alone
                self._event = asyncio.Event()

    async def wait_out(self) -> None:
        """Return when `notify` is called, and not before, even if the task is cancelled meanwhile.

        The scope here shields it from cancellation by other scopes; asyncio's own `Task.cancel()` ignores shields, and
        is raised at the end.
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
    """Return or raise what `call()` does; a cancellation, also by `Task.cancel()`, is raised after its end."""
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
    """Run `call`, which may block, on a thread of its own; not interrupted by a cancellation."""
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
