"""Running task graphs on the ordinary nets, and what is measured of them.

A measure is a function in `MEASURES` of what one runtime did with one graph. All runtimes of a graph run in rounds of
random order (`dagexec.analysis.rounds`), and SimpleNet's time scales the work that the prediction starts from.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import cache

from dagexec.analysis.rounds import Limits, measure
from dagexec.core.native import can_run
from dagexec.core.proto import NetDef
from dagexec.core.tensor import Tensor
from dagexec.core.workspace import Workspace
from dagexec.errors import SettingError
from dagexec.lab.graph import WorkGraph
from dagexec.lab.kernels import KINDS, rate, run_natively
from dagexec.lab.metg import Metg, fastest, metg
from dagexec.lab.nets import expected_marks, work_net
from dagexec.lab.patterns import Bench, bench_graph
from dagexec.platform.processor import available_cores
from dagexec.platform.records import dataclass
from dagexec.scheduler.nets.net import BaseNet
from dagexec.scheduler.run.overhead import measure_costs, slowdown_up_to
from dagexec.scheduler.run.prediction import Hardware, predict_host

Key = tuple[str, int]
"""A net type, perhaps with a policy as in "dag:heft", and a number of workers."""

REFERENCE: Key = ("simple", 1)


@dataclass(frozen=True)
class Measured:
    """What one runtime did with one graph.

    Attributes:
        graph, net_type, workers: which graph and runtime.
        tasks: how many the graph has.
        work, critical_path: seconds of its tasks, all together and along the longest path.
        bound: seconds that no schedule on so many workers beats; of the optimum where it is known.
        is_optimum: the bound is that.
        makespan: seconds of a run; the median.
        samples: all runs, as they came.
        predicted: seconds from list scheduling with SimpleNet's work and the costs of scheduling.
        kept_order: every task had the marks of all that it waits for.
    """

    graph: str
    net_type: str
    workers: int
    tasks: int
    work: float
    critical_path: float
    bound: float
    is_optimum: bool
    makespan: float
    samples: tuple[float, ...]
    predicted: float
    kept_order: bool


MEASURES: dict[str, Callable[[Measured], float]] = {
    "efficiency": lambda one: one.work / (one.workers * one.makespan),
    "over bound": lambda one: one.makespan / one.bound,
    "prediction error": lambda one: one.predicted / one.makespan - 1,
}
"""By name. Efficiency: the part of the workers' time that is the tasks' work. Over bound: 1 is a perfect schedule."""


def run_graph(graph: WorkGraph, kind: str, runtimes: Sequence[Key], limits: Limits) -> list[Measured]:
    """Run a graph whose tasks do work of a kind on each of the `runtimes`, and on SimpleNet for the predictions.

    Raises SettingError for an unknown kind, and what creating and running nets raises.
    """
    if kind not in KINDS:
        raise SettingError(f"kind of work {kind!r}: expected {', '.join(KINDS)}")
    definition = work_net(graph, kind)
    with ExitStack() as stack:
        nets: dict[Key, tuple[BaseNet, Workspace]] = {}
        for net_type, workers in dict.fromkeys([REFERENCE, *runtimes]):
            workspace = Workspace()
            net = stack.enter_context(closing(_created(workspace, definition, (net_type, workers))))
            net.run()
            nets[net_type, workers] = net, workspace
        rounds = measure({key: net.run for key, (net, _) in nets.items()}, limits)
        alone = statistics.median(rounds.counted(REFERENCE))
        return [_measured(graph, kind, key, *nets[key], rounds.counted(key), alone) for key in dict.fromkeys(runtimes)]


def _created(workspace: Workspace, definition: NetDef, key: Key) -> BaseNet:
    net_type, _, policy = key[0].partition(":")
    net = workspace.create_net(definition, net_type, key[1], policy=policy or None)
    assert isinstance(net, BaseNet)
    return net


def _measured(
    graph: WorkGraph,
    kind: str,
    key: Key,
    net: BaseNet,
    workspace: Workspace,
    samples: Sequence[float],
    alone: float,
) -> Measured:
    net_type, workers = key
    marks = [int(workspace.get_blob(str(number)).get(Tensor).array[0]) for number in range(len(graph.tasks))]
    return Measured(
        graph=graph.name,
        net_type=net_type,
        workers=workers,
        tasks=len(graph.tasks),
        work=graph.work,
        critical_path=graph.critical_path,
        bound=graph.lower_bound(workers),
        is_optimum=workers in graph.optimum,
        makespan=statistics.median(samples),
        samples=tuple(samples),
        predicted=_predicted(graph, kind, net, workers, alone) if net_type != "simple" else alone,
        kept_order=marks == expected_marks(graph),
    )


def _predicted(graph: WorkGraph, kind: str, net: BaseNet, workers: int, alone: float) -> float:
    """Seconds on the net's workers, where the tasks' work takes `alone` on one."""
    tasks = net.tasks()
    costs = measure_costs(tasks.work)
    hardware = Hardware(
        workers,
        piece_seconds=costs.piece_seconds,
        wake_seconds=costs.wake_seconds,
        slowdown=slowdown_up_to(min(workers, available_cores()), _slowdown(kind, min(workers, available_cores()))),
    )
    timed = tasks.timed([task.seconds for task in graph.tasks]).taking(alone)
    return costs.wake_seconds + predict_host(timed, hardware)


@cache
def _slowdown(kind: str, cores: int) -> float:
    """By what work of a kind takes longer when so many cores do it."""
    if cores < 2 or kind == "sleep" or not can_run():
        return 1.0
    units = round(rate(kind) * 2e-3)

    def once(number: int) -> float:
        start = time.perf_counter()
        run_natively(kind, units, number)
        return time.perf_counter() - start

    with ThreadPoolExecutor(cores) as pool:
        crowded = [statistics.mean(pool.map(once, range(cores))) for _ in range(9)]
    return statistics.median(crowded) / statistics.median(once(0) for _ in range(9))


def net_metg(pattern: str, bench: Bench, key: Key, kind: str = KINDS[0], repeat: int = 5) -> Metg:
    """METG(50%) of a runtime on one of Task Bench's patterns; the fastest of up to `repeat` runs counts."""
    graph = bench_graph(pattern, bench)

    def run_seconds(task_seconds: float) -> float:
        with closing(_created(Workspace(), work_net(graph.taking(task_seconds), kind), key)) as net:
            return fastest(net.run, repeat)

    return metg(run_seconds, len(graph.tasks), key[1])
