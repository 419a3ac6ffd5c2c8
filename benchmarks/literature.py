"""Sequential, greedy, critical path and IOS on the nets of IOS's table: measured with two workers, predicted for more.

    python benchmarks/literature.py [--seconds 30] [--json benchmarks/results/literature.json]

Predictions start from what operators take under SimpleNet, and from what handing out a piece and waking a worker cost
here; every worker has a core of its own that others do not slow down. On streams of a device a chain is launched whole,
and streams do not slow each other down either. docs/literature.md holds this against what was published.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from environment import write_report

from dagexec import compile
from dagexec.analysis.comparison import random_feeds
from dagexec.analysis.rounds import Limits, measure
from dagexec.analysis.statistics import spread, verdicts
from dagexec.analysis.what_if import LAUNCH_SECONDS, CostModel, CostProfiler
from dagexec.binding.parameters import initialized
from dagexec.compiler.compilation import compile_model
from dagexec.core.model import Model
from dagexec.executor.source.loading import load_model
from dagexec.lab.nets import work_net
from dagexec.lab.random_wired import random_wired
from dagexec.options import CompileOptions
from dagexec.scheduler.run.prediction import Hardware, OperatorTasks, predict_device, predict_host, tasks_of_chains
from dagexec.scheduling import CriticalPath, Ios, Policy, RunState

WORKERS, STREAMS = (2, 16, 64), (1, 2, 8, 32)
PROFILING_RUNS = 3
PUBLISHED = {
    "inception_v3": {"sequential": 6.25, "greedy": 4.62, "ios": 3.94, "ios without merging": 4.06},
    "randwire": {"sequential": 8.53, "greedy": 6.27, "ios": 5.78, "ios without merging": 5.80},
    "nasnet_a": {"sequential": 23.02, "greedy": 16.60, "ios": 15.85, "ios without merging": 15.87},
    "squeezenet": {"sequential": 0.89, "greedy": 0.98, "ios": 0.68, "ios without merging": 0.86},
}
"""Milliseconds at batch 1 on a V100: README.md of mit-han-lab/inter-operator-scheduler, section 4.2.1."""

NODE_SECONDS = 300e-6
"""Of work in a node of the randomly wired net."""


class Sequential(Policy):
    """One chain at a time; workers share the pieces of its operators."""

    name = "sequential"

    def choose(self, ready: Sequence[int], worker: int, state: RunState) -> int | None:
        """The first, once nothing runs."""
        return None if state.running else ready[0]


class Greedy(Policy):
    """IOS's baseline of this name: all that is ready is the next stage."""

    name = "greedy"

    def choose(self, ready: Sequence[int], worker: int, state: RunState) -> int | None:
        """The next of the stage; a new stage once the last one has ended."""
        if not state.running and not (state.own and state.own.intersection(ready)):
            state.own = frozenset(ready)
        return next((chain for chain in ready if chain in state.own), None)


POLICIES: tuple[type[Policy], ...] = (Sequential, Greedy, CriticalPath, Ios)


def load(net: str) -> Model:
    """A net as compile rewrites it, its branches left as they are."""
    if net == "randwire":
        graph = random_wired("watts_strogatz", seconds=NODE_SECONDS)
        return Model(net, work_net(graph), outputs=(str(len(graph.tasks) - 1),))
    model = initialized(load_model(f"zoo:{net}"))
    return compile_model(model, CompileOptions(net_type="simple", num_workers=1)).model


def predicted(tasks: OperatorTasks, costs: CostModel, workers: int, *, whole: bool) -> float:
    """Milliseconds on so many workers; `whole` where no operator comes in pieces."""
    hardware = Hardware(workers, piece_seconds=costs.piece_seconds, wake_seconds=costs.wake_seconds)
    of = tasks_of_chains(tasks.plan) if whole else tasks
    return 1e3 * predict_host(of.timed(costs.operator_seconds), hardware)


def on_streams(tasks: OperatorTasks, seconds: Sequence[float], launch_seconds: float) -> dict[int, float]:
    """Milliseconds by the number of streams on which one worker launches kernels of so many `seconds`."""
    devices = {streams: Hardware(1, streams, launch_seconds=launch_seconds) for streams in STREAMS}
    return {streams: 1e3 * predict_device(tasks.plan, hardware, seconds) for streams, hardware in devices.items()}


