"""Scenarios that the tests of exploration run under many schedules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from dagexec import NetDef, Workspace
from dagexec.core.graph import build_graph
from dagexec.platform.threads import new_gate
from dagexec.scheduler.conformance import conforming
from dagexec.scheduler.exploration import search_begins
from dagexec.scheduler.nets.net import BaseNet
from dagexec.scheduler.plan.plan import build_plan
from dagexec.scheduler.run.pool import WorkerPool
from dagexec.scheduler.run.run import Run
from dagexec.scheduler.run.work import chain_work
from tests.nets import net_of

Result = TypeVar("Result")

DIAMOND = [[], [0], [0], [1, 2]]
X = np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3)


class Done:
    """What a scenario waits for in place of a `threading.Event`; counts how often it was told."""

    def __init__(self) -> None:
        self.told = 0
        self._gate = new_gate()

    def __call__(self) -> None:
        self.told += 1
        if self.told == 1:
            self._gate.release()

    def wait(self) -> None:
        """Until it is told."""
        self._gate.acquire()


def run_of(
    parents: Sequence[Sequence[int]], steps: Sequence[Callable[[], object]], finished: Callable[[], object]
) -> Run:
    """A run of single-operator chains, one for each row of parents; chain i has step i, as no two are swapped."""
    graph = build_graph(net_of(parents))
    plan = build_plan(graph, [1.0] * len(graph), [(index,) for index in range(len(graph))])
    ordered = [(steps[chain[0]],) for chain in plan.chains]
    return Run(
        "explored", chain_work(plan, ordered), lambda chain, _step: f"operator {plan.chains[chain][0]}", finished
    )


def pool_scenario(
    parents: Sequence[Sequence[int]],
    workers: int = 2,
    pool_class: type[WorkerPool] = WorkerPool,
    *,
    settled: bool = False,
) -> Callable[[], tuple[int, ...]]:
    """One run on a pool of its own; fails unless each operator runs once, after its parents.

    `settled`: workers have started, done something and gone to sleep before what a reduction searches.
    """

    def scenario() -> tuple[int, ...]:
        order: list[int] = []
        done = Done()
        with pool_class(workers) as pool:
            if settled:
                before = Done()
                pool.submit(run_of([[], [0]], [lambda: None] * 2, before))
                before.wait()
                search_begins()
            run = run_of(parents, [partial(order.append, index) for index in range(len(parents))], done)
            pool.submit(run)
            done.wait()
            run.check_complete()
            run.raise_error()
        assert sorted(order) == list(range(len(parents))), f"ran {order}"
        for child, row in enumerate(parents):
            for parent in row:
                assert order.index(parent) < order.index(child), f"{child} before its parent {parent}: {order}"
        assert done.told == 1
        return tuple(order)

    return scenario


def held(scenario: Callable[[], Result]) -> Callable[[], Result]:
    """A scenario whose threads are held against the machine of runs."""

    def conform() -> Result:
        with conforming():
            return scenario()

    return conform


def sums(parents: Sequence[Sequence[int]], name: str = "sums") -> NetDef:
    """A net whose operators add the blobs of their parents, or compute something of the input `x`."""
    net = NetDef(name=name)
    net.external_input.append("x")
    for index, row in enumerate(parents):
        if row:
            net.op.add(type="Sum", input=[f"b{parent}" for parent in row], output=[f"b{index}"])
        else:
            net.op.add(type=("Sigmoid", "Tanh", "Exp")[index % 3], input=["x"], output=[f"b{index}"])
    net.external_output.extend(f"b{index}" for index in range(len(parents)))
    return net


def outputs_of(workspace: Workspace, net: NetDef) -> dict[str, bytes]:
    """The bytes of the net's outputs."""
    return {name: workspace.fetch_blob(name).tobytes() for name in net.external_output}


def fed(x: npt.NDArray[Any] = X) -> Workspace:
    """A workspace with `x`."""
    workspace = Workspace()
    workspace.feed_blob("x", x)
    return workspace


def expected(net: NetDef, x: npt.NDArray[Any] = X) -> dict[str, bytes]:
    """What SimpleNet computes."""
    workspace = fed(x)
    workspace.create_net(net, "simple").run()
    return outputs_of(workspace, net)


def net_scenario(net: NetDef, net_type: str = "dag", workers: int = 2, runs: int = 1) -> Callable[[], None]:
    """Runs of `net`; fails unless each computes what SimpleNet does."""
    right = expected(net)

    def scenario() -> None:
        workspace = fed()
        made = workspace.create_net(net, net_type, workers)
        assert isinstance(made, BaseNet)
        with made:
            for _ in range(runs):
                made.run()
                assert outputs_of(workspace, net) == right

    return scenario
