"""How a caller waits until its request is over: a thread at a gate, a task on its event loop (asyncio or trio).

The one who ends a request calls `notify`, from any thread; more than once does no harm.
"""

from __future__ import annotations

from contextlib import ExitStack
from math import inf

import anyio
import anyio.lowlevel

from dagexec.core.threads import new_gate


class ThreadWait:
    """The wait of a thread."""

    __slots__ = ("_gate",)

    def __init__(self) -> None:
        self._gate = new_gate()

    def notify(self) -> None:
        """Let the thread go on."""
        try:
            self._gate.release()
        except RuntimeError:
            return  # it was told before

    def wait(self, seconds: float = -1) -> bool:
        """Block until `notify` is called; False when it was not within `seconds` (-1: as long as it takes)."""
        return self._gate.acquire(timeout=seconds)


class TaskWait:
    """The wait of a task, which leaves its event loop free."""

    __slots__ = ("_done", "_schedule")

    def __init__(self) -> None:
        """To be made by the task. Raises anyio.NoEventLoopError outside of an event loop."""
        native = anyio.lowlevel.current_token().native_token
        self._schedule = getattr(native, "call_soon_threadsafe", None) or native.run_sync_soon  # type: ignore[attr-defined]
        self._done = anyio.Event()

    def notify(self) -> None:
        """Let the task go on."""
        try:
            self._schedule(self._done.set)
        except RuntimeError:
            return  # the loop is gone, and with it everyone who could wait

    async def wait(self, timeout: float | None = None) -> bool:
        """Return when `notify` is called; False when it was not within `timeout` seconds.

        A coroutine that is thrown away while it waits is left with GeneratorExit, perhaps where no event loop runs any
        more: then the loop's own bookkeeping is left alone.
        """
        if timeout is None or timeout == inf:
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
