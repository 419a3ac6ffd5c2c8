"""Cancels a call at a chosen step of the event loop it runs on: at every await of its own and of the tasks it starts.

A step of a task ends where it awaits something that is not there yet. The call may be cancelled then, in the next turn
of the loop, or when what it awaits has come and it does not know yet: there results get lost.
"""

from __future__ import annotations

import asyncio
import functools
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator
from dataclasses import dataclass
from typing import Any, Literal

import trio

Moment = Literal["where it waits", "a turn later", "when it came"]
MOMENTS: tuple[Moment, ...] = ("where it waits", "a turn later", "when it came")


@dataclass
class Outcome:
    """How a call ended.

    Attributes:
        result: what it returned; None when it was cancelled.
        cancelled: it ended with the library's cancellation.
        reached: it came to the step.
    """

    result: object = None
    cancelled: bool = False
    reached: bool = False


class _Steps:
    """Counts steps, and cancels at one."""

    def __init__(self, at: int, outcome: Outcome) -> None:
        self._left = at
        self._outcome = outcome

    def is_it(self) -> bool:
        """One more step: whether it is the one."""
        self._left -= 1
        if self._left:
            return False
        self._outcome.reached = True
        return True


async def cancelled_at(call: Callable[[], Awaitable[object]], at: int, moment: Moment) -> Outcome:
    """Await `call()`, which is cancelled at its step of this number, counted from 1."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return await _on_trio(call, at, moment)
    return await _on_asyncio(call, at, moment)


async def _on_asyncio(call: Callable[[], Awaitable[object]], at: int, moment: Moment) -> Outcome:
    loop, outcome = asyncio.get_running_loop(), Outcome()
    steps = _Steps(at, outcome)

    def cancel(*_done: object) -> None:
        task.cancel()

    def waits(awaited: Any) -> None:
        if not steps.is_it():
            return
        if moment == "where it waits":
            cancel()
        elif moment == "when it came" and asyncio.isfuture(awaited):
            awaited.add_done_callback(cancel)
        else:
            loop.call_soon(cancel)

    def new_task(_loop: object, coroutine: Coroutine[Any, Any, object], **options: Any) -> asyncio.Task[object]:
        return asyncio.Task(_awaited(_watched(coroutine, waits)), loop=loop, **options)

    async def called() -> object:
        return await call()

    before = loop.get_task_factory()
    loop.set_task_factory(new_task)  # type: ignore[arg-type]
    task = loop.create_task(called())
    try:
        outcome.result = await task
    except asyncio.CancelledError:
        outcome.cancelled = True
    finally:
        loop.set_task_factory(before)
    return outcome


async def _awaited(steps: Awaitable[object]) -> object:
    return await steps


@types.coroutine
def _watched(coroutine: Coroutine[Any, Any, object], waits: Callable[[object], object]) -> Generator[Any, Any, object]:
    """The coroutine; `waits` is told what it waits for."""
    step = functools.partial(coroutine.send, None)
    while True:
        try:
            awaited = step()
        except StopIteration as end:
            return end.value
        waits(awaited)
        try:
            step = functools.partial(coroutine.send, (yield awaited))
        except BaseException as error:
            step = functools.partial(coroutine.throw, error)


class _Instrument(trio.abc.Instrument):
    def __init__(self, steps: _Steps, scope: trio.CancelScope, moment: Moment) -> None:
        self._steps = steps
        self._scope = scope
        self._moment = moment

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        if self._moment != "when it came" and self._steps.is_it():
            if self._moment == "where it waits":
                self._scope.cancel()
            else:
                trio.lowlevel.current_trio_token().run_sync_soon(self._scope.cancel)

    def task_scheduled(self, task: trio.lowlevel.Task) -> None:
        if self._moment == "when it came" and self._steps.is_it():
            self._scope.cancel()


async def _on_trio(call: Callable[[], Awaitable[object]], at: int, moment: Moment) -> Outcome:
    outcome = Outcome()
    with trio.CancelScope() as scope:
        instrument = _Instrument(_Steps(at, outcome), scope, moment)
        trio.lowlevel.add_instrument(instrument)
        try:
            outcome.result = await call()
        finally:
            trio.lowlevel.remove_instrument(instrument)
    outcome.cancelled = outcome.result is None and scope.cancelled_caught
    return outcome
