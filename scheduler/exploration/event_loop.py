"""ControlledEventLoop: asyncio under a controlled schedule.

The loop runs in a controlled thread. Where the usual one polls file descriptors, it comes to a decision point;
callbacks from other threads wake it there. Its clock is the thread's virtual time, so to sleep costs no real time.

    asyncio.Runner(loop_factory=ControlledEventLoop)
    anyio.run(main, backend_options={"loop_factory": ControlledEventLoop})

There are no files, sockets, subprocesses or signals. `run_in_executor` runs in a controlled thread;
`anyio.to_thread`, which has threads of its own, does not work.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from dagexec.devices.sim.clock import host_time, host_waited_until
from dagexec.errors import DagexecError
from dagexec.platform.threads import ThreadsEndedError, threads
from dagexec.scheduler.exploration.controlled import ControlledThreads

Returned = TypeVar("Returned")

_RESOLUTION = 1e-9


class _NumberedTask(asyncio.Task[Any]):
    """A task whose hash is its number in the loop, so that sets of tasks have the same order in every replay."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], *, number: int, **options: Any) -> None:
        self._number = number
        super().__init__(coroutine, **options)

    def __hash__(self) -> int:
        return self._number


class Wakes:
    """Replaces the selector by a decision point, which a callback from another thread or a deadline ends."""

    def __init__(self, world: ControlledThreads) -> None:
        self.woken = False
        self._time = 0.0
        self._world = world

    def wake(self) -> None:
        """Let the loop go on, no earlier than the calling thread's time."""
        self.woken = True
        self._time = max(self._time, host_time())
        self._world.come_to("wake", "the event loop")

    def wait(self, timeout: float | None) -> bool:
        """Wait until woken, at most `timeout` seconds of virtual time; False if it was not."""
        if self._world.ended:
            raise ThreadsEndedError("the schedule has ended")
        if timeout is not None and timeout <= 0:
            self._world.point("run callbacks")
        else:
            self._world.wait(lambda: self.woken, timeout, self, "wait", "callbacks")
        woken, self.woken = self.woken, False
        if woken:
            host_waited_until(self._time)
        return woken

    def select(self, timeout: float | None) -> Sequence[object]:
        """What asyncio asks a selector; there are no files."""
        self.wait(timeout)
        return ()


class ControlledEventLoop(asyncio.BaseEventLoop):
    """An asyncio event loop in the world of the schedule that is going on."""

    def __init__(self) -> None:
        """Raises DagexecError outside of a controlled schedule."""
        super().__init__()
        source = threads()
        if not isinstance(source, ControlledThreads):
            raise DagexecError("a controlled event loop is for scenarios: make it in a function given to explore")
        self._world = source
        self._selector = Wakes(source)
        self._clock_resolution = _RESOLUTION
        self._numbers = itertools.count(1)
        self.set_task_factory(self._new_task)

    def time(self) -> float:
        """Virtual time in seconds."""
        return self._world.monotonic()

    def run_in_executor(
        self, executor: object, func: Callable[..., Returned], *args: object
    ) -> asyncio.Future[Returned]:
        """Call `func` in a new controlled thread, whatever the executor."""
        future: asyncio.Future[Returned] = self.create_future()

        def deliver(result: Returned | None, error: BaseException | None) -> None:
            if future.cancelled():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)  # type: ignore[arg-type]

        def work() -> None:
            try:
                result = func(*args)
            except Exception as error:
                self.call_soon_threadsafe(deliver, None, error)
            else:
                self.call_soon_threadsafe(deliver, result, None)

        self._world.start(work, f"executor {next(self._numbers)}")
        return future

    def _new_task(self, loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        return _NumberedTask(coroutine, number=next(self._numbers), loop=loop, **options)

    def _process_events(self, event_list: Sequence[object]) -> None:
        """There are none."""

    def _write_to_self(self) -> None:
        """Another thread has given the loop something to do."""
        self._selector.wake()


def run(main: Callable[[], Coroutine[Any, Any, Returned]]) -> Returned:
    """Run `main()` in a controlled event loop of its own, to be called in a scenario."""
    with asyncio.Runner(loop_factory=ControlledEventLoop) as runner:
        return runner.run(main())
