"""Threads that run real nets do what the machine allows: in Python and in machine code, several callers at a time."""

from __future__ import annotations

import gc
import itertools
import random
import threading
import weakref
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

import dagexec
from dagexec import Workspace
from dagexec.core.device import Device
from dagexec.core.native import may_merge
from dagexec.core.operator import nothing_to_do
from dagexec.errors import ConformanceError, DagexecError, RunTimeoutError
from dagexec.platform.assembly.instructions import A2, A4
from dagexec.platform.assembly.native import GeneralAssembler
from dagexec.scheduler.run import engine, engine_code, engine_log
from dagexec.scheduler.run.engine_code import EngineAssembler
from dagexec.scheduler.run.engine_log import LoggingAssembler
from dagexec.scheduler.run.machine import Machine
from dagexec.scheduler.run.pool import WorkerPool
from dagexec.scheduler.run.run import Run, task
from dagexec.scheduler.run.work import Work
from dagexec.scheduling.catalog import policy_names
from dagexec.testing import Conformance, Fault, conforming, random_feeds, simulated
from tests.scheduler.run.test_callers import run_of
from tests.scheduler.run.test_machine import Counting, needs_machine_code, random_tasks
from tests.scheduler.scenarios import DIAMOND, X, fed, pool_scenario, sums

LAYERS = [[], [], [], [0, 1], [1, 2], [0, 2], [3, 4, 5]]

in_either_way = pytest.mark.parametrize("machine_code", [False, True], ids=["in Python", "in machine code"])


def served(
    model: str, monkeypatch: pytest.MonkeyPatch, machine_code: bool, timeouts: list[float | None], **options: object
) -> Conformance:
    """Three callers at a time, with these timeouts in turn, and what was recorded of that."""
    if not machine_code:
        monkeypatch.setattr("dagexec.scheduler.run.work.may_merge", lambda: False)
    with (
        conforming() as found,
        dagexec.compile(model, replicas=2, num_workers=2, **options) as executor,  # type: ignore[arg-type]
    ):
        several = {name: np.repeat(array, 8, axis=0) for name, array in random_feeds(executor.model).items()}

        def call(timeout: float | None) -> None:
            with suppress(RunTimeoutError):
                executor.run(several, timeout=timeout)  # which is worth sharing

        with ThreadPoolExecutor(3) as callers:
            list(callers.map(call, timeouts))
    assert found.cut == 0
    return found


@in_either_way
@pytest.mark.parametrize("model", ["zoo:lenet", pytest.param("zoo:squeezenet", marks=pytest.mark.slow)])
def test_callers_of_a_net_of_the_zoo(model: str, machine_code: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    timeouts = list(itertools.islice(itertools.cycle([None, None, 0.004]), 9))
    found = served(model, monkeypatch, machine_code, timeouts, net_type="dag")
    assert found.runs >= 6
    assert found.native == 0 or machine_code
    assert bool(found.native) == (machine_code and engine.can_run())


def run_graphs(seeds: Iterable[int], threads: int = 3) -> Conformance:
    """Random graphs in machine code, some of whose tasks are steps of Python."""
    with conforming() as found, WorkerPool(threads) as pool:
        for seed in seeds:
            graph = random_tasks(random.Random(seed))
            numbers = range(len(graph.pieces))
            python = frozenset(one for one in numbers if graph.pieces[one] == 1 and one % 3)
            counting = Counting(graph, python)
            steps = [((partial(np.add.at, counting.counts, one, 1),),) if one in python else () for one in numbers]
            pool.run_here(Run("random", Work(graph, steps, counting.tasks), lambda *_: "one", nothing_to_do))
            assert counting.counts.tolist() == list(graph.pieces)
    return found


@needs_machine_code
def test_threads_in_machine_code_make_the_pieces_of_random_graphs_as_the_machine_allows() -> None:
    found = run_graphs(range(12))
    assert (found.runs, found.native, found.cut) == (12, 12, 0)
    assert found.events > 12 * 100


@needs_machine_code
def test_of_a_run_whose_log_is_too_short_the_beginning_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_log, "_SPARE_LINES", -300)
    found = run_graphs([3])
    assert (found.runs, found.cut) == (1, 1)
    assert found.events > 100


