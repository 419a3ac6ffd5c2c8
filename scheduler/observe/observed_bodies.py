"""Observers of the operators in the bodies of other operators, such as the branches of an If."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dagexec.core.operator import Step

Tell = Callable[[str, str, int, int, BaseException | None], None]
"""Told of an operator in a body: its label, the worker, start, end, and the error."""


class _Telling(threading.local):
    """The calling thread's observer of operators in bodies."""

    tell: Tell | None = None


telling = _Telling()


@contextmanager
def telling_of_bodies(tell: Tell | None) -> Iterator[None]:
    """Within it, `tell` is told of the operators of bodies that this thread executes."""
    before, telling.tell = telling.tell, tell
    try:
        yield
    finally:
        telling.tell = before


def observed_in_body(label: str, step: Step, tell: Tell) -> Step:
    """The step of an operator in a body, which tells of its execution, on whichever thread it is called."""

    def observed() -> None:
        error: BaseException | None = None
        start = time.perf_counter_ns()
        try:
            with telling_of_bodies(tell):
                step()
        except BaseException as caught:
            error = caught
            raise
        finally:
            tell(label, threading.current_thread().name, start, time.perf_counter_ns(), error)
            del error  # its traceback has this frame

    return observed
