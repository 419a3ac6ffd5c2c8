"""Every distinct convolution of five networks: each engine, the searched choice, PyTorch, matrix products alone.

    python benchmarks/conv.py [--batch 1 8] [--seconds 0.25] [--json benchmarks/results/conv.json]

All run on one thread, in turns; times are medians. "GEMM" is the time of the matrix products that the default engine
calls for a layer, on the same blocks, without unrolling and bias: the floor of that engine. Targets, as geometric
means: the default engine at most 1.35 times its GEMM on 3x3 layers and 1.1 times on 1x1 layers, and the searched choice
never slower than the default (where it is the default itself, the ratio shows how far measurements vary). A layer's
results are compared before it is timed.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from environment import write_report

import dagexec
from dagexec import OperatorDef, Workspace
from dagexec.core.choices import choices
from dagexec.core.operator import Step
from dagexec.core.registry import create_operator
from dagexec.core.tensor import Tensor
from dagexec.ops.families.conv.choice import ENGINES, algorithm_of, default_algorithm
from dagexec.ops.families.conv.convolution import Convolution, conv_window
from dagexec.platform.arithmetic import operator_arithmetic
from dagexec.scheduler.run.blas_thread import OneBlasThread

NETWORKS = ("squeezenet", "googlenet", "resnet50", "vgg19", "mobilenet_v2")
TOLERANCE = 1e-3  # of the largest output: far more than rounding, far less than a wrong sum

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Layer:
    """A convolution by its definition and shapes; `networks` says where it occurs."""

    definition: bytes
    x: tuple[int, ...]
    weights: tuple[int, ...]
    bias: bool
    networks: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """3x3, 1x1, depthwise or other."""
        if self.weights[1] == 1 and self.x[1] > 1:
            return "depthwise"
        kernel = "x".join(map(str, self.weights[2:]))
        return kernel if kernel in ("1x1", "3x3") else "other"


def layers_of(name: str) -> list[Layer]:
    """The convolutions of a network, at batch 1."""
    with dagexec.compile(f"zoo:{name}", net_type="simple", optimize=False) as executor:
        sizes = {key: [size or 1 for size in info.shape or ()] for key, info in executor.inputs.items()}
        executor.run({key: np.zeros(shape, np.float32) for key, shape in sizes.items()})
        found = []
        for operator in executor.net().operators:
            if isinstance(operator, Convolution):
                definition = operator.definition.message()
                del definition.input[:], definition.output[:]
                definition.name = ""
                bias = len(operator.input_blobs) == 3
                definition.input.extend(["x", "filter", "bias"][: 3 if bias else 2])
                definition.output.append("y")
                x, weights = operator.x(0).shape, operator.x(1).shape
                found.append(Layer(definition.SerializeToString(deterministic=True), x, weights, bias))
    return found


def distinct_layers(names: Sequence[str]) -> list[Layer]:
    """The layers of all networks, each once."""
    found: dict[Layer, list[str]] = {}
    for name in names:
        for layer in layers_of(name):
            networks = found.setdefault(layer, [])
            if name not in networks:
                networks.append(name)
    return [replace(layer, networks=tuple(networks)) for layer, networks in found.items()]


class Contenders:
    """One layer with its data, and the ways to compute it."""

    def __init__(self, layer: Layer, batch: int, torch: Any) -> None:
        rng = np.random.default_rng(0)
        self._layer = layer
        shape = (batch, *layer.x[1:])
        fan_in = math.prod(layer.weights[1:])
        self._arrays = {
            "x": rng.standard_normal(shape, np.float32),
            "filter": rng.standard_normal(layer.weights, np.float32) * np.float32(math.sqrt(2 / fan_in)),
        }
        if layer.bias:
            self._arrays["bias"] = rng.standard_normal(layer.weights[0], np.float32)
        self._torch = torch
        self.steps: dict[str, Step] = {}
        self._reference: Array | None = None
        operator, y = self._operator("")
        self.steps["default"] = operator.bind(None).step
        self._check("default", y)
        operator, _ = self._operator("")  # arrays of its own, which are no warmer in the cache than those of the others
        problem = operator.problem(*self._problem_arrays(operator))
        products = [
            step
            for step in default_algorithm(problem, "benchmark").steps(problem, np.empty)
            if isinstance(step, partial) and step.func is np.matmul
        ]
        if products:
            self.steps["GEMM"] = lambda: [product() for product in products]
        for name in ENGINES:
            if not algorithm_of(name).refusal(problem):
                operator, y = self._operator(name)
                self.steps[name] = operator.bind(None).step
                self._check(name, y)
        operator, y = self._operator("", exhaustive_search=1)
        self.steps["searched"] = operator.bind(None).step
        self._check("searched", y)
        self.choice = list(choices.all().values())[-1]
        if torch is not None:
            self._add_torch()

    def _operator(self, engine: str, **arguments: int) -> tuple[Convolution, Array]:
        definition = OperatorDef.FromString(self._layer.definition)
        definition.engine = engine
        for name, value in arguments.items():
            definition.arg.add(name=name, i=value)
        workspace = Workspace()
        for name, array in self._arrays.items():
            workspace.feed_blob(name, array)
            if name != "x":
                workspace.get_blob(name).get(Tensor).freeze()
        operator = create_operator(definition, workspace)
        assert isinstance(operator, Convolution)
        types = operator.infer()
        assert types is not None
        return operator, operator.output(0).resize(types[0].shape, types[0].meta)

    @staticmethod
    def _problem_arrays(operator: Convolution) -> tuple[Any, ...]:
        bias = operator.x(2) if len(operator.input_blobs) == 3 else None
        return operator.x(0), operator.x(1), bias, operator.y(0), conv_window(operator.call())[1]

    def _check(self, name: str, y: Array) -> None:
        """Run once; refuse a result that differs from the default engine's, and that from sums in float64."""
        self.steps[name]()
        if self._reference is None:
            self._reference = y.copy()
        error = float(np.abs(y - self._reference).max() / np.abs(self._reference).max())
        if not error <= TOLERANCE:
            raise SystemExit(f"{self._layer}: {name} differs by {error:.1e} from the default; nothing is reported")

    def _add_torch(self) -> None:
        torch, operator = self._torch, self._operator("")[0]
        _, axes = conv_window(operator.call())
        x, weights = torch.from_numpy(self._arrays["x"]), torch.from_numpy(self._arrays["filter"])
        bias = torch.from_numpy(self._arrays["bias"]) if self._layer.bias else None
        pads = [pad for axis in reversed(axes) for pad in (axis.head, max(0, axis.covered - axis.size - axis.head))]
        stride, group = [axis.stride for axis in axes], operator.arguments.int("group", 1)
        symmetric = all(axis.head >= axis.covered - axis.size - axis.head for axis in axes)
        padding = [axis.head for axis in axes] if symmetric else 0
        conv = torch.nn.functional.conv2d

        def run() -> Any:
            image = x if symmetric else torch.nn.functional.pad(x, pads)
            return conv(image, weights, bias, stride, padding, 1, group)

        out = run().numpy()
        assert self._reference is not None
        if not np.abs(out - self._reference).max() <= TOLERANCE * np.abs(self._reference).max():
            raise SystemExit(f"{self._layer}: PyTorch differs from the default; nothing is reported")
        self.steps["torch"] = run


