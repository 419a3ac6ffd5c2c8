"""What it takes from an ONNX file to a net that is ready to run: dagexec beside onnxruntime and OpenVINO.

    python benchmarks/onnx_load.py [PATTERN ...] [--folder FOLDER] [--rounds 5] [--seconds 140]

The files are those that `onnx_models.py --make` wrote: of each family ten, evenly by size, the smallest and the largest
among them, models that two exporters wrote once (the older one's, with open axes, where there is that). Files of more
than 64 MB are left out.

    dagexec      dagexec.load_model(file), then dagexec.compile(model, tuning_seconds=0), without stored choices; else
                 the defaults, so all passes run
    onnxruntime  InferenceSession(file) with default options, but for its log
    openvino     Core().read_model(file), then compile_model on the CPU with default options

Each file has a process of its own, in which all packages are imported and have loaded another model before. Contenders
take turns; the least processor time of all threads over the rounds is reported. "until first output" adds the first
run, as libraries differ in what they put off until then: onnxruntime packs weights when it makes a session, dagexec in
the first run. dagexec's time is also divided into phases. Adds to benchmarks/results/onnx_load.json, files without a
row first, and ends after --seconds, so that it can be continued.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from environment import describe
from model_files.recipe import model_file, stored_feeds, stored_names

RESULTS = Path(__file__).parent / "results" / "onnx_load.json"
MAX_BYTES, PER_FAMILY = 64 << 20, 10
_FORMS = ("older.dynamic", "older.static", "newer.dynamic", "newer.static")
_WARM_UP = "layers/perceptron.older.dynamic"

Stages = tuple[Callable[[], Any], Callable[[Any], object], Callable[[Any], None]]
"""Makes what runs, runs it once, and closes it."""


def main() -> None:
    options = _arguments()
    if options.child:
        print(json.dumps(measured(options.folder, options.child, options.rounds)))
        return
    names = [name for name in chosen(options.folder) if _matches(name, options.patterns)]
    rows: dict[str, Any] = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else {}
    end = time.monotonic() + options.seconds
    for name in sorted(names, key=lambda name: name in rows):
        if time.monotonic() >= end:
            break
        row = _asked(options.folder, name, options.rounds)
        if row is not None:
            rows[name] = row
            print(f"{name}: {row['ratio']} ({row['ratio until first output']} until first output)", flush=True)
    found = {"summary": summary(rows), "rows": dict(sorted(rows.items()))}
    RESULTS.write_text(json.dumps({"environment": describe()} | found, indent=1) + "\n")
    print(json.dumps(found["summary"], indent=1))


def chosen(folder: Path) -> list[str]:
    """The models to measure."""
    families: dict[str, dict[str, str]] = defaultdict(dict)
    for name in stored_names(folder):
        if os.path.getsize(model_file(folder, name)) <= MAX_BYTES:
            model, form = _form(name)
            known = families[name.partition("/")[0]]
            if model not in known or _FORMS.index(form) < _FORMS.index(_form(known[model])[1]):
                known[model] = name
    return [name for models in families.values() for name in _evenly(folder, list(models.values()))]


def _form(name: str) -> tuple[str, str]:
    """The model, and which exporter wrote it with which axes."""
    found = next((form for form in _FORMS if name.endswith(f".{form}")), "")
    return (name.removesuffix(f".{found}"), found) if found else (name, _FORMS[0])


def _evenly(folder: Path, names: Sequence[str]) -> list[str]:
    """So many of `names`, evenly by the size of their files."""
    listed = sorted(names, key=lambda name: os.path.getsize(model_file(folder, name)))
    steps = min(PER_FAMILY, len(listed))
    return [listed[place * (len(listed) - 1) // max(1, steps - 1)] for place in range(steps)]


def summary(rows: Mapping[str, Any]) -> dict[str, Any]:
    """Geometric means of the ratios to onnxruntime's time, of all files and by family; and phases of all files."""
    families: dict[str, list[Any]] = defaultdict(list)
    for name, row in rows.items():
        families[name.partition("/")[0]].append(row)
    phases: dict[str, float] = defaultdict(float)
    for row in rows.values():
        total = sum(row["phases"].values())
        for phase, milliseconds in row["phases"].items():
            phases[phase] += milliseconds / total / len(rows)
    return {
        "files": len(rows),
        "ratio": _mean(row["ratio"] for row in rows.values()),
        "ratio until first output": _mean(row["ratio until first output"] for row in rows.values()),
        "openvino": _mean(row["openvino ratio"] for row in rows.values() if "openvino ratio" in row),
        "families": {name: _mean(row["ratio"] for row in found) for name, found in sorted(families.items())},
        "share of phases, mean": {name: round(share, 3) for name, share in sorted(phases.items(), key=_by_share)},
    }


def _by_share(row: tuple[str, float]) -> float:
    return -row[1]


def _mean(ratios: Iterable[float]) -> float:
    logs = [math.log(ratio) for ratio in ratios]
    return round(math.exp(sum(logs) / max(1, len(logs))), 2)