def too_wide(tasks: OperatorTasks) -> Iterator[tuple[int, int]]:
    """By the number of workers, how many chains IOS leaves to the critical path."""
    planned = tasks.work.graph.policy
    if planned is not None:
        for workers in WORKERS:
            begun = planned.begun(workers)
            assert isinstance(begun, Ios)
            yield workers, begun.too_wide


def measured(net: str, seconds: float) -> dict[str, Any]:
    """One net: rounds of all policies on two workers, and predictions."""
    model = load(net)
    feeds = random_feeds(model)
    with ExitStack() as stack:
        simple = stack.enter_context(compile(model, optimize=False, net_type="simple", num_workers=1))
        native = stack.enter_context(compile(model, optimize=False, net_type="dag", num_workers=1))
        executors = {
            policy.name: stack.enter_context(
                compile(model, optimize=False, net_type="dag", num_workers=2, policy=policy())
            )
            for policy in POLICIES
        }
        expected = simple.run(feeds)
        native.run(feeds)
        for name, executor in executors.items():
            found = executor.run(feeds)
            if any(found[output].tobytes() != expected[output].tobytes() for output in expected):
                raise SystemExit(f"{net}: {name} gave other bytes than SimpleNet; nothing is reported")
        profiler = CostProfiler(simple, None, feeds, native)
        contenders = {name: partial(executor.run, feeds) for name, executor in executors.items()}
        contenders["simple"] = partial(simple.run, feeds)
        rounds = measure(contenders, Limits(seconds=seconds), after_round=profiler.run_natively)
        for _ in range(PROFILING_RUNS):
            profiler.run()
        tasks = {name: executor.net().tasks() for name, executor in executors.items()}
        counted = {name: rounds.counted(name) for name in rounds.seconds}
        costs = profiler.cost_model(tasks["critical_path"], counted["simple"])
        return measurements(counted) | predictions(tasks, costs, PUBLISHED[net])


def measurements(seconds: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """What the rounds say, each policy beside `sequential`."""
    return {
        "rounds": len(seconds["simple"]),
        "median_ms": {name: 1e3 * spread(row).median for name, row in seconds.items()},
        "verdicts": {
            name: asdict(one) | {"words": one.sentence} for name, one in verdicts(seconds, "sequential").items()
        },
        "samples_ms": {name: [round(1e3 * one, 4) for one in row] for name, row in seconds.items()},
    }


def predictions(tasks: Mapping[str, OperatorTasks], costs: CostModel, published: Mapping[str, float]) -> dict[str, Any]:
    """Of all policies; on streams of the critical path, also with operators as fast as published for all together."""
    plan = tasks["critical_path"].plan
    chains = tasks_of_chains(plan).timed(costs.operator_seconds)
    faster = [one * 1e-3 * published["sequential"] / chains.work for one in costs.operator_seconds]
    by_workers = {
        key: {
            count: {name: predicted(one, costs, count, whole=whole) for name, one in tasks.items()} for count in WORKERS
        }
        for key, whole in (("predicted_ms", False), ("predicted_whole_ms", True))
    }
    return by_workers | {
        "operators": len(plan.graph),
        "chains": len(plan.chains),
        "pieces": sum(tasks["critical_path"].work.graph.pieces),
        "work_ms": 1e3 * chains.work,
        "widest_speed_up": chains.work / chains.critical_path(1),
        "too_wide": dict(too_wide(tasks["ios"])),
        "streams_ms": on_streams(tasks["critical_path"], costs.operator_seconds, 0.0),
        "published_ms": published,
        "published_speed_streams_ms": on_streams(tasks["critical_path"], faster, LAUNCH_SECONDS),
        "costs_us": {"piece": 1e6 * costs.piece_seconds, "wake": 1e6 * costs.wake_seconds},
        "operators_spread": costs.spread,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0, help="of rounds, for each net")
    parser.add_argument("--nets", nargs="*", choices=PUBLISHED, default=[*PUBLISHED])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = {}
    for net in options.nets:
        found = results[net] = measured(net, options.seconds)
        print(f"{net}: {found['operators']} operators, {found['chains']} chains, {found['pieces']} pieces")
        for name, verdict in found["verdicts"].items():
            print(f"  {name:14} {found['median_ms'][name]:8.2f} ms, beside sequential: {verdict['words']}")
        for key in ("predicted_ms", "predicted_whole_ms", "streams_ms", "published_speed_streams_ms"):
            for count, row in found[key].items():
                print(f"  {key:20} {count:3} {row}")
    if options.json:
        write_report(options.json, results=results)


if __name__ == "__main__":
    main()