def times_of(steps: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """The median time of each step in milliseconds, run in turns for about `seconds` each.

    Every round begins with another step. A step that is four times as slow as the fastest has five rounds.
    """
    first = {}
    for name, step in steps.items():
        step()
        start = time.perf_counter()
        step()
        first[name] = time.perf_counter() - start
    best = min(first.values())
    rounds = max(5, min(200, int(seconds / best)))
    samples: dict[str, list[float]] = {name: [] for name in steps}
    order = list(steps.items())
    for number in range(rounds):
        order = order[1:] + order[:1]
        for name, step in order:
            if number >= 5 and first[name] > 4 * best:
                continue
            start = time.perf_counter()
            step()
            samples[name].append(time.perf_counter() - start)
    return {name: statistics.median(row) * 1e3 for name, row in samples.items()}


def geometric_mean(ratios: Sequence[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, ratios))) if ratios else float("nan")


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Geometric means of ratios by kind of layer and batch."""
    found: dict[str, Any] = {}
    for batch in sorted({row["batch"] for row in rows}):
        for kind in ("3x3", "1x1", "depthwise", "other"):
            here = [row for row in rows if row["batch"] == batch and row["kind"] == kind]
            if not here:
                continue
            some = [row["ms"] for row in here]
            entry: dict[str, Any] = {"layers": len(some)}
            for name in ("GEMM", "torch"):
                entry[f"default / {name}"] = _mean_ratio(some, "default", name)
            for name in (*ENGINES, "searched"):
                entry[f"{name} / default"] = _mean_ratio(some, name, "default")
            for name, chosen in (("the default", ["DEFAULT"]), ("another algorithm", list(ENGINES))):
                ratios = [row["ms"]["searched"] / row["ms"]["default"] for row in here if row["choice"] in chosen]
                if ratios:
                    span = {"layers": len(ratios), "least": round(min(ratios), 3), "largest": round(max(ratios), 3)}
                    entry[f"searched / default where the choice is {name}"] = span
            entry["searched / torch"] = _mean_ratio(some, "searched", "torch")
            found[f"{kind}, batch {batch}"] = entry
    return found


def _mean_ratio(some: list[dict[str, float]], one: str, other: str) -> float | None:
    ratios = [ms[one] / ms[other] for ms in some if one in ms and other in ms]
    return round(geometric_mean(ratios), 3) if ratios else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--networks", nargs="*", default=NETWORKS)
    parser.add_argument("--seconds", type=float, default=0.25, help="how long each contender runs for each layer")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    try:
        import torch  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        torch = None
    else:
        torch.set_num_threads(1)
        torch.set_grad_enabled(False)
    demand = OneBlasThread()
    rows = []
    for layer in distinct_layers(options.networks):
        for batch in options.batch:
            choices.forget()
            contenders = Contenders(layer, batch, torch)
            with operator_arithmetic():  # as in a run
                times = times_of(contenders.steps, options.seconds)
            rows.append(
                {
                    "kind": layer.kind,
                    "batch": batch,
                    "x": [batch, *layer.x[1:]],
                    "filter": list(layer.weights),
                    "networks": list(layer.networks),
                    "choice": contenders.choice,
                    "ms": {name: round(value, 4) for name, value in times.items()},
                }
            )
            shown = "  ".join(f"{name} {value:.3f}" for name, value in times.items())
            where = f"{layer.kind:9} x {rows[-1]['x']} filter {rows[-1]['filter']}"
            print(f"{where}: {shown}  choice {contenders.choice}", flush=True)
    demand.release()
    summary = summarize(rows)
    print(json.dumps(summary, indent=1))
    if options.json:
        write_report(options.json, seconds=options.seconds, summary=summary, layers=rows)


if __name__ == "__main__":
    main()