def _asked(folder: Path, name: str, rounds: int) -> dict[str, Any] | None:
    """The row of a file; None where its process ends with an error, which it has printed."""
    command = [sys.executable, __file__, "--folder", os.fspath(folder), "--rounds", str(rounds), "--child", name]
    done = subprocess.run(command, env=os.environ | {"DAGEXEC_CHOICES": "off"}, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        print(f"{name}: could not be measured", flush=True)
        return None
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


# --- in a process of its own


def measured(folder: Path, name: str, rounds: int) -> dict[str, Any]:
    """The row of one file: milliseconds of each contender, the ratios, and the phases of dagexec's time."""
    file = os.fspath(model_file(folder, name))
    feeds = next(stored_feeds(folder, name))
    contenders = {"dagexec": dagexec_stages, "onnxruntime": onnxruntime_stages, "openvino": openvino_stages}
    for stages in contenders.values():
        once(stages(os.fspath(model_file(folder, _WARM_UP)), next(stored_feeds(folder, _WARM_UP))))
    best: dict[str, dict[str, float]] = {}
    for _ in range(rounds):
        for contender, stages in contenders.items():
            try:
                times = once(stages(file, feeds))
            except Exception as error:
                if contender != "openvino":  # which cannot run every model
                    raise SystemExit(f"{name}: {contender}: {error}") from None
                continue
            known = best.setdefault(contender, times)
            best[contender] = {stage: min(known[stage], times[stage]) for stage in times}
    row: dict[str, Any] = {
        "bytes": os.path.getsize(file),
        "ms": {contender: {stage: _ms(time) for stage, time in times.items()} for contender, times in best.items()},
    }
    own, other = best["dagexec"], best["onnxruntime"]
    row["ratio"] = round(own["ready"] / other["ready"], 2)
    row["ratio until first output"] = round(sum(own.values()) / sum(other.values()), 2)
    if "openvino" in best:
        row["openvino ratio"] = round(best["openvino"]["ready"] / best["onnxruntime"]["ready"], 2)
    return row | {"phases": {phase: _ms(time) for phase, time in phases(file, rounds).items()}}


def once(stages: Stages) -> dict[str, float]:
    """Processor seconds of a process's threads until a net is ready, and of its first run."""
    make, run, close = stages
    times = [time.process_time()]
    made = make()
    times.append(time.process_time())
    run(made)
    times.append(time.process_time())
    close(made)
    return {"ready": times[1] - times[0], "first run": times[2] - times[1]}


def dagexec_stages(file: str, feeds: Mapping[str, Any]) -> Stages:
    import dagexec

    return (
        lambda: dagexec.compile(dagexec.load_model(file), tuning_seconds=0),
        lambda executor: executor.run(dict(feeds)),
        lambda executor: executor.close(),
    )


def onnxruntime_stages(file: str, feeds: Mapping[str, Any]) -> Stages:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    return (
        lambda: onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"]),
        lambda session: session.run(None, dict(feeds)),
        lambda session: None,
    )


def openvino_stages(file: str, feeds: Mapping[str, Any]) -> Stages:
    core = importlib.import_module("openvino").Core()
    return (
        lambda: core.compile_model(core.read_model(file), "CPU"),
        lambda model: model(dict(feeds)),
        lambda model: None,
    )


def phases(file: str, rounds: int) -> dict[str, float]:
    """The least processor seconds of each phase of dagexec's loading and compiling, of this thread."""
    found: dict[str, float] = {}
    for _ in range(rounds):
        for phase, seconds in _phases(file).items():
            found[phase] = min(seconds, found.get(phase, math.inf))
    return found


def _phases(file: str) -> dict[str, float]:
    import dagexec
    from dagexec.binding import replicas
    from dagexec.compiler import compilation
    from dagexec.compiler.passes.rewriting import Pass, PassReport, Rewritten, run_passes
    from dagexec.core.model import Model
    from dagexec.frontend.onnx import model as frontend

    clock = _Clock()

    def timed_pass(one: Pass) -> Pass:
        def apply(model: Model) -> Rewritten:
            with clock.phase(f"pass {one.name}"):
                return one.apply(model)

        return Pass(one.name, one.doc, apply, one.retypes)

    def with_timed_passes(model: Model, passes: Sequence[Pass], *rest: Any, **options: Any) -> PassReport:
        return run_passes(model, [timed_pass(one) for one in passes], *rest, **options)

    wrapped = [
        (frontend, "read_model", "read the file"),
        (frontend, "initializer_arrays", "initializers"),
        (frontend, "check_declared", "check declared types"),
        (compilation, "initialized", "init net"),
        (compilation, "estimated_layout", "choose a layout"),
        (compilation, "choose_schedule", "choose a schedule"),
        (replicas, "build_graph", "graph"),
        (replicas, "parameter_workspace", "parameters"),
        (replicas, "_make_net", "operators and net"),
    ]
    kept = [(module, name, getattr(module, name)) for module, name, _ in wrapped]
    kept.append((compilation, "run_passes", run_passes))
    for module, name, phase in wrapped:
        setattr(module, name, clock.timed(getattr(module, name), phase))
    vars(compilation)["run_passes"] = with_timed_passes
    try:
        with clock.phase("convert"):
            model = dagexec.load_model(file)
        with clock.phase("rest of compiling"):
            dagexec.compile(model, tuning_seconds=0).close()
    finally:
        for module, name, function in kept:
            setattr(module, name, function)
    return clock.seconds


class _Clock:
    """Processor seconds of this thread by phase, each without those of phases inside it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._under_way: list[str] = []
        self._since = 0.0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A context in which time belongs to phase `name`."""
        self._count()
        self._under_way.append(name)
        yield
        self._count()
        self._under_way.pop()

    def timed(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        """`function` as a phase."""

        def call(*arguments: Any, **keywords: Any) -> Any:
            with self.phase(name):
                return function(*arguments, **keywords)

        return call

    def _count(self) -> None:
        now = time.thread_time()
        if self._under_way:
            self.seconds[self._under_way[-1]] += now - self._since
        self._since = now


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return not patterns or any(pattern in name for pattern in patterns)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("patterns", nargs="*", metavar="PATTERN")
    parser.add_argument("--folder", type=Path, default=Path.home() / ".cache" / "dagexec" / "onnx_models")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=math.inf, help="how long to measure")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
