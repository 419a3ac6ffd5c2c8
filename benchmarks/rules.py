"""How good choosing by rules is: compile() without measuring beside compile() that has measured, for nets of the zoo.

    python benchmarks/rules.py [--seconds 20] [--runs-seconds 3] [--json benchmarks/results/rules.json] [MODEL...]

Each net is compiled by rules with an empty file of choices, then with `--seconds` for tuning, and both run in turns in
one process; a ratio is that of the lower quartiles. Results are kept by instruction set and number of cores, so that
runs with ONEDNN_MAX_CPU_ISA and taskset stand beside others in one file. Target: 1.10 in the geometric mean, none above
1.25.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ["DAGEXEC_CHOICES"] = str(Path(tempfile.mkdtemp()) / "choices.json")  # before anything of dagexec looks

import numpy as np
from environment import describe

import dagexec
from dagexec.binding.parameters import initialized
from dagexec.core.choices import choices
from dagexec.executor.source.loading import load_model

MODELS = (
    "lenet",
    "squeezenet",
    "googlenet",
    "resnet50",
    "mobilenet_v2",
    "densenet121",
    "vgg19",
    "inception_v3",
    "nasnet_a",
    "squeezenet_towers",
)
TARGET_MEAN, TARGET_EACH = 1.10, 1.25


def measure(source: str, seconds: float, runs_seconds: float) -> dict[str, Any]:
    """Milliseconds of a run by rules and tuned, seconds of compiling each, and the ratio."""
    model = initialized(load_model(source))
    random = np.random.default_rng(0)
    feeds = {
        name: random.standard_normal(tuple(size or 1 for size in info.shape or ()), np.float32)
        for name, info in model.inputs.items()
    }
    choices.forget()
    start = time.perf_counter()
    with dagexec.compile(model, tuning_seconds=0) as ruled:
        ruled_seconds = time.perf_counter() - start
        ruled.run(feeds)
        first_seconds = time.perf_counter() - start
        start = time.perf_counter()
        with dagexec.compile(model, tuning_seconds=seconds) as tuned:
            tuned_seconds = time.perf_counter() - start
            tuned.run(feeds)
            times: dict[Any, list[float]] = {ruled: [], tuned: []}
            end = time.perf_counter() + runs_seconds
            while time.perf_counter() < end or len(times[tuned]) < 7:
                for executor, row in times.items():
                    start = time.perf_counter()
                    executor.run(feeds)
                    row.append(time.perf_counter() - start)
    by_rule, by_measure = (statistics.quantiles(row, n=4)[0] * 1e3 for row in times.values())
    return {
        "model": source,
        "ms_by_rules": by_rule,
        "ms_tuned": by_measure,
        "ratio": by_rule / by_measure,
        "compile_seconds_by_rules": ruled_seconds,
        "first_result_seconds_by_rules": first_seconds,
        "compile_seconds_tuned": tuned_seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"by default {', '.join(MODELS)} of the zoo")
    parser.add_argument("--seconds", type=float, default=20.0, help="for tuning")
    parser.add_argument("--runs-seconds", type=float, default=3.0, help="for runs of each net")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    environment = describe()
    key = f"{environment.get('instruction set', 'NumPy')}, {environment['cores']} core(s)"
    kept = json.loads(arguments.json.read_text()) if arguments.json is not None and arguments.json.exists() else {}
    rows = {row["model"]: row for row in kept.get(key, {}).get("rows", ())}
    for source in arguments.models or [f"zoo:{name}" for name in MODELS]:
        row = rows[source] = measure(source, arguments.seconds, arguments.runs_seconds)
        print(
            f"{key}, {source}: {row['ms_by_rules']:.2f} ms by rules, {row['ms_tuned']:.2f} tuned in "
            f"{row['compile_seconds_tuned']:.1f} s: {row['ratio']:.3f}; compiled by rules in "
            f"{row['compile_seconds_by_rules']:.2f} s",
            flush=True,
        )
        if arguments.json is not None:
            ratios = [one["ratio"] for one in rows.values()]
            kept[key] = {
                "environment": environment,
                "geometric_mean": statistics.geometric_mean(ratios),
                "worst": max(ratios),
                "targets": [TARGET_MEAN, TARGET_EACH],
                "rows": list(rows.values()),
            }
            arguments.json.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
