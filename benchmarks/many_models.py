"""Many models in one process: threads, memory, time to compile, and runs of all in turn, beside onnxruntime.

    python benchmarks/many_models.py [--models 1000] [--rounds 3] [--batch 1] [--peers dagexec ...]
        [--json benchmarks/results/many_models.json]

Each model is a LeNet with weights of its own, in a file of its own, for so many images, or any number of them. A
contender has a process of its own: it makes all models, runs each for the first time, and then, in each round, one
model many times and all in turn. dagexec looks up choices that were measured before; onnxruntime's sessions share the
process's thread pool and allocator. Reported are, per model, processor time and resident memory to make it and to run
it first; threads; and the time of a run in turn beside that of one model run alone. "numpy" adds up each model's
weights and does nothing else: how much the machine itself varies where each run reads what is in no cache.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from environment import write_report
from onnx_export import to_onnx

Array = npt.NDArray[Any]
Run = Callable[[Array], object]

_ALONE = 1000  # runs of one model in each round


def lenets(folder: Path, count: int, batch: int | None = None) -> tuple[str, list[int]]:
    """Files of `count` LeNets, for `batch` images or any number; the name and shape of their input."""
    from dagexec import zoo
    from dagexec.binding.parameters import initialized

    model = initialized(zoo.build("lenet") if batch is None else zoo.build("lenet", batch))
    generator = np.random.default_rng(0)
    for number in range(count):
        parameters = {
            name: array * generator.uniform(0.9, 1.1, array.shape).astype(array.dtype)
            for name, array in model.parameters.items()
        }
        (folder / f"{number}.onnx").write_bytes(to_onnx(replace(model, parameters=parameters)).SerializeToString())
    given = onnx.load(str(folder / "0.onnx")).graph.input[0]
    return given.name, [size.dim_value or 1 for size in given.type.tensor_type.shape.dim]


def _resident() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _by_dagexec(name: str) -> Callable[[str], Run]:
    import dagexec

    def made(path: str) -> Run:
        executor = dagexec.compile(path)
        return lambda array: executor.run({name: array})

    return made


def _by_onnxruntime(name: str) -> Callable[[str], Run]:
    import onnxruntime

    cores = len(os.sched_getaffinity(0))
    onnxruntime.set_global_thread_pool_sizes(cores, 1)
    memory = onnxruntime.OrtMemoryInfo(
        "Cpu", onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, onnxruntime.OrtMemType.DEFAULT
    )
    onnxruntime.create_and_register_allocator(memory, None)
    options = onnxruntime.SessionOptions()
    options.use_per_session_threads = False
    options.add_session_config_entry("session.use_env_allocators", "1")

    def made(path: str) -> Run:
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        return lambda array: session.run(None, {name: array})

    return made


def _by_openvino(name: str) -> Callable[[str], Run]:
    core = importlib.import_module("openvino").Core()  # it has no types
    settings = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": len(os.sched_getaffinity(0))}

    def made(path: str) -> Run:
        request = core.compile_model(path, "CPU", settings).create_infer_request()
        return lambda array: request.infer({name: array})

    return made


def _by_numpy(name: str) -> Callable[[str], Run]:
    def made(path: str) -> Run:
        weights = [onnx.numpy_helper.to_array(tensor).copy() for tensor in onnx.load(path).graph.initializer]
        return lambda array: [one.sum() for one in weights]

    return made


PEERS = {"dagexec": _by_dagexec, "onnxruntime": _by_onnxruntime, "openvino": _by_openvino, "numpy": _by_numpy}


def _times(runs: Sequence[Run], array: Array) -> list[float]:
    times = []
    for run in runs:
        begin = time.perf_counter()
        run(array)
        times.append(1e3 * (time.perf_counter() - begin))
    return times


def _figures(times: Sequence[float]) -> dict[str, float]:
    return {"p50_ms": statistics.median(times), "p99_ms": float(np.percentile(times, 99))}


def measure(peer: str, folder: Path, models: int, rounds: int, name: str, shape: Sequence[int]) -> dict[str, object]:
    """What one contender takes, in this process."""
    made = PEERS[peer](name)
    array = np.random.default_rng(1).standard_normal(shape, np.float32)
    first = made(str(folder / "0.onnx"))
    _times([first] * (_ALONE // 10), array)
    marks = [(time.process_time(), _resident())]
    runs = [made(str(folder / f"{number}.onnx")) for number in range(models)]
    marks.append((time.process_time(), _resident()))
    _times(runs, array)
    marks.append((time.process_time(), _resident()))
    alone: list[float] = []
    in_turn: list[float] = []
    for _ in range(rounds):  # what else the machine does is in both
        alone += _times([first] * _ALONE, array)
        in_turn += _times(runs, array)
    (began, empty), (compiled, idle), (ran, full) = marks
    return {
        "make_ms": 1e3 * (compiled - began) / models,
        "first_run_ms": 1e3 * (ran - compiled) / models,
        "made_mb": (idle - empty) / 1e6 / models,
        "run_mb": (full - empty) / 1e6 / models,
        "resident_mb": full / 1e6,
        "threads": _threads(),
        "alone": _figures(alone),
        "in_turn": _figures(in_turn),
    }


def _in_a_process(arguments: Sequence[str], choices: Path) -> dict[str, object]:
    environment = os.environ | {"DAGEXEC_CHOICES": str(choices)}
    found = subprocess.run(
        [sys.executable, __file__, *arguments], check=True, stdout=subprocess.PIPE, text=True, env=environment
    )
    result: dict[str, object] = json.loads(found.stdout.splitlines()[-1])
    return result


def _tune(path: Path, seconds: float, choices: Path) -> None:
    code = f"import dagexec; dagexec.compile({str(path)!r}, tuning_seconds={seconds}).close()"
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"DAGEXEC_CHOICES": str(choices)})


def compare(
    peers: Sequence[str], models: int, rounds: int, seconds: float, batch: int | None = None
) -> list[dict[str, object]]:
    """A row for each contender, each in a process of its own."""
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        name, shape = lenets(folder, models, batch)
        if seconds:
            _tune(folder / "0.onnx", seconds, folder / "choices.json")
        for peer in peers:
            given = [
                "--child",
                peer,
                temporary,
                name,
                json.dumps(shape),
                "--models",
                str(models),
                "--rounds",
                str(rounds),
            ]
            rows.append(
                {"peer": peer, "models": models, "batch": batch, **_in_a_process(given, folder / "choices.json")}
            )
            print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", nargs="+", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--models", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch", type=int, help="images of every run; without it any number, which is one here")
    parser.add_argument("--tuning-seconds", type=float, default=5.0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", nargs=4, metavar=("PEER", "FOLDER", "INPUT", "SHAPE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child is not None:
        peer, folder, name, shape = arguments.child
        found = measure(peer, Path(folder), arguments.models, arguments.rounds, name, json.loads(shape))
        print(json.dumps(found))
        return
    rows = compare(arguments.peers, arguments.models, arguments.rounds, arguments.tuning_seconds, arguments.batch)
    if arguments.json is not None:
        write_report(arguments.json, rows=rows)


if __name__ == "__main__":
    main()
