"""How a task waits on its event loop (asyncio or trio) until its request is over; threads have their `ThreadWait`.

The one who ends a request calls `notify`, from any thread; more than once does no harm.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
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


class _Event(Protocol):
    """What is used of `asyncio.Event` and of `anyio.Event`."""

    def set(self) -> object:
        """Let those who wait go on."""

    def is_set(self) -> bool:
        """True from then on."""

    async def wait(self) -> object:
        """Return once it is set."""


class _Mailbox:
    """Events that other threads want set on one event loop. The loop is woken once for all that are there."""

    __slots__ = ("_events", "_schedule", "_woken", "loop")

    def __init__(self, loop: Any) -> None:
        """`loop` is asyncio's event loop or trio's token."""
        self.loop = loop
        self._schedule: Callable[[Callable[[], object]], object] = (
            getattr(loop, "call_soon_threadsafe", None) or loop.run_sync_soon
        )
        self._events: deque[_Event] = deque()
        self._woken = False

    def put(self, event: _Event) -> None:
        """Have `event` set, from any thread."""
        self._events.append(event)
        if not self._woken:
            try:
                self._woken = True
                self._schedule(self._empty)
            except RuntimeError:
                self._events.clear()  # the loop is gone, and with it everyone who could wait
            except BaseException:
                self._woken = False  # whoever comes next wakes the loop
                raise

    def _empty(self) -> None:
        self._woken = False  # first: whoever puts one in from here on wakes the loop again
        while self._events:
            self._events.popleft().set()


_here = threading.local()


class TaskWait:
    """The wait of a task, which leaves its event loop free."""

    __slots__ = ("_done", "_mailbox")

    def __init__(self) -> None:
        """To be made by the task. Raises anyio.NoEventLoopError outside of an event loop."""
        asyncio_loop = asyncio._get_running_loop()
        loop = asyncio_loop or lowlevel.current_token().native_token
        mailbox: _Mailbox | None = getattr(_here, "mailbox", None)
        if mailbox is None or mailbox.loop is not loop:
            mailbox = _here.mailbox = _Mailbox(loop)
        self._mailbox = mailbox
        self._done: _Event = anyio.Event() if asyncio_loop is None else asyncio.Event()

    def notify(self) -> None:
        """Let the task go on."""
        self._mailbox.put(self._done)

    async def wait(self, timeout: float | None = None) -> bool:
        """Return when `notify` is called; False when it was not within `timeout` seconds.

        A coroutine that is thrown away while it waits is left with GeneratorExit, perhaps where no event loop runs any
        more: then the loop's own bookkeeping is left alone.
        """
        if timeout is None:
            await self._done.wait()
            return True
        with ExitStack() as stack:
            stack.enter_context(anyio.move_on_after(timeout))
            try:
                await self._done.wait()
            except GeneratorExit:
                stack.pop_all()
                raise
        return self._done.is_set()

    async def wait_out(self) -> None:
        """Return when `notify` is called, and not before, whoever cancels the task meanwhile.

        A scope's cancellation waits outside, as the scope here is a shield; asyncio's own `Task.cancel()` minds no
        shield, and is raised at the end.
        """
        cancelled = anyio.get_cancelled_exc_class()
        late: BaseException | None = None
        with anyio.CancelScope(shield=True):
            while not self._done.is_set():
                try:
                    await self._done.wait()
                except cancelled as error:
                    late = error
        if late is not None:
            raise late


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