@needs_machine_code
def test_the_code_that_keeps_no_log_has_none_of_it() -> None:
    plain, logging = (engine_code.written(code()) for code in (EngineAssembler, LoggingAssembler))
    code = GeneralAssembler()
    begun = code.here()
    code.fetch_and_add(A4, A2, 0)  # as a line is taken
    line = code.code()[begun:]
    assert line in logging
    assert line not in plain
    assert len(logging) - len(plain) > 200


@pytest.mark.parametrize("policy", policy_names())
def test_a_policy_decides_the_same_when_a_run_is_replayed(policy: str) -> None:
    with conforming() as found, fed().create_net(sums(LAYERS), "dag", 2, policy=policy) as net:  # type: ignore[attr-defined]
        for _ in range(3):
            net.run()
    assert found.runs == 3


@in_either_way
def test_runs_in_which_pieces_fail_and_those_between(machine_code: bool) -> None:
    with conforming() as found, WorkerPool(2) as pool:
        for fails in (False, True, False):
            phases = [[(lambda: 1) if fails else nothing_to_do] * 3, [nothing_to_do] * 4]
            run = run_of(phases, in_machine_code=machine_code and may_merge())
            pool.run_here(run)
            assert (run.error is not None) == fails
    assert found.runs == 3


@pytest.mark.parametrize("fault", [None, Fault("kernel", "Sum", nth=2)], ids=["a device", "a device that fails"])
def test_chains_that_are_launched(fault: Fault | None) -> None:
    net = sums(DIAMOND)
    for operator in net.op:
        operator.device_option.CopyFrom(Device("sim", 0).to_option())
    with conforming() as found, simulated("sim:0", faults=[] if fault is None else [fault]):
        workspace = Workspace()
        workspace.feed_blob("x", X, device="sim:0")
        with workspace.create_net(net, "async_dag", 2) as made:
            with pytest.raises(DagexecError) if fault else nullcontext():
                made.run()
            made.run()
    assert found.runs >= 2


def test_a_run_that_somebody_is_about_to_tell_of_is_not_over_though_its_pool_has_ended() -> None:
    began, released = threading.Event(), threading.Event()

    def keep_busy() -> None:
        began.set()
        assert released.wait(60)

    with conforming() as found, WorkerPool(1) as pool:
        waiting = task("nobody works on it", nothing_to_do)

        def told() -> None:  # of its end, by whoever stopped it; the others do not wait for that
            released.set()
            pool.close()
            found.raise_found()

        waiting.finished = told
        pool.submit(task("keeps the worker", keep_busy))
        assert began.wait(60)
        pool.submit(waiting)
        pool.stop(waiting, RunTimeoutError("at once"))
    assert found.runs == 2


def test_what_a_run_computed_with_is_free_after_the_block_though_its_pool_lives_on() -> None:
    class Parameter:
        def use(self) -> None:
            pass

    parameter = Parameter()
    with conforming():
        pool = WorkerPool(1)
        pool.run_here(task("of the pool", parameter.use))
    known = weakref.ref(parameter)
    del parameter
    gc.collect()
    assert known() is None
    pool.close()


def test_what_a_pool_does_that_the_machine_does_not_allow_is_an_error_that_names_operators() -> None:
    with pytest.raises(ConformanceError) as raised, conforming():
        pool_scenario(DIAMOND, 1, OtherOrderPool)()
    assert "takes task 2 (operator 2)\n  machine: it is to take task 1 (operator 1)" in str(raised.value)
    assert len(raised.value.deviations) == 1


def test_an_error_of_the_block_itself_passes_and_is_told_what_was_done_before() -> None:
    def fail() -> None:
        with conforming():
            pool_scenario(DIAMOND, 1, OtherOrderPool)()
            raise AssertionError("otherwise")

    with pytest.raises(AssertionError, match="otherwise") as raised:
        fail()
    assert "it is to take task 1 (operator 1)" in raised.value.__notes__[0]


class OtherOrderPool(WorkerPool):
    """Planted: chain 1 waits for chain 2; the machine is not that of the tasks."""

    def submit(self, run: Run) -> None:
        run.machine = Machine(replace(run.work.graph, children=[[2], [3], [1], []], parent_counts=[0, 1, 1, 1]))
        super().submit(run)
