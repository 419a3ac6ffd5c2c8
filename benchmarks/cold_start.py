"""What the first result costs: loading, untuned compilation and the first run, in new processes with an empty cache.

    python benchmarks/cold_start.py [--repeat 3] [--json benchmarks/results/cold_start.json] [MODEL...]

The zoo's networks at batch 1, a chain of 20,000 small operators, and a Sum of 2,000 inputs. Each is loaded as an ONNX
file by dagexec and by onnxruntime, and the zoo's also by name, where loading makes their random weights. Every time is
the median over processes, by the clock and of the processor; per operator: compilation (onnxruntime: creating the
session) and the first run, less a later run, over the operators of the ONNX file. Results are compared. With MODELs
named, the other rows of the JSON file stay as they are.

A fresh process is all of one that does nothing but load such a file and run it once, from its start to its end: what
the system counts of it, imports and NumPy's included; beside OpenVINO as well, and one that imports NumPy. One of each
kind goes first, uncounted, so that bytecode is written and files are in the cache of the disk.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
from environment import write_report

Array = npt.NDArray[Any]
T = TypeVar("T")
TOLERANCE = 1e-3  # of the largest value
CHAIN, WIDE_SUM = "chain-20000", "sum-2000"
ZOO = (
    "densenet121", "googlenet", "inception_v3", "lenet", "mobilenet_v2", "nasnet_a", "resnet50", "squeezenet",
    "squeezenet_towers", "vgg19",
)  # fmt: skip
NAMES = (*ZOO, CHAIN, WIDE_SUM)
CONTENDERS = ("dagexec", "by name", "onnxruntime")

FRESH = {
    "numpy": "import numpy",
    "dagexec": """
import sys, numpy, dagexec
with dagexec.compile(sys.argv[1], tuning_seconds=0) as executor:
    shapes = {name: [size or 1 for size in info.shape] for name, info in executor.model.inputs.items()}
    executor.run({name: numpy.ones(shape, numpy.float32) for name, shape in shapes.items()})
""",
    "onnxruntime": """
import sys, numpy, onnxruntime
session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
session.run(None, {value.name: numpy.ones(value.shape, numpy.float32) for value in session.get_inputs()})
""",
    "openvino": """
import sys, numpy, openvino
compiled = openvino.Core().compile_model(sys.argv[1], "CPU", {"PERFORMANCE_HINT": "LATENCY"})
feeds = {value.any_name: numpy.ones(value.shape, numpy.float32) for value in compiled.inputs}
compiled.create_infer_request().infer(feeds)
""",
}
"""Programs of processes that load a file and run it once."""


class Clock:
    """Seconds of each stage, by the clock and of the processor (of all threads)."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.processor: dict[str, float] = {}

    def timed(self, stage: str, call: Callable[[], T]) -> T:
        """The result of `call`."""
        start, computed = time.perf_counter(), time.process_time()
        result = call()
        self.seconds[stage] = time.perf_counter() - start
        self.processor[stage] = time.process_time() - computed
        return result


# --- in a process of its own


def run_dagexec(source: str) -> tuple[Clock, dict[str, float], list[Array]]:
    """The times, those of the stages of compilation, and the outputs."""
    import dagexec
    from dagexec.compiler.compilation import compile_model
    from dagexec.compiler.compiled import CompilationReport
    from dagexec.executor.source.loading import load_model
    from dagexec.ops.engines.onednn.binding import library

    library()  # loaded once a process, whatever it runs
    clock = Clock()
    model = clock.timed("load", lambda: load_model(source))
    feeds = {name: feed(tuple(size or 1 for size in info.shape or ())) for name, info in model.inputs.items()}
    reports: list[CompilationReport] = []

    def noting(*arguments: Any, **options: Any) -> Any:
        compiled = compile_model(*arguments, **options)
        assert compiled.report is not None
        reports.append(compiled.report)
        return compiled

    with patch("dagexec.compiler.compilation.compile_model", noting):
        executor = clock.timed("compile", lambda: dagexec.compile(model, tuning_seconds=0))
    outputs = clock.timed("first run", lambda: executor.run(feeds))
    clock.timed("later run", lambda: executor.run(feeds))
    executor.close()
    return clock, dict(reports[0].seconds) if reports else {}, list(outputs.values())


