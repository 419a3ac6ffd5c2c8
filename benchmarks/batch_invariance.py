"""What batch invariance costs: runs of a net with compile(batch_invariant=True) over runs without it, in turns.

    python benchmarks/batch_invariance.py [--batches 1 8 32] [--threads 1] [--seconds 2] [NET...]
        [--json benchmarks/results/batch_invariance.json]

Both are compiled by rules, for the batch that is run, and run in turns in one process. A ratio is that of the lower
quartiles of their times: above 1, batch invariance costs that much. Rows are kept by instruction set, threads, net and
batch, so that runs with ONEDNN_MAX_CPU_ISA=AVX2 stand beside others in one file. Target: 1.10 at batch 8 and 32.

Nets: names of the zoo; `perceptron`, ten layers of width 64; `wide`, three of width 1024; `text`, the encoder of
`shapes.py` on 32 words.
"""

from __future__ import annotations

import os

os.environ["DAGEXEC_CHOICES"] = "off"  # before anything of dagexec looks

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
import shapes
from environment import describe
from onnx import TensorProto, helper, numpy_helper

import dagexec
from dagexec.options import CompileOptions

NETS = ("lenet", "squeezenet", "resnet50", "perceptron", "wide", "text")
TARGET = 1.10
_WORDS, _LEAST = 32, 7

Feeds = dict[str, npt.NDArray[np.generic]]


def _perceptron(layers: int, width: int) -> onnx.ModelProto:
    random, last = np.random.default_rng(0), "x"
    nodes, weights = [], []
    for layer in range(layers):
        values = random.standard_normal((width, width), np.float32) / np.float32(width**0.5)
        weights.append(numpy_helper.from_array(values, f"w{layer}"))
        nodes += [helper.make_node("MatMul", [last, f"w{layer}"], [f"m{layer}"])]
        nodes += [helper.make_node("Relu", [f"m{layer}"], [f"y{layer}"])]
        last = f"y{layer}"
    given, result = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", width]) for name in ("x", last))
    graph = helper.make_graph(nodes, "perceptron", [given], [result], weights)
    return helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)])


_BUILT: dict[str, Callable[[], onnx.ModelProto]] = {
    "perceptron": partial(_perceptron, 10, 64),
    "wide": partial(_perceptron, 3, 1024),
    "text": shapes.text,
}


def net(name: str, batch: int) -> tuple[dagexec.Model, Feeds]:
    """A net, and random feeds for so many rows."""
    model = dagexec.load_model(_BUILT[name]()) if name in _BUILT else dagexec.load_model(f"zoo:{name}")
    random = np.random.default_rng(0)
    if name == "text":
        words: Feeds = {blob: random.integers(0, shapes.WORDS, (batch, _WORDS)) for blob in model.inputs}
        return model, words
    sizes = {blob: [size or 1 for size in (info.shape or ())][1:] for blob, info in model.inputs.items()}
    return model, {blob: random.standard_normal((batch, *size), np.float32) for blob, size in sizes.items()}


def measure(name: str, batch: int, threads: int, seconds: float) -> dict[str, float | int | str]:
    """The lower quartiles of both, in milliseconds."""
    model, feeds = net(name, batch)
    options = CompileOptions(
        shapes={blob: array.shape for blob, array in feeds.items()}, num_workers=1, intra_op_threads=threads, replicas=1
    )
    executors = [dagexec.compile(model, options, batch_invariant=invariant) for invariant in (True, False)]
    times: list[list[float]] = [[], []]
    for executor in executors:
        executor.run(feeds)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[0]) < _LEAST:
        for place in (0, 1) if len(times[0]) % 2 else (1, 0):
            start = time.perf_counter()
            executors[place].run(feeds)
            times[place].append(time.perf_counter() - start)
    for executor in executors:
        executor.close()
    invariant, free = (statistics.quantiles(row, n=4)[0] * 1e3 for row in times)
    return {"net": name, "batch": batch, "threads": threads, "ms": invariant, "ms_off": free, "ratio": invariant / free}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("nets", nargs="*", metavar="NET", default=NETS)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    environment = describe()
    kept = json.loads(arguments.json.read_text()) if arguments.json is not None and arguments.json.exists() else {}
    for threads in arguments.threads:
        for name in arguments.nets:
            for batch in arguments.batches:
                row = measure(name, batch, threads, arguments.seconds)
                key = f"{environment['instruction set']}, {threads} thread(s), {name}, batch {batch}"
                kept[key] = {"environment": environment, "target": TARGET} | row
                print(f"{key}: {row['ms']:.3f} ms, without {row['ms_off']:.3f}: {row['ratio']:.3f}", flush=True)
                if arguments.json is not None:
                    arguments.json.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
