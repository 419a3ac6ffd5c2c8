"""What an iteration of a Loop costs beyond the operators of its body, and what onnxruntime takes; interleaved.

    python benchmarks/loop.py [--iterations 2000] [--repeat 31] [--json benchmarks/results/loop.json]

The body adds to a vector of 16 floats, which is carried and, in half of the rows, stacked. Its operators alone are a
plain Python loop over the same steps. The target is 5 us.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from environment import describe, write_report
from onnx import parser as onnx_parser

import dagexec
from dagexec.scheduler.nets.body import BodyNet

OPERATORS = (1, 4, 16)
NETS: tuple[tuple[str, int], ...] = (("simple", 1), ("dag", 1), ("dag", 2))


def model(operators: int, stacked: bool) -> onnx.ModelProto:
    """A loop whose body is a chain of that many additions, beside the copy of its condition."""
    chain = "\n".join(f"v{index + 1} = Add (v{index}, one)" for index in range(operators))
    more, row = (", all", f"row = Identity (v{operators})") if stacked else ("", "")
    results = f"bool d, float[16] v{operators}" + (", float[16] row" if stacked else "")
    return onnx_parser.parse_model(f"""
    <ir_version: 8, opset_import: ["" : 18]>
    loop (int64 n, float[16] x) => (float[16] y{", float[k, 16] all" if stacked else ""})
    <float[16] one = {{{", ".join(["1"] * 16)}}}> {{
        y{more} = Loop (n, , x) <body = body (int64 i, bool c, float[16] v0) => ({results}) {{
            {chain}
            {row}
            d = Identity (c)
        }}>
    }}""")


def measure(operators: int, stacked: bool, iterations: int, repeat: int) -> dict[str, float]:
    """Microseconds an iteration, medians."""
    proto = model(operators, stacked)
    feeds: dict[str, Any] = {"n": np.array(iterations), "x": np.zeros(16, np.float32)}
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(proto.SerializeToString(), settings)
    executors = {
        f"{kind} {workers}": dagexec.compile(proto, net_type=kind, num_workers=workers, tuning_seconds=0)
        for kind, workers in NETS
    }
    [body] = executors["simple 1"].net().operators[0].bodies.values()
    assert isinstance(body, BodyNet)
    runs: dict[str, Callable[[], object]] = {name: partial(executor.run, feeds) for name, executor in executors.items()}
    expected = session.run(None, feeds)[0]
    for executor in executors.values():
        np.testing.assert_array_equal(executor.run(feeds)["y"], expected)
    steps = body.prepared().in_order

    def plain_loop() -> None:
        for _ in range(iterations):
            for step in steps:
                step()

    runs |= {"operators": plain_loop, "onnxruntime": lambda: session.run(None, feeds)}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeat):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    for executor in executors.values():
        executor.close()
    return {name: statistics.median(times) / iterations * 1e6 for name, times in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=2000)
    parser.add_argument("--repeat", type=int, default=31)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print(describe()["processor"], describe()["instruction set"])
    results = {}
    for operators in OPERATORS:
        for stacked in (False, True):
            what = f"{operators} additions" + (", stacked" if stacked else "")
            found = results[what] = measure(operators, stacked, options.iterations, options.repeat)
            beyond = ", ".join(f"{kind} {workers}: {found[f'{kind} {workers}'] - found['operators']:.2f}"
                               for kind, workers in NETS)  # fmt: skip
            print(
                f"{what:22} operators {found['operators']:6.2f} us; beyond them {beyond} us; "
                f"onnxruntime {found['onnxruntime']:.2f} us"
            )
    if options.json:
        write_report(options.json, iterations=options.iterations, repeat=options.repeat, microseconds=results)


if __name__ == "__main__":
    main()
