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
import os
import select
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from cnn_process import only_cores
from environment import describe
from model_files import FAMILIES
from model_files.recipe import make_files, matches, stored_names
from onnx_model_page import write_page
from record import read_record, source_commit, write_record

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
    names = [name for name in stored_names(options.folder) if matches(name, options.patterns)]
    if not names:
        raise SystemExit(f"{options.folder} has no such models; --make writes them")
    if options.check:
        check(options.folder, names)
        return
    reports = read_record(RESULTS)
    measure(options, names, reports)
    if options.write_docs:
        write_page(reports, ROOT / "docs")


def measure(options: argparse.Namespace, names: Sequence[str], reports: dict[str, Any]) -> None:
    """Add the models' rows to the report of this machine's instruction set, writing it after each."""
    environment, commit = describe(), source_commit()
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
            write_record(RESULTS, reports)
            _print(name, row)


def make(folder: Path, patterns: Sequence[str]) -> None:
    """Write the files that are not there yet; what cannot be exported is said."""
    for family in FAMILIES:
        make_files(importlib.import_module(f"model_files.{family}").recipes(), folder, patterns)


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
