"""Callers' threads in runs of their own (`WorkerPool.run_here`): who helps them, and how such a run may end."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from dagexec.core.native import NativeCall, NativeStep, may_merge
from dagexec.core.operator import Step, nothing_to_do
from dagexec.errors import ClosedError, OperatorError, RunCancelledError, WorkerLostError
from dagexec.scheduler.run.pool import WorkerPool
from dagexec.scheduler.run.run import Run
from dagexec.scheduler.run.work import SingleChain, Work, pieces_of_chains
from tests.held import PATIENCE
from tests.interrupts import InterruptedAtPoints

Function = Callable[[], object]
Phases = Sequence[Sequence[Function]]
CALL = ctypes.CFUNCTYPE(ctypes.c_long)

WAYS = [
    pytest.param(True, marks=pytest.mark.skipif(not may_merge(), reason="no machine code is joined here")),
    False,
]
in_either_way = pytest.mark.parametrize("in_machine_code", WAYS, ids=["machine code", "Python"])


def native(function: Function) -> NativeCall:
    """A native call of `function`, which fails where that returns something true."""
    call = CALL(lambda: int(bool(function())))
    address = ctypes.cast(call, ctypes.c_void_p).value
    assert address is not None
    return NativeCall(address, (0, 0, 0, 0), None, lambda: ValueError("on purpose"), call)


def work_of(phases: Phases, *, in_machine_code: bool) -> Work:
    """A chain of one step, whose phases have a piece for each function."""
    pieces = tuple(tuple((native(function),) for function in phase) for phase in phases)
    return pieces_of_chains(
        SingleChain(), [(NativeStep(pieces),)], [[1e-3]], [sys.maxsize], in_machine_code=in_machine_code
    )


def run_of(
    phases: Phases, *, in_machine_code: bool, named: Callable[[int | None, Step], str] = lambda *_: "operator"
) -> Run:
    return Run("mine", work_of(phases, in_machine_code=in_machine_code), named, nothing_to_do)


def note(seen: list[int]) -> Function:
    return lambda: seen.append(threading.get_ident())


def at_rest(pool: WorkerPool) -> bool:
    """True once nobody is in a run, and nothing is left of those that were."""
    while pool.statistics().idle < pool.num_workers:
        pass
    with pool.lock:
        return pool._roster.is_empty and all(one.is_of_pool for one in pool._roster.workers)


@in_either_way
def test_pieces_of_a_callers_run_are_made_by_the_caller_and_a_worker(in_machine_code: bool) -> None:
    meeting = threading.Barrier(2)
    seen: list[int] = []

    def meet() -> None:
        seen.append(threading.get_ident())
        meeting.wait(PATIENCE)

    with WorkerPool(2) as pool:
        run = run_of([[meet, meet], [meet, meet]], in_machine_code=in_machine_code)
        pool.run_here(run)
        run.raise_error()
        run.check_complete()
        assert len(seen) == 4
        assert {threading.get_ident()} < set(seen) <= {threading.get_ident(), *pool.workers}
        assert at_rest(pool)


@in_either_way
def test_as_many_callers_as_workers_make_their_own_pieces_and_nobody_helps(in_machine_code: bool) -> None:
    meeting = threading.Barrier(2)

    def call(pool: WorkerPool) -> bool:
        seen: list[int] = []
        pieces = [note(seen)] * 8
        run = run_of(
            [[lambda: meeting.wait(PATIENCE) and None], pieces, pieces, [lambda: meeting.wait(PATIENCE) and None]],
            in_machine_code=in_machine_code,
        )
        pool.run_here(run)
        run.raise_error()
        return seen == [threading.get_ident()] * 16

    with WorkerPool(2) as pool, ThreadPoolExecutor(2) as callers:
        assert all(call.result(PATIENCE) for call in [callers.submit(call, pool) for _ in range(2)])
        assert at_rest(pool)


@in_either_way
def test_a_run_is_stopped_between_pieces(in_machine_code: bool) -> None:
    made: list[int] = []
    error = RunCancelledError("enough")
    with WorkerPool(1) as pool:
        run = run_of([[lambda: pool.stop(run, error), note(made)], [note(made)]], in_machine_code=in_machine_code)
        pool.run_here(run)
        with pytest.raises(RunCancelledError, match="enough"):
            run.raise_error()
        assert made == []
        assert at_rest(pool)


def test_a_run_that_was_stopped_before_does_not_begin() -> None:
    made: list[int] = []
    with WorkerPool(1) as pool:
        run = run_of([[note(made)]], in_machine_code=False)
        pool.stop(run, RunCancelledError("before"))
        pool.run_here(run)
        with pytest.raises(RunCancelledError, match="before"):
            run.raise_error()
    assert made == []
    with pytest.raises(ClosedError, match="net 'mine': the worker pool is closed"):
        pool.run_here(run_of([[note(made)]], in_machine_code=False))


@in_either_way
def test_a_piece_that_fails_on_any_thread_fails_the_run_under_its_operators_name(in_machine_code: bool) -> None:
    meeting = threading.Barrier(2)

    def meet_and_fail() -> bool:
        meeting.wait(PATIENCE)
        return threading.get_ident() != caller

    caller, made = threading.get_ident(), list[int]()
    with WorkerPool(2) as pool:
        run = run_of([[meet_and_fail] * 2, [note(made)]], in_machine_code=in_machine_code)
        pool.run_here(run)
        with pytest.raises(OperatorError, match=r"operator.*ValueError: on purpose"):
            run.raise_error()
        assert made == []
        assert at_rest(pool)


@in_either_way
def test_a_worker_that_dies_as_it_helps_ends_the_callers_run_and_is_replaced(in_machine_code: bool) -> None:
    meeting = threading.Barrier(2)

    def meet_and_fail() -> bool:
        meeting.wait(PATIENCE)
        return threading.get_ident() != caller

    def unnamed(_chain: int | None, _step: Step) -> str:
        raise KeyError("no name")

    caller = threading.get_ident()
    with WorkerPool(2, name="pool") as pool:
        run = run_of([[meet_and_fail] * 2, [nothing_to_do]], in_machine_code=in_machine_code, named=unnamed)
        pool.run_here(run)
        with pytest.raises(WorkerLostError, match=r"net 'mine': worker pool-\d died: KeyError: 'no name'"):
            run.raise_error()
        assert at_rest(pool)
        assert pool.statistics().replaced == 1
        assert pool.statistics().workers == len(pool._roster.workers) == 2


@pytest.mark.unrecorded
@in_either_way
@pytest.mark.slow
def test_ctrl_c_at_any_point_of_a_callers_run_leaves_nobody_in_it(in_machine_code: bool) -> None:
    inside: list[int] = []
    made: list[int] = []

    def piece() -> None:
        inside.append(1)
        made.append(1)
        inside.pop()

    with WorkerPool(2) as pool:

        def attempt() -> None:
            made.clear()
            run = run_of([[piece] * 2, [piece] * 3], in_machine_code=in_machine_code)
            try:
                interrupted.look(lambda: pool.run_here(run))
                run.raise_error()
            finally:
                so_many = len(made)
                assert not inside, f"point {interrupted.point}"
                assert at_rest(pool), f"point {interrupted.point}"
                assert run.active == 0, f"point {interrupted.point}"
                assert len(made) == so_many, f"point {interrupted.point}"

        interrupted = InterruptedAtPoints("dagexec/scheduler/run/")
        interrupted(attempt)
        assert len(made) == 5
