"""The process in which `onnx_models.py` tries models: one line of JSON for each name that it reads.

    python benchmarks/onnx_model_child.py FOLDER THREADS SECONDS

onnxruntime's results are what dagexec's are compared with. All contenders are in this process, and take turns; between
turns it sleeps, until their threads do. SECONDS are for the turns of one model; with 0 nothing is timed. Loading is
timed on one thread.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from model_files.recipe import Array, Feeds, model_file, stored_feeds

import dagexec
from dagexec.analysis.foreign_share import foreign_share
from dagexec.errors import DagexecError
from dagexec.tracing import Trace

TOLERANCE = 1e-4
"""Absolute and relative."""
INT8_TOLERANCE, FLOAT16_TOLERANCE = 0.03, 0.005
"""Of an output's largest element, for files that compute in so few bits: a number that is rounded the other way early
is a whole step there, and steps add up."""
_LONG_LOAD, _TURN = 300.0, 10.0
"""Milliseconds."""
_ROUNDS, _MOST_RUNS, _PAUSE = (3, 9), 50, 0.005

Run = Callable[[], object]


def tried(folder: Path, name: str, threads: int, seconds: float) -> dict[str, Any]:
    """The row of one model. `verdict` is equal, differs, unstable, refused, failed, or that there is no reference."""
    file = model_file(folder, name)
    runs = list(stored_feeds(folder, name))
    try:
        session = _session(file, threads)
        expected = [session.run(None, feeds) for feeds in runs]
    except Exception as error:
        return {"verdict": "no reference", "detail": _first_line(error)}
    try:
        executor = dagexec.compile(file)
    except DagexecError as error:
        return {"verdict": "refused", "detail": str(error).removeprefix(f"{file}: ")}
    with executor:
        row = _compared(executor, session, runs, expected, _coarse(file))
        if row["verdict"] not in ("equal", "unstable"):
            return row
        row |= _shares(executor, runs[0])
        if seconds:
            if threads == 1:
                row["load_ms"] = _load_times(file, threads)
            row |= _timed(_contenders(executor, session, file, runs[0], threads), seconds)
    return row


def _compared(
    executor: dagexec.Executor, session: Any, runs: Sequence[Feeds], expected: Sequence[Any], coarse: float
) -> dict[str, Any]:
    names = [output.name for output in session.get_outputs()]
    row = {"verdict": "equal"}
    for number, (feeds, results) in enumerate(zip(runs, expected, strict=True)):
        try:
            outputs = executor.run(feeds)
        except DagexecError as error:
            return {"verdict": "failed", "detail": f"run {number}: {error}"}
        for output, result in zip(names, results, strict=True):
            if found := difference(outputs[output], result, coarse):
                row = {"verdict": "differs", "detail": f"run {number}, {output}: {found}"}
                if not (coarse and _moves_as_far(session, feeds, output, outputs[output], result)):
                    return row
                row["verdict"] = "unstable"
    return row


def _moves_as_far(session: Any, feeds: Feeds, output: str, found: Array, expected: Array) -> bool:
    """Whether onnxruntime's result moves half as far as `found` is off when one number of the input is a step away."""
    distance = np.abs(found.astype(np.float64) - expected).max(initial=0)
    moved = [
        np.abs(session.run([output], near)[0].astype(np.float64) - expected).max(initial=0) for near in _near(feeds)
    ]
    return bool(max(moved) >= distance / 2)


def _near(feeds: Feeds) -> Iterator[Feeds]:
    """The feeds with the middle number of one of them a step of its type further: for floats, four last places."""
    for name, array in feeds.items():
        near = array.copy()
        middle = near.reshape(-1)[near.size // 2 :][:1]
        middle += 4 * np.spacing(middle) if array.dtype.kind == "f" else np.ones(1, array.dtype)
        yield {**feeds, name: near}


def difference(found: Any, expected: Any, coarse: float = 0.0) -> str | None:
    """How a result differs by more than is allowed, else None; sequences and maps by their elements."""
    if isinstance(expected, Mapping):
        found, expected = [found[key] for key in expected], list(expected.values())
    if isinstance(expected, list):
        if len(found) != len(expected):
            return f"{len(found)} elements, expected {len(expected)}"
        pairs = zip(found, expected, strict=True)
        return next((text for one, other in pairs if (text := difference(one, other, coarse))), None)
    return _arrays_differ(np.asarray(found), np.asarray(expected), coarse)


def _arrays_differ(found: Array, expected: Array, coarse: float) -> str | None:
    if found.shape != expected.shape or (found.dtype != expected.dtype and expected.dtype.kind not in "OU"):
        return f"{found.dtype}{list(found.shape)}, expected {expected.dtype}{list(expected.shape)}"
    if expected.dtype.kind in "OUSb":
        pairs = zip(found.reshape(-1).tolist(), expected.reshape(-1).tolist(), strict=True)
        count = sum(_text(one) != _text(other) for one, other in pairs)
        return f"{count} of {expected.size} differ" if count else None
    one, other = found.astype(np.float64), expected.astype(np.float64)
    with np.errstate(invalid="ignore"):
        distance = np.where((one == other) | (np.isnan(one) & np.isnan(other)), 0, np.abs(one - other))
    size = np.where(np.isfinite(other), np.abs(other), 0)
    largest = size.max(initial=0)
    allowed = np.maximum(TOLERANCE * (1 + size), coarse * largest)
    beyond = ~(distance <= allowed)
    if not beyond.any():
        return None
    off = np.count_nonzero(beyond)
    return f"{off} of {beyond.size} are off, by {distance.max():.2g} where the largest is {largest:.2g}"


def _text(value: object) -> object:
    """dagexec's texts are UTF-8 bytes."""
    return value.decode() if isinstance(value, bytes) else value


def _coarse(file: Path) -> float:
    """The share of an output's largest element that a result may be off."""
    graph = onnx.load(file, load_external_data=False).graph
    if any(word in node.op_type for node in graph.node for word in ("Quantize", "Integer", "QLinear")):
        return INT8_TOLERANCE
    half = any(tensor.data_type == onnx.TensorProto.FLOAT16 for tensor in graph.initializer)
    return FLOAT16_TOLERANCE if half else 0.0


def _session(file: Path, threads: int) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(os.fspath(file), options, providers=["CPUExecutionProvider"])


def _openvino(file: Path, feeds: Feeds, threads: int) -> Run:
    openvino = importlib.import_module("openvino")
    settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}
    request = openvino.Core().compile_model(file, "CPU", settings).create_infer_request()
    for name, array in feeds.items():
        request.set_tensor(name, openvino.Tensor(array, shared_memory=True))
    request.infer()
    return lambda: request.infer()