def run_onnxruntime(source: str) -> tuple[Clock, dict[str, float], list[Array]]:
    """Likewise; creating the session loads the file."""
    import onnxruntime

    clock = Clock()
    providers = ["CPUExecutionProvider"]
    session = clock.timed("compile", lambda: onnxruntime.InferenceSession(source, providers=providers))
    feeds = {value.name: feed(tuple(value.shape)) for value in session.get_inputs()}
    outputs = clock.timed("first run", lambda: session.run(None, feeds))
    clock.timed("later run", lambda: session.run(None, feeds))
    return clock, {}, outputs


def feed(shape: tuple[int, ...]) -> Array:
    """The same values in every process."""
    return np.random.default_rng(0).standard_normal(shape, np.float32)


def child(contender: str, source: str, outputs: str) -> None:
    """Measure once: the times as JSON on the standard output, the results in the file `outputs`."""
    clock, stages, results = (run_onnxruntime if contender == "onnxruntime" else run_dagexec)(source)
    with open(outputs, "wb") as file:
        np.savez(file, *results)
    print(json.dumps({"seconds": clock.seconds, "processor": clock.processor, "stages": stages}))


# --- in the process that asks


def measure(name: str, folder: Path, repeat: int) -> dict[str, Any]:
    """The row of one model. Raises ValueError when the contenders' results differ."""
    file = folder / "model.onnx"
    operators, nbytes = export(name, file)
    row: dict[str, Any] = {"operators": operators, "weights_mib": round(nbytes / 2**20, 1)}
    results: dict[str, list[Array]] = {}
    contenders = CONTENDERS if name in ZOO else (CONTENDERS[0], CONTENDERS[-1])
    found: dict[str, list[Mapping[str, Mapping[str, float]]]] = {contender: [] for contender in contenders}
    for _ in range(repeat):
        for contender in contenders:
            source = f"zoo:{name}" if contender == "by name" else os.fspath(file)
            found[contender].append(in_process(contender, source, folder / "outputs.npz"))
            with np.load(folder / "outputs.npz") as outputs:
                results[contender] = [outputs[key] for key in outputs.files]
    for contender in contenders[:-1]:
        check(name, results[contender], results["onnxruntime"])
    for contender, runs in found.items():
        row[contender] = summary(runs, operators)
    row["fresh process"] = fresh_processes(file, repeat)
    return row


