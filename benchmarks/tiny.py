"""Nets that take microseconds: dagexec.compile with no options, beside onnxruntime, in one interleaved run.

    python benchmarks/tiny.py [--rounds 31] [--json benchmarks/results/tiny.json]

LeNet; a perceptron of 10 layers of width 64; 200 element-wise operators on 64 numbers, one after another. Batch 1.
onnxruntime at its best: the fastest of one thread and all, and of `run` and a binding of inputs and outputs to memory.
dagexec as a caller uses it first: `Executor.run`, and with `out=`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
from environment import write_report
from onnx import TensorProto, helper, numpy_helper
from onnx_export import to_onnx

import dagexec
from dagexec import zoo
from dagexec.platform.processor import available_cores

Array = npt.NDArray[Any]
WIDTH = 64
TOLERANCE = 1e-4
_RUNS = 200  # in a row, of one contender in one round
_OPSET = 13


def perceptron(layers: int = 10) -> onnx.ModelProto:
    """Fully connected layers with ReLU between them, He-normal weights."""
    random = np.random.default_rng(0)
    nodes, weights, blob = [], [], "x"
    for layer in range(layers):
        values = random.standard_normal((WIDTH, WIDTH), np.float32) * np.float32(np.sqrt(2 / WIDTH))
        weights += [numpy_helper.from_array(values, f"w{layer}")]
        weights += [numpy_helper.from_array(random.standard_normal(WIDTH, np.float32) * np.float32(0.1), f"b{layer}")]
        nodes.append(helper.make_node("Gemm", [blob, f"w{layer}", f"b{layer}"], [f"sum{layer}"], transB=1))
        blob = f"sum{layer}"
        if layer < layers - 1:
            nodes.append(helper.make_node("Relu", [blob], [f"h{layer}"]))
            blob = f"h{layer}"
    return _model("perceptron", nodes, weights, blob)


def elementwise(count: int = 200) -> onnx.ModelProto:
    """Add, Relu, Mul, Tanh, again and again: one operand is a constant."""
    random = np.random.default_rng(0)
    nodes, weights, blob = [], [], "x"
    for index in range(count):
        kind = ("Add", "Relu", "Mul", "Tanh")[index % 4]
        inputs = [blob]
        if kind in ("Add", "Mul"):
            weights.append(numpy_helper.from_array(random.uniform(0.5, 1.5, WIDTH).astype(np.float32), f"c{index}"))
            inputs.append(f"c{index}")
        blob = f"b{index}"
        nodes.append(helper.make_node(kind, inputs, [blob]))
    return _model("elementwise", nodes, weights, blob)


def _model(name: str, nodes: list[onnx.NodeProto], weights: list[onnx.TensorProto], output: str) -> onnx.ModelProto:
    shape = [1, WIDTH]
    graph = helper.make_graph(
        nodes,
        name,
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info(output, TensorProto.FLOAT, shape)],
        weights,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=8)
    onnx.checker.check_model(model)
    return model


MODELS: dict[str, Callable[[], onnx.ModelProto]] = {
    "lenet": lambda: to_onnx(zoo.build("lenet", batch_size=1)),
    "perceptron": perceptron,
    "elementwise": elementwise,
}


def onnxruntime_calls(model: onnx.ModelProto, feeds: Mapping[str, Array]) -> dict[str, Callable[[], list[Array]]]:
    """A call for each way to run `model` under onnxruntime that may be the fastest."""
    calls: dict[str, Callable[[], list[Array]]] = {}
    for threads in sorted({1, available_cores()}):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
        calls[f"run, {threads} thread(s)"] = _run(session, feeds)
        calls[f"bound, {threads} thread(s)"] = _bound(session, feeds)
    return calls


def _run(session: onnxruntime.InferenceSession, feeds: Mapping[str, Array]) -> Callable[[], list[Array]]:
    given = dict(feeds)
    return lambda: session.run(None, given)


def _bound(session: onnxruntime.InferenceSession, feeds: Mapping[str, Array]) -> Callable[[], list[Array]]:
    """Inputs and outputs are in memory that onnxruntime was told before: it is given the new values by copying."""
    binding = session.io_binding()
    places = {name: array.copy() for name, array in feeds.items()}
    for name, place in places.items():
        binding.bind_cpu_input(name, place)
    results = [np.empty(output.shape, np.float32) for output in session.get_outputs()]
    for output, result in zip(session.get_outputs(), results, strict=True):
        binding.bind_output(output.name, "cpu", 0, np.float32, result.shape, result.ctypes.data)

    def call() -> list[Array]:
        for name, place in places.items():
            place[...] = feeds[name]
        session.run_with_iobinding(binding)
        return results

    return call


def dagexec_calls(executor: dagexec.Executor, feeds: Mapping[str, Array]) -> dict[str, Callable[[], list[Array]]]:
    """`run` as it is called first, and into arrays of the caller's."""
    given = dict(feeds)
    out = {name: np.empty_like(array) for name, array in executor.run(given).items()}
    return {
        "run": lambda: list(executor.run(given).values()),
        "run, out=": lambda: list(executor.run(given, out=out).values()),
    }