def _load_times(file: Path, threads: int) -> dict[str, float]:
    """The least milliseconds that loading takes, of two; of one, where it takes long."""
    loads: dict[str, Run] = {
        "dagexec": lambda: dagexec.compile(file, tuning_seconds=0).close(),
        "onnxruntime": lambda: _session(file, threads),
    }
    times = {name: _once(load) for name, load in loads.items()}
    if sum(times.values()) < _LONG_LOAD:
        times = {name: min(time_, _once(loads[name])) for name, time_ in times.items()}
    return {name: round(found, 2) for name, found in times.items()}


def _contenders(executor: dagexec.Executor, session: Any, file: Path, feeds: Feeds, threads: int) -> dict[str, Run]:
    contenders: dict[str, Run] = {
        "dagexec": lambda: executor.run(feeds),
        "onnxruntime": lambda: session.run(None, feeds),
    }
    with suppress(Exception):  # what OpenVINO cannot load or run has no column
        contenders["openvino"] = _openvino(file, feeds, threads)
    return contenders


def _timed(contenders: Mapping[str, Run], seconds: float) -> dict[str, Any]:
    """Milliseconds of a run of each, in rounds of turns for so long: medians over the rounds, and the least.

    `ratios` are medians of dagexec's time over the other's in the same round.
    """
    rounds: dict[str, list[float]] = {name: [] for name in contenders}
    end = time.perf_counter() + seconds
    while len(rounds["dagexec"]) < _ROUNDS[0] or (len(rounds["dagexec"]) < _ROUNDS[1] and time.perf_counter() < end):
        for name, run in contenders.items():
            time.sleep(_PAUSE)
            rounds[name].append(_turn(run))
    ours = rounds["dagexec"]
    ratios = {
        name: round(statistics.median(a / b for a, b in zip(ours, theirs, strict=True)), 3)
        for name, theirs in rounds.items()
        if name != "dagexec"
    }
    return {
        "ms": {name: round(statistics.median(found), 4) for name, found in rounds.items()},
        "least_ms": {name: round(min(found), 4) for name, found in rounds.items()},
        "ratios": ratios,
    }


def _turn(run: Run) -> float:
    """Median milliseconds of the runs of one turn, after one that warms caches; of that one, where it takes long."""
    first = _once(run)
    if first > _TURN:
        return first
    return statistics.median(_once(run) for _ in range(max(2, min(_MOST_RUNS, int(_TURN / max(first, 1e-3))))))


def _once(run: Run) -> float:
    start = time.perf_counter()
    run()
    return 1e3 * (time.perf_counter() - start)


def _shares(executor: dagexec.Executor, feeds: Feeds) -> dict[str, Any]:
    """How many operators there are, how many of them other runtimes compute, and their share of the time of one run."""
    graph = executor.net().graph
    foreign = sum(schema.foreign for schema in graph.schemas)
    found: dict[str, Any] = {"operators": len(graph), "adapter": foreign}
    if foreign:
        trace = Trace()
        executor.run(feeds, trace=trace)
        found["adapter_time"] = round(foreign_share(graph, trace.operator_seconds(len(graph))) or 0.0, 3)
    return found


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:200]


def main() -> None:
    folder, threads, seconds = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    logging.disable(logging.WARNING)
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # what libraries print goes to standard error
        for line in sys.stdin:
            try:
                row = tried(folder, line.strip(), threads, seconds)
            except Exception as error:
                row = {"verdict": "crashed", "detail": f"{type(error).__name__}: {_first_line(error)}"}
            print(json.dumps(row), file=answers, flush=True)


if __name__ == "__main__":
    main()