def fresh_processes(file: Path, repeat: int) -> dict[str, dict[str, float]]:
    """Seconds that each program of FRESH takes, by the clock and of the processor: medians of processes in turns."""
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in FRESH}
    environment = os.environ | {"DAGEXEC_CHOICES": "off"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    for counted in [False] + [True] * repeat:
        for name, program in FRESH.items():
            begin = time.perf_counter()
            child = os.posix_spawn(sys.executable, [sys.executable, "-c", program, os.fspath(file)], environment)
            _, status, used = os.wait4(child, 0)
            if status != 0:
                raise RuntimeError(f"{name}: a fresh process ended with status {os.waitstatus_to_exitcode(status)}")
            if counted:
                taken[name].append((time.perf_counter() - begin, used.ru_utime + used.ru_stime))
    kinds = ("seconds", "processor")
    return {
        name: {kind: round(statistics.median(row), 4) for kind, row in zip(kinds, zip(*rows, strict=True), strict=True)}
        for name, rows in taken.items()
    }


def in_process(contender: str, source: str, outputs: Path) -> Mapping[str, Mapping[str, float]]:
    """What a new process measures, which finds no stored choices."""
    environment = os.environ | {"DAGEXEC_CHOICES": "off"}
    command = [sys.executable, __file__, "--child", contender, source, os.fspath(outputs)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
    measured: Mapping[str, Mapping[str, float]] = json.loads(done.stdout)
    return measured


def check(name: str, ours: list[Array], theirs: list[Array]) -> None:
    """Raise ValueError where results differ by more than the tolerance."""
    for one, other in zip(ours, theirs, strict=True):
        difference = float(np.abs(one.astype(np.float64) - other).max())
        if not difference <= TOLERANCE * float(np.abs(other).max()):
            raise ValueError(f"{name}: results differ by {difference:.3g}")


def summary(runs: list[Mapping[str, Mapping[str, float]]], operators: int) -> dict[str, Any]:
    """Medians over processes, and milliseconds an operator."""
    first = runs[0]
    kinds = {kind: {key: statistics.median(run[kind][key] for run in runs) for key in first[kind]} for kind in first}

    def per_operator(times: Mapping[str, float]) -> float:
        return round((times["compile"] + times["first run"] - times["later run"]) / operators * 1e3, 4)

    rounded: dict[str, Any] = {
        kind: {key: round(value, 5) for key, value in times.items()} for kind, times in kinds.items() if times
    }
    return rounded | {
        "ms_per_operator": per_operator(kinds["seconds"]),
        "processor_ms_per_operator": per_operator(kinds["processor"]),
    }


def export(name: str, file: Path) -> tuple[int, int]:
    """Write a model as an ONNX file; the number of its operators and the bytes of its weights."""
    from dagexec import zoo
    from dagexec.export import to_onnx

    proto = to_onnx(zoo.build(name, batch_size=1) if name in ZOO else MADE[name]())
    file.write_bytes(proto.SerializeToString())
    return len(proto.graph.node), sum(len(tensor.raw_data) for tensor in proto.graph.initializer)


def _chain(count: int = 20_000) -> Any:
    """ReLU and adding a constant, one after another, on 64 numbers."""
    from dagexec.building.model_builder import ModelBuilder

    builder = ModelBuilder("chain")
    x = builder.add_input("data", (1, 64))
    constant = builder.add_input("constant", (1, 64))
    for index in range(count // 2):
        x = builder.sum([builder.relu(x, f"r{index}"), constant], f"s{index}")
    return builder.model([x])


def _wide_sum(count: int = 2_000) -> Any:
    """A Sum of so many ReLUs."""
    from dagexec.building.model_builder import ModelBuilder

    builder = ModelBuilder("sum")
    x = builder.add_input("data", (1, 64))
    return builder.model([builder.sum([builder.relu(x, f"r{index}") for index in range(count)], "total")])


MADE: dict[str, Callable[[], Any]] = {CHAIN: _chain, WIDE_SUM: _wide_sum}


def table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """For people: milliseconds."""
    lines = [
        f"{'model':18}{'from':13}{'operators':>10}{'load':>8}{'compile':>9}{'first':>8}{'later':>8}"
        f"{'ms/op':>8}{'cpu ms/op':>11}"
    ]
    for name, row in rows.items():
        for contender in CONTENDERS:
            if contender not in row:
                continue
            found = row[contender]
            times = [found["seconds"].get(key, 0.0) * 1e3 for key in ("load", "compile", "first run", "later run")]
            lines.append(
                f"{name:18}{contender:13}{row['operators']:10}{times[0]:8.0f}{times[1]:9.0f}{times[2]:8.0f}"
                f"{times[3]:8.1f}{found['ms_per_operator']:8.3f}{found['processor_ms_per_operator']:11.3f}"
            )
        if "fresh process" in row:
            fresh = (f"{name} {1e3 * found['processor']:.0f}" for name, found in row["fresh process"].items())
            lines.append(f"{name:18}processor ms of a fresh process: {', '.join(fresh)}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(NAMES)}; all of them by default")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(*options.child)
        return
    rows: dict[str, Any] = {}
    if options.models and options.json is not None and options.json.exists():
        rows = json.loads(options.json.read_text())["models"]
    with tempfile.TemporaryDirectory() as folder:
        for name in options.models or NAMES:
            rows[name] = measure(name, Path(folder), options.repeat)
            print(table({name: rows[name]}), flush=True)
    if options.json is not None:
        ordered = {name: rows[name] for name in NAMES if name in rows}
        write_report(options.json, models=ordered)


if __name__ == "__main__":
    main()
