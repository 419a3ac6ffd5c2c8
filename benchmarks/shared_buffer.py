"""Memory and time of private column buffers against one shared buffer, on googlenet under `dag`.

    python benchmarks/shared_buffer.py [--repeat 40] [--json benchmarks/results/shared_buffer.json]

Peak memory is the most that the process ever had resident, each mode in a process of its own; the baseline is the same
process with the weights loaded and nothing prepared. Working memory is what the net holds beside weights and outputs.
Times are medians of runs in turns in one process, and the results are compared bit by bit.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
from environment import write_report

import dagexec
from dagexec.executor.executor import Executor

MODES: dict[str, dict[str, Any]] = {
    "private": {},
    "shared": {"shared_buffer": 1},
    "private, 1 MiB limit": {"ws_nbytes_limit": 1 << 20},
    "shared, 1 MiB limit": {"shared_buffer": 1, "ws_nbytes_limit": 1 << 20},
}


def compiled(model: str, mode: str, workers: int = 2) -> Executor:
    return dagexec.compile(model, net_type="dag", num_workers=workers, operator_arguments=MODES[mode], optimize=False)


def feeds_of(executor: Executor) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    sizes = {name: [size or 1 for size in info.shape or ()] for name, info in executor.inputs.items()}
    return {name: rng.standard_normal(shape, np.float32) for name, shape in sizes.items()}


def peak_mebibytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure_memory(model: str, mode: str) -> dict[str, float]:
    """Run once in this process: peak before and after, and the working memory of the convolutions."""
    with compiled(model, mode) as executor:
        before = peak_mebibytes()
        feeds = feeds_of(executor)
        for _ in range(3):
            executor.run(feeds)
        peak = peak_mebibytes()
    tracemalloc.start()
    with compiled(model, mode) as executor:
        executor.run(feeds)
        operators = executor.net().operators
        outputs = sum(blob.tensor().nbytes for operator in operators for blob in operator.output_blobs)
        parameters = sum(array.nbytes for array in _parameters(executor))
        held = tracemalloc.get_traced_memory()[0]
    return {
        "peak MiB": round(peak, 1),
        "before the first run MiB": round(before, 1),
        "working memory MiB": round((held - outputs - parameters) / (1 << 20), 2),
    }


def _parameters(executor: Executor) -> list[Any]:
    arrays = {}
    for operator in executor.net().operators:
        for index, blob in enumerate(operator.input_blobs):
            tensor = blob.tensor()
            if tensor.constant is not None:
                arrays[id(tensor)] = operator.x(index)
    return list(arrays.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="zoo:googlenet")
    parser.add_argument("--repeat", type=int, default=40)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--memory-of", choices=MODES, help="print the memory of one mode, as JSON")
    options = parser.parse_args()
    if options.memory_of:
        print(json.dumps(measure_memory(options.model, options.memory_of)))
        return
    results: dict[str, dict[str, float]] = {}
    for mode in MODES:
        command = [sys.executable, __file__, "--model", options.model, "--memory-of", mode]
        results[mode] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    for workers in (1, 2):
        executors = {mode: compiled(options.model, mode, workers) for mode in MODES}
        feeds = feeds_of(executors["private"])
        expected = {mode: executor.run(feeds) for mode, executor in executors.items()}
        for one, other in (("private", "shared"), ("private, 1 MiB limit", "shared, 1 MiB limit")):
            if any(expected[one][name].tobytes() != expected[other][name].tobytes() for name in expected[one]):
                raise SystemExit(f"{other} gives other bytes than {one}; nothing is reported")
        samples: dict[str, list[float]] = {mode: [] for mode in MODES}
        for _ in range(options.repeat):
            for mode, executor in executors.items():
                start = time.perf_counter()
                executor.run(feeds)
                samples[mode].append(time.perf_counter() - start)
        for mode, executor in executors.items():
            results[mode][f"ms, {workers} worker(s)"] = round(statistics.median(samples[mode]) * 1e3, 2)
            executor.close()
    for mode, row in results.items():
        print(f"{mode:22} " + "  ".join(f"{name} {value}" for name, value in row.items()))
    if options.json:
        write_report(options.json, model=options.model, repeat=options.repeat, results=results)


if __name__ == "__main__":
    main()
