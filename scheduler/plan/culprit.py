"""Culprits: from an exception of a step to the error that names net, operator, chain and worker.

Callers of steps, a worker of a pool (`scheduler.run.pool`) or the thread that asked for the run
(`scheduler.run.inline`), find the operator of a failed step with `label_of`. Those that know the operator, or the event
of a stream, call `operator_failure`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from dagexec.core.native import NativeCall, phases_of
from dagexec.core.operator import Operator, Step, parts_of
from dagexec.errors import DagexecError, OperatorError, ResourceError, RunCancelledError, RunTimeoutError
from dagexec.platform.threads import ThreadsEndedError
from dagexec.scheduler.plan.plan import Plan

Failed = Step | NativeCall
"""What failed: the step of an operator, a part of it, or one of its native calls."""

NameStep = Callable[[int | None, Failed], str]
"""Names what failed in a chain, for errors; the chain is None in a run that has none."""

_OPERATOR = "operator_index"


def stand_for(step: Step, operator: int) -> None:
    """Say that `step`, a function made for one run, does what the step of `operator` does."""
    setattr(step, _OPERATOR, operator)


def label_of(plan: Plan, prepared: Sequence[Step], chain: int | None, step: Failed) -> str:
    """The name, in errors, of the operator of `step`, among those of `chain`, or of the whole net with None.

    `prepared` are the steps of all operators. A step that is none of them and does not `stand_for` one, such as the
    call that launches a chain, is named after the first operator of its chain.
    """
    index: int | None = getattr(step, _OPERATOR, None)
    candidates = range(len(prepared)) if chain is None else plan.chains[chain]
    if index is None:
        index = next((candidate for candidate in candidates if is_part_of(prepared[candidate], step)), None)
    if index is None and chain is None:
        return f"an operator of net {plan.graph.name!r}"
    return plan.graph.label(candidates[0] if index is None else index)


def is_part_of(step: Step, failed: Failed) -> bool:
    """True where `failed` is `step`, a part of it, or one of its native calls."""
    if step is failed:
        return True
    identity = (
        (failed.function, failed.arguments) if isinstance(failed, NativeCall) else None
    )  # some say it anew each time
    for part in parts_of(step):
        calls = (call for phase in phases_of(part) or () for piece in phase for call in piece)
        if part is failed or (identity and any((call.function, call.arguments) == identity for call in calls)):
            return True
    return False


def needs_no_culprit(error: BaseException) -> bool:
    """True for an error that names its operator already, and for exceptions that end a run or thread from outside."""
    return isinstance(error, OperatorError | RunCancelledError | RunTimeoutError | ThreadsEndedError)


def operator_failure(
    net: str, label: str, cause: BaseException, chain: int | None = None, worker: str | None = None
) -> OperatorError:
    """The OperatorError for `cause`, raised by the operator called `label`; its `__cause__` is set.

    `worker` is what it ran on, by default the calling thread.
    """
    if worker is None:
        worker = threading.current_thread().name
    where = f"chain {chain}, " if chain is not None else ""
    try:
        text = str(cause) if isinstance(cause, DagexecError) else f"{type(cause).__name__}: {cause}"
    except Exception:  # an exception class whose __str__ fails
        text = type(cause).__name__
    prefix = "" if label in text else f"{label} failed: "
    error = OperatorError(f"{prefix}{text} ({where}worker {worker})", net=net, operator=label, worker=worker)
    error.__cause__ = cause
    return error


class UnderWay:
    """The operator that is being prepared."""

    operator: Operator


@contextmanager
def naming_failures(net: str) -> Iterator[UnderWay]:
    """Within it, an exception that dagexec does not raise on purpose becomes an OperatorError for the one under way.

    A ResourceError gets its label, too: a type that is too large (`TensorType`) does not know which operator it is of.
    """
    under_way = UnderWay()
    try:
        yield under_way
    except ResourceError as error:
        label = under_way.operator.label
        if label in str(error):
            raise
        raise ResourceError(f"{label}: {error}") from error
    except DagexecError:
        raise
    except MemoryError as error:
        raise ResourceError(f"{under_way.operator.label}: the system is out of memory: {error}") from error
    except Exception as error:
        raise operator_failure(net, under_way.operator.label, error) from error
