"""What two workers give a net of Python functions, with the interpreter lock and without it.

    python3.14t benchmarks/free_threading.py [--rounds 5] [--json benchmarks/results/free_threading.json]

A pipeline of independent stages in plain Python, each of which holds the lock all the time, under SimpleNet and under
DAGNet with two workers, one after the other in each round. The same Python runs it with the lock (PYTHON_GIL=1) and
without, in processes that alternate; one that was built with the lock only measures that.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from environment import write_report

import dagexec

Array = npt.NDArray[Any]
STAGES, BYTES, RUNS = 8, 40_000, 15
LOCKS = {"with": "1", "without": "0"}


def hashed(text: Array) -> Array:
    """A polynomial hash of the bytes, in plain Python."""
    value = 0
    for byte in text.tobytes():
        value = (value * 31 + byte) % 2147483647
    return np.array([value], np.int64)


def pipeline() -> dagexec.Pipeline:
    p = dagexec.Pipeline("hashes")
    for number in range(STAGES):
        text = p.input(f"text{number}", "uint8", (BYTES,))
        p.output(f"hash{number}", p.python(f"hashed{number}", hashed, text, "int64[1]"))
    return p


def measure() -> dict[str, float]:
    """Median milliseconds of a run under each net."""
    random = np.random.default_rng(0)
    feeds = {f"text{number}": random.integers(0, 256, BYTES, np.uint8) for number in range(STAGES)}
    expected = {f"hash{number}": hashed(text) for number, text in enumerate(feeds.values())}
    nets = {"simple": 1, "dag": 2}
    times: dict[str, list[float]] = {net: [] for net in nets}
    executors = {net: dagexec.compile(pipeline(), net_type=net, num_workers=count) for net, count in nets.items()}
    for _ in range(RUNS):
        for net, executor in executors.items():
            start = time.perf_counter()
            found = executor.run(feeds)
            times[net].append(time.perf_counter() - start)
            if any(found[name] != value for name, value in expected.items()):
                raise SystemExit(f"{net}: a wrong hash")
    for executor in executors.values():
        executor.close()
    return {net: statistics.median(seconds) * 1e3 for net, seconds in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure()))
        return
    locks = LOCKS if "t" in getattr(sys, "abiflags", "") else {"with": ""}
    rounds: dict[str, list[dict[str, float]]] = {lock: [] for lock in locks}
    for _ in range(options.rounds):
        for lock, value in locks.items():
            environment = os.environ | ({"PYTHON_GIL": value} if value else {})
            command = [sys.executable, __file__, "--child"]
            child = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
            rounds[lock].append(json.loads(child.stdout))
    results = {}
    for lock, found in rounds.items():
        simple, dag = (statistics.median(times[net] for times in found) for net in ("simple", "dag"))
        speed_up = statistics.median(times["simple"] / times["dag"] for times in found)
        results[lock] = {"simple_ms": simple, "dag_ms": dag, "speed_up": speed_up}
        print(f"{lock:8} the lock: simple {simple:7.2f} ms, dag with 2 workers {dag:7.2f} ms, speed-up {speed_up:.2f}")
    if options.json:
        write_report(options.json, rounds=options.rounds, python=sys.version, results=results)


if __name__ == "__main__":
    main()
