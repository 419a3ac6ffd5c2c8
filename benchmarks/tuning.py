"""How good the choice of net type and workers is: compile() without options beside fixed settings.

    python benchmarks/tuning.py [--rounds 40] [--seconds 10] [--json benchmarks/results/tuning.json] [MODEL...]

Three nets made for it - a wide graph of many small operators, a chain of large convolutions, and a mix of both - and
three of the zoo, batch 1. The fixed settings are one thread, and chains side by side on all cores with one thread for
each operator. All run in turns in one process; ratios are of medians. Target: at most 1.03 of the best fixed setting.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from environment import write_report

import dagexec
from dagexec.binding.parameters import initialized
from dagexec.building.model_builder import ModelBuilder
from dagexec.compiler.compilation import compile_model
from dagexec.core.model import Model
from dagexec.executor.source.loading import load_model
from dagexec.options import CompileOptions
from dagexec.platform.processor import available_cores

TARGET = 1.03


def wide() -> Model:
    """8 branches of 12 convolutions on images of 7 x 7, each too small to gain much from a second thread."""
    builder = ModelBuilder("wide")
    x = builder.add_input("data", (1, 32, 7, 7))
    return builder.model([builder.sum(_branches(builder, x, "branch", 8, 12), "total")])


def chain() -> Model:
    """6 convolutions of 128 channels on images of 56 x 56."""
    builder = ModelBuilder("chain")
    x = builder.add_input("data", (1, 128, 56, 56))
    return builder.model([_large(builder, x, "large", 6, 128)])


def mix() -> Model:
    """Large convolutions, 8 branches of small ones, and large ones again."""
    builder = ModelBuilder("mix")
    x = builder.add_input("data", (1, 64, 56, 56))
    x = _large(builder, x, "first", 2, 64)
    small = builder.conv(builder.max_pool(x, "pooled", kernel=8, stride=8), "small", 64, 32, kernel=1)
    total = builder.sum(_branches(builder, small, "branch", 8, 24), "total")
    total = builder.conv(total, "wide", 32, 64, kernel=1)
    grown = builder.net.op.add(type="ResizeNearest", input=[total], output=["grown"])
    for name in ("height_scale", "width_scale"):
        grown.arg.add(name=name, f=8.0)
    return builder.model([_large(builder, builder.sum(["grown", x], "both"), "last", 2, 64)])


def _branches(builder: ModelBuilder, x: str, name: str, count: int, depth: int) -> list[str]:
    ends = []
    for branch in range(count):
        y = x
        for layer in range(depth):
            y = builder.conv(y, f"{name}{branch}_{layer}", 32, 32, kernel=3, pad=1)
            y = builder.relu(y, y)
        ends.append(y)
    return ends


def _large(builder: ModelBuilder, x: str, name: str, depth: int, channels: int) -> str:
    for layer in range(depth):
        x = builder.conv(x, f"{name}{layer}", channels, channels, kernel=3, pad=1)
        x = builder.relu(x, x)
    return x


MADE: dict[str, Callable[[], Model]] = {"wide": wide, "chain": chain, "mix": mix}
MODELS = (*MADE, "zoo:googlenet", "zoo:resnet50", "zoo:mobilenet_v2")


def settings() -> dict[str, dict[str, Any]]:
    """What is fixed, by name."""
    cores = available_cores()
    return {
        "chosen": {},
        "one thread": {"net_type": "simple", "num_workers": 1},
        "chains": {"net_type": "dag", "num_workers": cores, "intra_op_threads": 1},
    }


def measure(source: str, rounds: int, seconds: float) -> dict[str, Any]:
    """Medians in milliseconds of each setting, and the ratio of the chosen one to the best of the others."""
    model = initialized(MADE[source]() if source in MADE else load_model(source))
    random = np.random.default_rng(0)
    feeds = {
        name: random.standard_normal(tuple(size or 1 for size in info.shape or ()), np.float32)
        for name, info in model.inputs.items()
    }
    report = compile_model(model, CompileOptions(tuning_seconds=seconds)).report
    assert report is not None
    schedule = report.schedule
    assert schedule is not None
    times: dict[str, list[float]] = {name: [] for name in settings()}
    with ExitStack() as stack:
        executors = {
            name: stack.enter_context(dagexec.compile(model, tuning_seconds=seconds, **fixed))
            for name, fixed in settings().items()
        }
        for executor in executors.values():
            executor.run(feeds)
        for _ in range(rounds):
            for name, executor in executors.items():
                executor.run(feeds)  # the first after another's is slower: its weights and threads are cold
                start = time.perf_counter()
                executor.run(feeds)
                times[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(row) * 1e3 for name, row in times.items()}
    best = min((name for name in medians if name != "chosen"), key=medians.__getitem__)
    ratios = [chosen / other for chosen, other in zip(times["chosen"], times[best], strict=True)]
    return {
        "model": source,
        "net_type": schedule.net_type,
        "workers": schedule.workers,
        "layout": report.layout,
        "median_ms": medians,
        "best_fixed": best,
        "ratio": medians["chosen"] / medians[best],
        "median_of_ratios": statistics.median(ratios),
    }


def summary(row: dict[str, Any]) -> str:
    """A row in one line."""
    medians = ", ".join(f"{name} {median:.2f}" for name, median in row["median_ms"].items())
    chosen = f"{row['model']}: {row['net_type']}, {row['layout']}"
    ratios = f"{row['ratio']:.3f} ({row['median_of_ratios']:.3f} by round)"
    return f"{chosen}; ms: {medians}; to {row['best_fixed']}: {ratios}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"by default {', '.join(MODELS)}")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=10.0, help="for tuning each setting")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    for source in arguments.models or MODELS:
        row = measure(source, arguments.rounds, arguments.seconds)
        rows.append(row)
        print(summary(row))
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        write_report(arguments.json, target=TARGET, rounds=arguments.rounds, rows=rows)


if __name__ == "__main__":
    main()