def measure(name: str, rounds: int) -> dict[str, object]:
    """Microseconds of each way to run the model, and the ratio of the best of both sides in the same rounds."""
    model = MODELS[name]()
    [value] = model.graph.input
    shape = [axis.dim_value for axis in value.type.tensor_type.shape.dim]
    feeds = {value.name: np.random.default_rng(1).standard_normal(shape, np.float32)}
    start = time.perf_counter()
    with dagexec.compile(model, warm_start=True) as executor:
        compile_seconds = time.perf_counter() - start
        ours = dagexec_calls(executor, feeds)
        theirs = onnxruntime_calls(model, feeds)
        [expected] = next(iter(theirs.values()))()
        for call in (*ours.values(), *theirs.values()):
            [found] = call()
            np.testing.assert_allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE)
        difference = float(np.abs(ours["run"]()[0] - expected).max())
        seconds = _interleaved({("dagexec", how): call for how, call in ours.items()}
                               | {("onnxruntime", how): call for how, call in theirs.items()}, rounds)  # fmt: skip
        chosen = {"net_type": executor.net_type, "workers": executor.num_workers, "operators": len(executor.graph)}
    medians = {key: statistics.median(times) for key, times in seconds.items()}
    best = {side: min((key for key in medians if key[0] == side), key=medians.__getitem__) for side in SIDES}
    ratios = [mine / other for mine, other in zip(seconds["dagexec", "run"], seconds[best["onnxruntime"]], strict=True)]
    return {
        "microseconds": {side: {how: medians[s, how] * 1e6 for s, how in medians if s == side} for side in SIDES},
        "best": {side: key[1] for side, key in best.items()},
        "ratio": statistics.median(ratios),
        "largest_difference": difference,
        "chosen": chosen,
        "compile_seconds": compile_seconds,
    }


SIDES = ("dagexec", "onnxruntime")


def _interleaved(
    calls: Mapping[tuple[str, str], Callable[[], object]], rounds: int
) -> dict[tuple[str, str], list[float]]:
    """The median seconds of a call in each round."""
    seconds: dict[tuple[str, str], list[float]] = {key: [] for key in calls}
    keys = list(calls)
    for number in range(rounds):
        first = number % len(keys)
        for key in (*keys[first:], *keys[:first]):
            call = calls[key]
            times = []
            for _ in range(_RUNS):
                start = time.perf_counter()
                call()
                times.append(time.perf_counter() - start)
            seconds[key].append(statistics.median(times))
    return seconds


def main() -> None:
    """Measure all, print a table, and write what was found to a file if one is given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--models", nargs="*", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = {name: measure(name, options.rounds) for name in options.models}
    for name, result in results.items():
        print(f"{name}: {result['ratio']:.2f} of onnxruntime's time; {json.dumps(result['chosen'])}")
        for side, times in result["microseconds"].items():  # type: ignore[attr-defined]
            print("  ", side, {how: round(value, 1) for how, value in times.items()})
    if options.json is not None:
        write_report(options.json, results=results)


if __name__ == "__main__":
    main()
