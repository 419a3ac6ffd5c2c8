"""Where dagexec's time goes in one model, by kind of operator: share, GFLOP/s and GB/s on one thread.

    python benchmarks/model_profile.py MODEL.onnx FEEDS.npz [RUNS]

prints it as JSON. Floating-point operations and bytes are what the schemas of the compiled operators count: inputs are
read once and outputs written once. An operator's time is its least over the runs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from cnn_measure import better_ratio
from cnn_process import only_cores

_PROGRAM = Path(__file__)
_SECONDS, _LEAST_RUNS, _MOST_RUNS = 2.0, 5, 100
_SHOWN = 8
"""Kinds of operators that a profile names; the rest is summed."""


@dataclass
class _Kind:
    """What operators of one type and engine take together."""

    count: int = 0
    seconds: float = 0.0
    flops: int = 0
    nbytes: int = 0

    def row(self, name: str, total: float) -> dict[str, Any]:
        return {
            "operator": name,
            "count": self.count,
            "share": round(self.seconds / total, 4),
            "ms": round(1e3 * self.seconds, 4),
            "gflop_s": round(self.flops / self.seconds / 1e9, 1) if self.seconds else 0.0,
            "gb_s": round(self.nbytes / self.seconds / 1e9, 1) if self.seconds else 0.0,
        }


def worst(rows: Mapping[str, Any], way: str, count: int) -> list[str]:
    """The models whose ratio to the better peer is largest; the worst first."""
    ratios = {name: better_ratio(found[way]) for name, found in rows.items() if way in found}
    behind = {name: ratio for name, ratio in ratios.items() if ratio is not None}
    return sorted(behind, key=behind.__getitem__, reverse=True)[:count]


def profile(model: Path, feeds: Path) -> dict[str, Any]:
    """The profile of a process on one core."""
    single = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1") | {"DAGEXEC_CHOICES": "off"}
    with only_cores(1):
        found = subprocess.run(
            [sys.executable, os.fspath(_PROGRAM), os.fspath(model), os.fspath(feeds)],
            env=os.environ | single,
            stdout=subprocess.PIPE,
            check=True,
        )
    profiled: dict[str, Any] = json.loads(found.stdout)
    return profiled


def _profiled(model: Path, feeds: Mapping[str, Any]) -> dict[str, Any]:
    import dagexec
    from dagexec.compiler.compilation import compile_model
    from dagexec.core.dtypes import from_numpy
    from dagexec.core.graph import build_graph
    from dagexec.core.inference import infer_net
    from dagexec.core.schema import TensorType
    from dagexec.executor.source.loading import load_model
    from dagexec.options import CompileOptions

    shapes = {name: array.shape for name, array in feeds.items()}
    options = CompileOptions(shapes=shapes, num_workers=1, any_length=False)
    compiled = compile_model(load_model(model), options).model
    arrays = {**compiled.parameters, **feeds}
    types = {name: TensorType(array.shape, from_numpy(array.dtype)) for name, array in arrays.items()}
    costs = infer_net(build_graph(compiled.net, arrays.__contains__), types, compiled.parameters).costs
    with dagexec.compile(model, options) as executor:
        operators = executor.net().graph.operators
        seconds, total = _times(executor, feeds, len(operators))
    kinds: dict[str, _Kind] = defaultdict(_Kind)
    for definition, cost, spent in zip(operators, costs, seconds, strict=True):
        kind = kinds[f"{definition.type} ({definition.engine or 'NumPy'})"]
        kind.count += 1
        kind.seconds += spent
        if cost is not None:
            kind.flops += cost.flops
            kind.nbytes += cost.bytes_read + cost.bytes_written
    order = sorted(kinds, key=lambda name: -kinds[name].seconds)
    inside = sum(seconds) or 1.0
    return {
        "ms": round(1e3 * total, 4),
        "outside_operators": round(max(0.0, 1 - inside / total), 4),
        "operators": [kinds[name].row(name, inside) for name in order[:_SHOWN]],
        "others": round(sum(kinds[name].seconds for name in order[_SHOWN:]) / inside, 4),
    }


def _times(executor: Any, feeds: Mapping[str, Any], count: int) -> tuple[Sequence[float], float]:
    """The least seconds of each operator, and of a run that is not watched."""
    from dagexec.tracing import Trace

    executor.run(feeds)
    least, whole = [float("inf")] * count, float("inf")
    end = time.perf_counter() + _SECONDS
    for number in range(_MOST_RUNS):
        if number >= _LEAST_RUNS and time.perf_counter() > end:
            break
        start = time.perf_counter()
        executor.run(feeds)
        whole = min(whole, time.perf_counter() - start)
        trace = Trace()
        executor.run(feeds, trace=trace)
        least = list(map(min, least, trace.operator_seconds(count)))
    return least, whole


def main() -> None:
    with np.load(sys.argv[2], allow_pickle=False) as arrays:
        feeds = {name: arrays[name] for name in arrays.files}
    answer = os.dup(1)
    os.dup2(2, 1)  # what libraries print goes to standard error
    text = json.dumps(_profiled(Path(sys.argv[1]), feeds), indent=1)
    os.write(answer, text.encode() + b"\n")


if __name__ == "__main__":
    main()
