"""Scheduler cost: microseconds per operator on 10,000 NoOps in four shapes, for every net type, interleaved.

    python benchmarks/scheduler_cost.py [--operators 10000] [--repeat 21] [--json
    benchmarks/results/scheduler_cost.json]

Beside the nets: a plain Python loop over the same steps, the floor of anything written in Python. Those on `sim` launch
every operator on a stream of a simulated device without latencies, whose threads do the work beside the workers.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from environment import write_report

import dagexec
from dagexec.core.device import Device
from dagexec.core.proto import NetDef
from dagexec.scheduler.nets.net import BaseNet


def chain(count: int) -> list[list[int]]:
    return [[index - 1] if index else [] for index in range(count)]


def independent(count: int) -> list[list[int]]:
    return [[] for _ in range(count)]


def layered(count: int) -> list[list[int]]:
    """Layers of sqrt(count), each operator with two parents in the layer before."""
    width = int(count**0.5)
    rng = random.Random(0)
    first: list[list[int]] = [[] for _ in range(width)]
    return first + [
        [layer * width - width + parent for parent in rng.sample(range(width), 2)]
        for layer in range(1, count // width)
        for _ in range(width)
    ]


def random_graph(count: int) -> list[list[int]]:
    """One or two parents among the 200 operators before."""
    rng = random.Random(0)
    return [
        sorted({rng.randrange(max(0, index - 200), index) for _ in range(rng.choice((1, 2)))}) if index else []
        for index in range(count)
    ]


SHAPES: dict[str, Callable[[int], list[list[int]]]] = {
    "chain": chain,
    "independent": independent,
    "layered": layered,
    "random": random_graph,
}


RUNTIMES = (
    ("simple", 1, "cpu"),
    ("dag", 1, "cpu"),
    ("dag", 2, "cpu"),
    ("async_dag", 1, "cpu"),
    ("async_dag", 2, "cpu"),
    ("async_dag", 1, "sim:0"),
    ("async_dag", 2, "sim:0"),
)


def noop_net(name: str, parents: list[list[int]], device: str = "cpu") -> NetDef:
    net = NetDef(name=name, device_option=Device.parse(device).to_option())
    for index, row in enumerate(parents):
        net.op.add(type="NoOp", input=[f"b{parent}" for parent in row], output=[f"b{index}"])
    return net


def measure(operators: int, repeat: int) -> dict[str, dict[str, dict[str, float]]]:
    results: dict[str, dict[str, dict[str, float]]] = {}
    for shape, parents_of in SHAPES.items():
        parents = parents_of(operators)
        count = len(parents)
        nets: dict[str, BaseNet] = {}
        for net_type, workers, device in RUNTIMES:
            net = dagexec.Workspace().create_net(noop_net(shape, parents, device), net_type, workers)
            assert isinstance(net, BaseNet)
            net.run()
            nets[f"{net_type} {workers}" + ("" if device == "cpu" else " sim")] = net
        steps = nets["simple 1"].prepared().in_order

        def plain_loop(steps: tuple[Callable[[], object], ...] = steps) -> None:
            for step in steps:
                step()

        runs: dict[str, Callable[[], None]] = {"plain loop": plain_loop} | {name: net.run for name, net in nets.items()}
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(repeat):
            for name, run in runs.items():
                start = time.perf_counter()
                run()
                seconds[name].append(time.perf_counter() - start)
        results[shape] = {
            name: {
                "median_us": statistics.median(times) / count * 1e6,
                "least_us": min(times) / count * 1e6,
            }
            for name, times in seconds.items()
        }
        for net in nets.values():
            net.close()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--operators", type=int, default=10_000)
    parser.add_argument("--repeat", type=int, default=21)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = measure(options.operators, options.repeat)
    for shape, rows in results.items():
        print(shape)
        for name, row in rows.items():
            print(f"  {name:15} median {row['median_us']:.3f} us   least {row['least_us']:.3f} us per operator")
    if options.json:
        write_report(options.json, operators=options.operators, results=results)


if __name__ == "__main__":
    main()
