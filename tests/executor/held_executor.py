"""An executor of held operators, which loses nothing whatever happens to its requests."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

import dagexec
from dagexec.executor.requests.request import Request
from tests.held import PATIENCE, Held, doubled_model, rows

BACKENDS = ["asyncio", "trio"]


@contextmanager
def held_executor(held: Held, **options: object) -> Iterator[dagexec.Executor]:
    """An executor of held operators. Afterwards it must have all its replicas, serve on each, and leave no thread."""
    before = set(threading.enumerate())
    executor = dagexec.compile(doubled_model("Held"), optimize=False, num_workers=2, **options)  # type: ignore[arg-type]
    with executor:
        yield executor
        if executor._dispatcher.state.shut:
            return
        assert len(executor._dispatcher.state.idle) == executor.statistics().replicas
        held.failing.clear()
        while held.go_on.acquire(blocking=False):
            pass
        for _ in range(executor.statistics().replicas):
            held.go_on.release()
            np.testing.assert_array_equal(executor.run({"x": rows(0)}, timeout=PATIENCE)["y"], [2, 2, 2])
    left = {thread.name for thread in set(threading.enumerate()) - before}
    assert {name for name in left if not name.startswith(("AnyIO", "Trio"))} == set()


def requests_alive() -> list[Request]:
    """Every request in this process that something still refers to."""
    gc.collect()
    return [thing for thing in gc.get_objects() if isinstance(thing, Request)]


def after_cancel(executor: dagexec.Executor, action: Callable[[], object]) -> None:
    """Have `action` called whenever a request has been told to end early."""
    dispatcher = executor._dispatcher
    cancel, stop_running = dispatcher.cancel, dispatcher.stop_running

    def cancel_and_act(*arguments: object) -> bool:
        found = cancel(*arguments)  # type: ignore[arg-type]
        action()
        return found

    def stop_and_act() -> None:
        stop_running()
        action()

    dispatcher.cancel, dispatcher.stop_running = cancel_and_act, stop_and_act  # type: ignore[method-assign]
