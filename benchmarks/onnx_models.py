"""Files of PyTorch's exporters, torchvision, transformers, scikit-learn and packages: dagexec beside its peers.

    python benchmarks/onnx_models.py --make [PATTERN ...]         # writes the files into --folder; needs [bench-models]
    python benchmarks/onnx_models.py --check [PATTERN ...]        # compares every output with onnxruntime's
    python benchmarks/onnx_models.py [PATTERN ...] [--threads 1 2] [--seconds 140] [--again] [--write-docs]

A PATTERN is part of a model's name; without one all are meant. Measuring adds its rows to
benchmarks/results/onnx_models.json one by one, models without a row first, and ends after --seconds. Run again, it goes
on: what was measured at the same commit of dagexec is left out, but for --again.
`make benchmark-onnx` makes, measures and writes docs/onnx-models.md.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import logging
import multiprocessing
import os
import select
import subprocess
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cnn_process import only_cores
from environment import describe
from model_files import FAMILIES
from model_files.recipe import Recipe, stored_names
from onnx_model_page import write_page

from dagexec.platform.processor import available_cores

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "onnx_models.json"
_CHILD = Path(__file__).parent / "onnx_model_child.py"
_PATIENCE = 300.0
_TIMED_SECONDS, _MODELS_A_PROCESS = 0.4, 40


def main() -> None:
    options = _arguments()
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.make:
        make(options.folder, options.patterns)
        return
    names = [name for name in stored_names(options.folder) if _matches(name, options.patterns)]
    if not names:
        raise SystemExit(f"{options.folder} has no such models; --make writes them")
    if options.check:
        check(options.folder, names)
        return
    reports: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    measure(options, names, reports)
    if options.write_docs:
        write_page(reports, ROOT / "docs")


def measure(options: argparse.Namespace, names: Sequence[str], reports: dict[str, Any]) -> None:
    """Add the models' rows to the report of this machine's instruction set, writing it after each."""
    environment, commit = describe(), _commit()
    report = reports.setdefault(str(environment["instruction set"]), {"rows": {}})
    report["environment"] = environment
    end = time.monotonic() + options.seconds
    for turn, threads in enumerate(options.threads):
        rows = report["rows"].setdefault(str(threads), {})
        left = [name for name in names if options.again or commit is None or rows.get(name, {}).get("commit") != commit]
        left.sort(key=lambda name: name in rows)
        seconds = (end - time.monotonic()) / (len(options.threads) - turn)
        for name, row in answers(options.folder, left, threads, _TIMED_SECONDS, seconds):
            rows[name] = row | {"commit": commit}
            report["rows"][str(threads)] = dict(sorted(rows.items()))
            _write(reports)
            _print(name, row)


def _commit() -> str | None:
    """The last commit that changed what is measured; None where there is no repository or it is changed."""
    sources = ("dagexec", "ops", "scheduler")
    git = ["git", "-C", os.fspath(ROOT)]
    found = subprocess.run([*git, "log", "-1", "--format=%h", "--", *sources], capture_output=True, text=True)
    changed = subprocess.run([*git, "status", "--porcelain", "--", *sources], capture_output=True, text=True)
    return None if found.returncode or changed.stdout else found.stdout.strip() or None


def _write(reports: Mapping[str, Any]) -> None:
    """Replace the record at once: whoever ends the process leaves a whole one."""
    fresh = RESULTS.with_suffix(".part")
    fresh.write_text(json.dumps(reports, indent=1) + "\n")
    fresh.replace(RESULTS)


def make(folder: Path, patterns: Sequence[str]) -> None:
    """Write the files that are not there yet, each in a process of its own; what cannot be exported is said."""
    for family in FAMILIES:
        for recipe in importlib.import_module(f"model_files.{family}").recipes():
            if recipe.name in stored_names(folder) or not _matches(recipe.name, patterns):
                continue
            process = multiprocessing.get_context("fork").Process(target=_make_quietly, args=(recipe, folder))
            process.start()
            process.join()
            print(f"{recipe.name}: {'made' if process.exitcode == 0 else 'was not exported'}", flush=True)


def _make_quietly(recipe: Recipe, folder: Path) -> None:
    """What exporters print goes into a file."""
    (folder / recipe.name).parent.mkdir(exist_ok=True)
    log = os.open(folder / f"{recipe.name}.log", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    try:
        recipe.make(folder)
    except Exception:
        traceback.print_exc()
        raise SystemExit(1) from None


def check(folder: Path, names: Sequence[str]) -> None:
    """Print what is not equal, and how many are. Ends with exit code 1 where a result differs or a run failed."""
    verdicts: Counter[str] = Counter()
    for name, row in answers(folder, names, available_cores(), 0.0, float("inf")):
        verdicts[row["verdict"]] += 1
        if row["verdict"] != "equal":
            print(f"{name}: {row['verdict']}: {row.get('detail', '')}", flush=True)
    print(", ".join(f"{count} {verdict}" for verdict, count in verdicts.most_common()))
    raise SystemExit(1 if set(verdicts) & {"differs", "failed", "crashed"} else 0)


def answers(
    folder: Path, names: Sequence[str], threads: int, timed: float, seconds: float
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each model's row, from processes on the first cores; another process continues after one that died or hung."""
    end = time.monotonic() + seconds
    left = list(names)
    while left and time.monotonic() < end:
        with _child(folder, threads, timed) as child:
            for name in left[:_MODELS_A_PROCESS]:
                if time.monotonic() > end:
                    return
                left.remove(name)
                row = _ask(child, name)
                yield name, row
                if row["verdict"] == "crashed" and child.poll() is not None:
                    break


@contextlib.contextmanager
def _child(folder: Path, threads: int, timed: float) -> Iterator[subprocess.Popen[str]]:
    environment = os.environ | {name: str(threads) for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    command = [sys.executable, os.fspath(_CHILD), os.fspath(folder), str(threads), str(timed)]
    with only_cores(threads):
        child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True, bufsize=1
        )
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


def _ask(child: subprocess.Popen[str], name: str) -> dict[str, Any]:
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(f"{name}\n")
    child.stdin.flush()
    ready = select.select([child.stdout], [], [], _PATIENCE)[0]
    line = child.stdout.readline() if ready else ""
    if not line:
        child.kill()
        child.wait()
        ended = f"its process ended with {child.returncode}" if ready else f"no answer within {_PATIENCE:g} s"
        return {"verdict": "crashed", "detail": ended}
    row: dict[str, Any] = json.loads(line)
    return row


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return not patterns or any(pattern in name for pattern in patterns)


def _print(name: str, row: dict[str, Any]) -> None:
    times = "  ".join(f"{peer} {value:.3f} ms" for peer, value in row.get("ms", {}).items())
    print(f"{name}: {row['verdict']} {times} {row.get('ratios', '')}", flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("patterns", nargs="*", metavar="PATTERN")
    parser.add_argument("--make", action="store_true", help="write the files")
    parser.add_argument("--check", action="store_true", help="only compare outputs")
    parser.add_argument("--folder", type=Path, default=Path.home() / ".cache" / "dagexec" / "onnx_models")
    parser.add_argument("--threads", nargs="*", type=int, default=[n for n in (1, 2) if n <= available_cores()])
    parser.add_argument("--seconds", type=float, default=float("inf"), help="how long to measure")
    parser.add_argument("--again", action="store_true", help="measure what has a row of this commit too")
    parser.add_argument("--write-docs", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
