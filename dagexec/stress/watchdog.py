"""A watchdog over cases: one that takes too long is reported from outside, with the stacks of all threads."""

from __future__ import annotations

import faulthandler
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dagexec.platform.threads import threads

_SECONDS_TO_REPORT = 20.0


def stacks() -> str:
    """Where every thread of the process is, the most recent call first."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()


@contextmanager
def watched(seconds: float, on_hang: Callable[[], object]) -> Iterator[None]:
    """Call `on_hang`, on a thread of its own, when the block takes longer than `seconds`.

    When even that does not end the process, as no thread gets the interpreter any more, the process is ended with all
    stacks on standard error.
    """
    timer = threads().call_later(seconds, on_hang)
    if sys.__stderr__ is not None:
        faulthandler.dump_traceback_later(seconds + _SECONDS_TO_REPORT, exit=True, file=sys.__stderr__)
    try:
        yield
    finally:
        timer.cancel()
        faulthandler.cancel_dump_traceback_later()
