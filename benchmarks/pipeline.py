"""A pipeline of two equally wide branches with two workers, beside its models called one after another.

    python benchmarks/pipeline.py [--rounds 31] [--json benchmarks/results/pipeline.json]

A Python step prepares an image, two models of one architecture read what it gives, and another step joins what they
say. One thread an operator everywhere; `defaults` are the models one after another as `compile` runs each by itself.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from environment import write_report

import dagexec

Array = npt.NDArray[Any]
MODELS = {"zoo:squeezenet": 224, "zoo:resnet50": 224, "zoo:resnet20": 32}


def prepare(image: Array) -> Array:
    return (image.astype(np.float32) - np.float32(128)) / np.float32(64)


def join(first: Array, second: Array) -> Array:
    return (first + second) / np.float32(2)


def pipeline(model: dagexec.Model, size: int) -> dagexec.Pipeline:
    p = dagexec.Pipeline("two branches")
    image = p.python(
        "prepare", prepare, p.input("image", "uint8", (1, 3, size, size)), f"float32[1, 3, {size}, {size}]"
    )
    left, right = p.stage("left", model, image), p.stage("right", model, image)
    p.output("joined", p.python("join", join, [left, right], "float32[...]"))
    return p


def measure(name: str, size: int, rounds: int) -> dict[str, object]:
    model = dagexec.load_model(name)
    [given], [result] = model.needed_inputs(), model.outputs
    image = np.random.default_rng(0).integers(0, 256, (1, 3, size, size), np.uint8)
    one_thread: Mapping[str, Any] = {"intra_op_threads": 1}
    with (
        dagexec.compile(pipeline(model, size), net_type="dag", num_workers=2, **one_thread) as together,
        dagexec.compile(model, net_type="simple", **one_thread) as left,
        dagexec.compile(model, net_type="simple", **one_thread) as right,
        dagexec.compile(model) as alone,
    ):

        def after(first: dagexec.Executor, second: dagexec.Executor) -> Array:
            x = prepare(image)
            return join(first.run({given: x})[result], second.run({given: x})[result])

        calls: dict[str, Callable[[], Array]] = {
            "pipeline": lambda: together.run({"image": image})["joined"],
            "one after another": lambda: after(left, right),
            "one after another, defaults": lambda: after(alone, alone),
        }
        seconds: dict[str, list[float]] = {what: [] for what in calls}
        found = {what: call().tobytes() for what, call in calls.items()}
        for _ in range(rounds):
            for what, call in calls.items():
                start = time.perf_counter()
                call()
                seconds[what].append(time.perf_counter() - start)
    medians = {what: statistics.median(times) for what, times in seconds.items()}
    ratios = {what: median / medians["pipeline"] for what, median in medians.items()}
    same = {what: content == found["pipeline"] for what, content in found.items()}
    for what, median in medians.items():
        print(f"{name:16} {what:28} {median * 1e3:8.2f} ms {ratios[what]:5.2f}  same bytes: {same[what]}")
    return {"seconds": medians, "ratios": ratios, "same_bytes": same}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = {name: measure(name, size, options.rounds) for name, size in MODELS.items()}
    if options.json is not None:
        write_report(options.json, rounds=options.rounds, models=results)


if __name__ == "__main__":
    main()
