"""What it takes from an ONNX file to a net that is ready to run: dagexec beside onnxruntime and OpenVINO.

    python benchmarks/onnx_load.py [PATTERN ...] [--folder FOLDER] [--rounds 5] [--seconds 140] [--again]

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
the first run. Adds to benchmarks/results/onnx_load.json, files without a row first, and ends after --seconds, so that
it can be continued; --again forgets the rows that are there.
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
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from environment import describe
from model_files.recipe import model_file, stored_feeds, stored_names

RESULTS = Path(__file__).parent / "results" / "onnx_load.json"
MAX_BYTES, PER_FAMILY = 64 << 20, 10
_FORMS = ("older.dynamic", "older.static", "newer.dynamic", "newer.static")
_WARM_UP = "layers/perceptron.older.dynamic"

Stages = Mapping[str, Callable[[Any], Any]]
"""Each stage by name, in order: it gets what the one before returned, the first one the path of the file."""


def main() -> None:
    options = _arguments()
    if options.child:
        print(json.dumps(measured(options.folder, options.child, options.rounds)))
        return
    names = [name for name in chosen(options.folder) if _matches(name, options.patterns)]
    rows: dict[str, Any] = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() and not options.again else {}
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
    """Geometric means of the ratios to onnxruntime's time, of all files and by family."""
    families: dict[str, list[Any]] = defaultdict(list)
    for name, row in rows.items():
        families[name.partition("/")[0]].append(row)
    return {
        "files": len(rows),
        "ratio": _mean(row["ratio"] for row in rows.values()),
        "ratio until first output": _mean(row["ratio until first output"] for row in rows.values()),
        "openvino": _mean(row["openvino ratio"] for row in rows.values() if "openvino ratio" in row),
        "openvino until first output": _mean(
            row["openvino ratio until first output"] for row in rows.values() if "openvino ratio" in row
        ),
        "families": {
            name: {key: _mean(row[key] for row in found) for key in ("ratio", "ratio until first output")}
            for name, found in sorted(families.items())
        },
    }


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
    """The row of one file: milliseconds of each contender's stages, and the ratios."""
    file = os.fspath(model_file(folder, name))
    feeds = next(stored_feeds(folder, name))
    contenders = {"dagexec": dagexec_stages, "onnxruntime": onnxruntime_stages, "openvino": openvino_stages}
    for stages in contenders.values():
        once(stages(next(stored_feeds(folder, _WARM_UP))), os.fspath(model_file(folder, _WARM_UP)))
    best: dict[str, dict[str, float]] = {}
    for _ in range(rounds):
        for contender, stages in contenders.items():
            try:
                times = once(stages(feeds), file)
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
    total = {contender: sum(times.values()) for contender, times in best.items()}
    ready = {contender: total[contender] - times["first run"] for contender, times in best.items()}
    row["ratio"] = round(ready["dagexec"] / ready["onnxruntime"], 2)
    row["ratio until first output"] = round(total["dagexec"] / total["onnxruntime"], 2)
    if "openvino" in best:
        row["openvino ratio"] = round(ready["openvino"] / ready["onnxruntime"], 2)
        row["openvino ratio until first output"] = round(total["openvino"] / total["onnxruntime"], 2)
    return row


def once(stages: Stages, file: str) -> dict[str, float]:
    """Processor seconds of all threads in each stage. What the stages made is closed, not counted."""
    found: dict[str, float] = {}
    made: list[Any] = [file]
    for name, stage in stages.items():
        start = time.process_time()
        made.append(stage(made[-1]))
        found[name] = time.process_time() - start
    for one in made:
        if hasattr(one, "close"):
            one.close()
    return found


def dagexec_stages(feeds: Mapping[str, Any]) -> Stages:
    import dagexec

    return {
        "load": dagexec.load_model,
        "compile": lambda model: dagexec.compile(model, tuning_seconds=0),
        "first run": lambda executor: executor.run(dict(feeds)),
    }


def onnxruntime_stages(feeds: Mapping[str, Any]) -> Stages:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    return {
        "ready": lambda file: onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"]),
        "first run": lambda session: session.run(None, dict(feeds)),
    }


def openvino_stages(feeds: Mapping[str, Any]) -> Stages:
    core = importlib.import_module("openvino").Core()
    return {
        "ready": lambda file: core.compile_model(core.read_model(file), "CPU"),
        "first run": lambda model: model(dict(feeds)),
    }


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
    parser.add_argument("--again", action="store_true", help="forget the rows of an earlier measurement")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
