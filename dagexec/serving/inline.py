"""Inline calls: a run in the thread of its caller, when a replica is idle and workers could not share the work.

Handing a run to a worker and waiting for it costs tens of microseconds, more than a small net takes. Nothing else is
different: the run has a replica of its own, is counted, is waited for by whoever closes the executor, and can be
stopped between operators.

Operators that use several threads have a team of them for each thread that calls them, which takes long to make: then
only the thread that calls first runs what it asks for.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np

from dagexec.binding.io_binding import Array, IOBinding, Outputs
from dagexec.core.feeds import Feeds
from dagexec.core.operator import Step
from dagexec.errors import OperatorError, RunCancelledError, RunTimeoutError
from dagexec.platform import teams
from dagexec.platform.shutdown import hold_daemon
from dagexec.platform.threads import ThreadsEndedError
from dagexec.scheduler.run.run import operator_failure
from dagexec.serving.dispatch import Dispatcher
from dagexec.serving.requests import outcome_name


class InlineCalls:
    """Runs in their callers' threads, with the idle replicas of `dispatcher`."""

    def __init__(self, name: str, dispatcher: Dispatcher, in_sequence: bool, teams: bool) -> None:
        """`name` is the net's. `in_sequence`: whatever its chains are, no more than one thread works for a run.

        `teams`: operators use several threads.
        """
        self._name = name
        self._dispatcher = dispatcher
        self._in_sequence = in_sequence
        self._teams = teams
        self._caller: int | None = None  # the one that has a team

    def run(self, feeds: Feeds, names: Sequence[str], out: Mapping[str, Array] | None) -> Outputs | None:
        """The outputs; None when the run has to take the usual way, and nothing has been done.

        `feeds` have to be arrays of the names, dtypes and shapes that the next replica is prepared for. Raises what
        `Executor.run` does.
        """
        dispatcher = self._dispatcher
        io_binding, begin_inline, end_inline = dispatcher.first_idle(), dispatcher.begin_inline, dispatcher.end_inline
        if io_binding is None or not (self._in_sequence or io_binding.in_sequence) or feeds.__class__ is not dict:
            return None
        if self._teams and not self._has_team():
            return None
        signature = io_binding.signature
        if signature is None or len(feeds) != len(signature):
            return None
        arrays: list[Array] = []
        for name, dtype, shape in signature:
            array = cast("Array", feeds.get(name))
            if array.__class__ is not np.ndarray or array.shape != shape:
                return None
            if array.dtype is not dtype and array.dtype != dtype:  # an array that was unpickled has a dtype of its own
                return None
            arrays.append(array)
        try:
            here = begin_inline(io_binding)
            if here is None:
                return None
            replica = here.replica
            io_binding = replica.io_binding
            copied = False
            if io_binding is not None and io_binding.in_place():
                copied = io_binding.copied == names
                if copied:
                    if out is not None:
                        io_binding.check(out)
                    io_binding.copy_in(arrays)
                else:
                    io_binding.feed(arrays, names)
                    io_binding.bind_results(names, out)
            else:
                replica.feed(cast("dict[str, Array]", feeds), names, out)
                io_binding = cast("IOBinding", replica.io_binding)
            here.steps = io_binding.steps
            if here.stopped is None:
                replica.arithmetic.run(self._call, io_binding)
            if here.stopped is not None:
                raise here.stopped
            outputs = replica.fetch(names, out)
            if not copied:
                io_binding.settle()
            end_inline("completed")
            return outputs
        except ThreadsEndedError:
            raise
        except BaseException as error:
            end_inline(outcome_name(error) if isinstance(error, Exception) else "cancelled")
            hold_daemon()
            raise

    def _has_team(self) -> bool:
        caller = threading.get_ident()
        if self._caller is None:
            self._caller = caller
        if self._caller != caller:
            return False
        teams.enter()
        return True

    def _call(self, io_binding: IOBinding) -> None:
        step: Step | None = None
        try:
            for step in io_binding.steps:
                step()
        except (ThreadsEndedError, RunCancelledError, RunTimeoutError, OperatorError):
            raise
        except BaseException as error:
            thread = threading.current_thread()
            if step is None or (not isinstance(error, Exception) and thread is threading.main_thread()):
                raise  # a signal's
            raise operator_failure(self._name, io_binding.label(step), error, thread.name) from error
