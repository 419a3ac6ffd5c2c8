"""`dagexec.compile_async`: `dagexec.compile` for a task, which leaves its event loop (asyncio or trio) free meanwhile.

The model is compiled on a thread of its own. A task that is cancelled has that thread stop between two pieces of work
(`platform.deadline.check_stop`): two operators, passes, or candidates that are measured.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextvars import copy_context
from types import TracebackType

from dagexec.executor.compile import compile
from dagexec.executor.executor import Executor
from dagexec.executor.requests.waiting import TaskWait
from dagexec.executor.source.loading import ModelSource
from dagexec.options import CompileOptions, with_keywords_of
from dagexec.platform.deadline import Deadline, StopRequested, stoppable
from dagexec.platform.shutdown import stop_at_exit
from dagexec.platform.switching import quick_switching
from dagexec.platform.threads import ThreadWait, threads


class PendingExecutor:
    """An executor that a task waits for: `await` gives it, and `async with` also closes it at the end.

    Compilation starts with `await`; each `await` compiles once more.
    """

    def __init__(self, model: ModelSource, options: CompileOptions) -> None:
        """Called by `compile_async`."""
        self._model = model
        self._options = options
        self._entered: list[Executor] = []

    def __await__(self) -> Generator[None, None, Executor]:
        return _compiled(self._model, self._options).__await__()

    async def __aenter__(self) -> Executor:
        executor = await self
        self._entered.append(executor)
        return executor

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._entered.pop().aclose()


@with_keywords_of(CompileOptions)
def compile_async(model: ModelSource, options: CompileOptions) -> PendingExecutor:
    """Like `dagexec.compile`, for a task of asyncio or trio, whose event loop stays free.

        executor = await dagexec.compile_async("model.onnx", tuning_seconds=20)
        async with dagexec.compile_async("model.onnx") as executor:
            outputs = await executor.run_async({"data": array})

    Arguments are those of `compile`, and `await` raises what `compile` raises; only SettingError comes with the call.
    A cancelled await stops the compilation at the next operator, pass or measured candidate, and returns once
    everything that it made is closed.
    """
    return PendingExecutor(model, options)


async def _compiled(model: ModelSource, options: CompileOptions) -> Executor:
    attempt = _Attempt(lambda: compile(model, options), TaskWait())
    try:
        await attempt.ended.wait()
    except GeneratorExit:  # the coroutine was dropped: it cannot wait any more
        attempt.stop.set()
        raise
    except BaseException:
        await attempt.abandon()
        raise
    return attempt.executor()


class _Attempt:
    """A compilation under way on a thread of its own, in the context of the task.

    Attributes:
        ended: is notified at the end.
        stop: set when nobody wants the executor any more.
    """

    def __init__(self, call: Callable[[], Executor], ended: TaskWait) -> None:
        self.ended = ended
        self.stop = threading.Event()
        self._call = call
        self._closed = ThreadWait()
        self._made: list[Executor] = []
        self._error: BaseException | None = None
        if threads().concurrent:
            stop_at_exit(self, _Attempt._stop_at_exit)
        context = copy_context()
        self._thread = threads().start(lambda: context.run(self._work), name="dagexec-compiling")

    def executor(self) -> Executor:
        """The executor, or raise why there is none; after the end."""
        self._thread.join()
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback holds this frame
        return self._made.pop()

    async def abandon(self) -> None:
        """Stop, and return when the executor is closed, even if the task is cancelled meanwhile."""
        self.stop.set()
        try:
            await self.ended.wait_out()
        finally:
            self._thread.join()
            while self._made:  # compilation had ended before
                await self._made.pop().aclose()

    def _work(self) -> None:
        try:
            with quick_switching(), stoppable(self.stop):
                self._made.append(self._call())
            if self.stop.is_set():
                self._made.pop().close()
        except StopRequested:
            pass
        except BaseException as error:
            self._error = error
        finally:
            del self._call
            self._closed.notify()
            self.ended.notify()

    def _stop_at_exit(self) -> Callable[[Deadline], object]:
        self.stop.set()
        return lambda deadline: self._closed.wait(max(0.0, deadline.left()))
