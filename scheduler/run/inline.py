"""Inline runs: the steps of a net one after another in the thread that asked for the run.

A pool runs chains side by side (`pool.py`); this is for nets whose chains follow one another anyway, and where handing
the run to a worker would cost more than the run.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import NoReturn

from dagexec.core.operator import Step
from dagexec.platform.threads import ThreadWait
from dagexec.scheduler.plan.culprit import NameStep, needs_no_culprit, operator_failure


class InlineSteps(list[Step]):
    """Steps for one thread to call, which another stops by clearing the list.

    Attributes:
        stopped, waits: as of a run, for operators that block (see `dagexec.platform.blocking`).
    """

    def __init__(self, steps: Iterable[Step]) -> None:
        super().__init__(steps)
        self.stopped = False
        self.waits: list[ThreadWait] = []

    def clear(self) -> None:
        """Let no thread call a step any more."""
        self.stopped = True
        super().clear()


def run_inline(net: str, steps: Iterable[Step], name_step: NameStep) -> None:
    """Call `steps` in this thread. To stop it early, end the iteration: a list may be cleared meanwhile.

    Raises OperatorError, with the name that `name_step` gives, where a step fails. Exceptions of a signal handler in
    the main thread pass unchanged.
    """
    step: Step | None = None
    try:
        for step in steps:
            step()
    except BaseException as error:
        raise_inline(net, step, error, name_step)


def raise_inline(net: str, step: Step | None, error: BaseException, name_step: NameStep) -> NoReturn:
    """Raise what a run in this thread ends with when `step` raised `error`: `error` itself, or one that names `step`.

    To be called while `error` is handled.
    """
    signaled = not isinstance(error, Exception) and threading.current_thread() is threading.main_thread()
    if step is None or signaled or needs_no_culprit(error):
        raise
    raise operator_failure(net, name_step(None, getattr(error, "failed_call", step)), error) from error
