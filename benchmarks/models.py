"""Forty models in six families: dagexec against onnxruntime, OpenVINO and PyTorch, each at its best, on the processor.

    python benchmarks/models.py --make [PATTERN ...]       # writes the files into --folder; needs [bench-models]
    python benchmarks/models.py [PATTERN ...] [--batch 1 8] [--threads 1 2] [--precision float32 bfloat16 int8]
        [--seconds 140] [--again | --any-commit] [--torch PYTHON] [--tuning SECONDS] [--quick] [--write-docs]
    python benchmarks/models.py --first-results            # seconds to the first result, cold and warm
    python benchmarks/models.py --profile [10]             # operators of the models that are furthest behind
    python benchmarks/models.py --write-docs --seconds 0   # the page again, without measuring

A PATTERN is part of a model's name; without one all are meant. Every contender is a process of its own that sleeps
while another's turn is measured. Rows are added to benchmarks/results/models.json one by one, in the record of the
processor and its instruction set, those without a row first, until --seconds are over. Run again, it goes on: what was
measured at the same commit of dagexec is left out. --torch PYTHON adds PyTorch, eager and compiled, from the
environment of that interpreter; --tuning adds dagexec after measuring for so long, with its own kernels and with
islands.

ONEDNN_MAX_CPU_ISA=AVX2 OPENBLAS_CORETYPE=Haswell limits dagexec, NumPy, OpenVINO and PyTorch. onnxruntime takes what
the processor has. `make benchmark-models` makes the files, measures and writes the part in docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from cnn_measure import OURS, Effort
from cnn_process import ContenderError
from environment import describe
from families import BATCHES, FAMILIES
from model_contenders import EXACT, PRECISIONS, Case, Column, columns, quantized_file
from model_files.recipe import Feeds, feeds_file, make_files, matches, model_file, stored_feeds, stored_names
from model_measure import first_results, measured
from model_profile import profile, worst
from models_page import write_part
from record import read_record, source_commit, write_record

from dagexec.platform.processor import available_cores

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "models.json"
QUICK = Effort(turn_seconds=0.02, rounds=2, settings_rounds=1)
EFFORT = Effort(turn_seconds=0.15, rounds=7, settings_rounds=2)

Row = dict[str, Any]


def main() -> None:
    options = _arguments()
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.make:
        make(options.folder, options.patterns)
        return
    reports = read_record(options.json)
    names = [name for name in stored_names(options.folder) if matches(name, options.patterns)]
    if not names and not options.write_docs:
        raise SystemExit(f"{options.folder} has no such models; --make writes them")
    if options.profile:
        add_profiles(options, reports)
    elif options.first_results:
        add_first_results(options, names, reports)
    else:
        add_rows(options, names, reports)
    if options.write_docs:
        write_part(reports, ROOT / "docs" / "benchmarks.md")


def make(folder: Path, patterns: Sequence[str]) -> None:
    """Write the files that are not there yet, and then those in 8-bit integers."""
    for family in FAMILIES:
        nets = import_module(f"families.{family}").nets()
        make_files([net.recipe(family) for net in nets], folder, patterns)
    quantize = import_module("families.quantized").quantize
    for name in stored_names(folder):
        file = quantized_file(model_file(folder, name))
        if matches(name, patterns) and not file.exists():
            print(f"{name}: in 8-bit integers: {quantize(model_file(folder, name), file)}", flush=True)


def add_rows(options: argparse.Namespace, names: Sequence[str], reports: dict[str, Any]) -> None:
    """Measure the cases that are left, writing the record after each."""
    report = _report(reports)
    commit, end = source_commit(), time.monotonic() + options.seconds
    known = None if options.any_commit else commit
    effort = QUICK if options.quick else replace(EFFORT, rounds=options.rounds)
    for case in left_cases(_cases(options, names), report["rows"], options, known):
        if time.monotonic() > end:
            return
        row = {} if options.again else report["rows"].get(case.name, {}).get(case.way, {})
        wanted = _columns(options, case)
        if lacking := _lacking(row, wanted, commit):
            try:
                fresh = measured(case, lacking, effort)
            except ContenderError as error:
                fresh = {"contenders": {}, "ratios": {}, "error": str(error)[:400]}
            row = merged(row, fresh, commit)
        report["rows"].setdefault(case.name, {})[case.way] = row
        write_record(options.json, reports)
        _print(case, row)


def left_cases(
    cases: Sequence[Case], rows: Mapping[str, Any], options: argparse.Namespace, commit: str | None
) -> list[Case]:
    """The cases to measure: those without a row first, then those whose row is of another commit or lacks a column."""

    def row(case: Case) -> Row:
        found: Row = rows.get(case.name, {}).get(case.way, {})
        return found

    def is_done(case: Case) -> bool:
        found = row(case)
        of_now = bool(found) and (options.any_commit or (commit is not None and found.get("commit") == commit))
        return of_now and not options.again and not _contenders(options, case) - found["contenders"].keys()

    return sorted((case for case in cases if not is_done(case)), key=lambda case: bool(row(case)))


def _lacking(row: Row, wanted: Mapping[str, Column], commit: str | None) -> Mapping[str, Column]:
    """What is to be measured: all columns, or where the row is of this commit, those that are not there beside dagexec
    and the reference."""
    if not row or row.get("commit") != commit or not wanted.keys() - {EXACT} - row["contenders"].keys():
        return wanted
    always = (OURS, "onnxruntime", EXACT)
    return {name: column for name, column in wanted.items() if name in always or name not in row["contenders"]}


def merged(before: Row, fresh: Row, commit: str | None) -> Row:
    """The fresh row, with the columns that it lacks from one of the same commit."""
    if before.get("commit") != commit or "contenders" not in before:
        return fresh | {"commit": commit}
    kept = {part: {**fresh[part], **before[part]} for part in ("contenders", "ratios")}
    return fresh | kept | {"commit": commit}


def add_first_results(options: argparse.Namespace, names: Sequence[str], reports: dict[str, Any]) -> None:
    """Seconds to the first result of each model alone, on one thread."""
    report = _report(reports)
    commit, end = source_commit(), time.monotonic() + options.seconds
    known = report.setdefault("first_results", {})
    for name in names:
        if time.monotonic() > end:
            return
        if name in known and not options.again and (options.any_commit or known[name]["commit"] == commit):
            continue
        case = Case(name, 1, 1)
        known[name] = {"commit": commit, "contenders": first_results(_columns(options, case))}
        write_record(options.json, reports)
        print(name, known[name]["contenders"], flush=True)


def add_profiles(options: argparse.Namespace, reports: dict[str, Any]) -> None:
    """Where the time goes in the models that are furthest behind the better peer, alone on one thread."""
    report = _report(reports)
    way = Case("", 1, 1).way
    report["profiles"] = {}
    for name in worst(report["rows"], way, options.profile):
        if not matches(name, options.patterns):
            continue
        model = model_file(options.folder, name)
        report["profiles"][name] = profile(model, feeds_file(options.folder, name, 0))
        write_record(options.json, reports)
        print(name, *report["profiles"][name]["operators"][:6], sep="\n  ", flush=True)


def _report(reports: dict[str, Any]) -> dict[str, Any]:
    environment = describe()
    name = f"{environment['instruction set']}, {environment['processor']}"
    report: dict[str, Any] = reports.setdefault(name, {"rows": {}})
    report["environment"] = environment
    return report


def _cases(options: argparse.Namespace, names: Sequence[str]) -> list[Case]:
    return [
        Case(name, batch, threads, precision)
        for precision in options.precision
        for batch in options.batch
        for threads in options.threads
        for name in names
        if precision != "int8" or quantized_file(model_file(options.folder, name)).exists()
    ]


def _columns(options: argparse.Namespace, case: Case) -> dict[str, Column]:
    feeds = _feeds(options.folder, case.name, case.batch)
    return columns(options.folder, case, feeds, torch=options.torch, tuning=options.tuning)


def _contenders(options: argparse.Namespace, case: Case) -> set[str]:
    return _columns(options, case).keys() - {EXACT}


def _feeds(folder: Path, name: str, batch: int) -> Feeds:
    runs: Iterator[Feeds] = stored_feeds(folder, name)
    return list(runs)[BATCHES.index(batch)]


def _print(case: Case, row: Row) -> None:
    print(f"{case.name}, {case.way}: {row.get('error', '')}")
    for column, entry in row["contenders"].items():
        ratio = row["ratios"].get(column)
        text = f"{entry['ms']:9.3f} ms {entry['peak_mib']:6d} MiB" if "ms" in entry else str(entry)
        print(f"  {column:22} {text}{'' if ratio is None else f'  dagexec / it {ratio:.3f}'}", flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("patterns", nargs="*", metavar="PATTERN")
    parser.add_argument("--make", action="store_true", help="write the files")
    parser.add_argument("--folder", type=Path, default=Path.home() / ".cache" / "dagexec" / "models")
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--batch", nargs="*", type=int, default=list(BATCHES), choices=BATCHES)
    parser.add_argument("--threads", nargs="*", type=int, default=[n for n in (1, 2) if n <= available_cores()])
    parser.add_argument("--precision", nargs="*", default=["float32"], choices=PRECISIONS)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="how long to measure")
    parser.add_argument("--again", action="store_true", help="measure what has a row of this commit too")
    parser.add_argument("--any-commit", action="store_true", help="leave out what has a row of any commit")
    parser.add_argument("--torch", nargs="?", const=sys.executable, default="", metavar="PYTHON", help="PyTorch, too")
    parser.add_argument("--tuning", type=float, default=0.0, metavar="SECONDS", help="dagexec tuned, too")
    parser.add_argument("--first-results", action="store_true", help="measure the time to the first result instead")
    parser.add_argument(
        "--profile", nargs="?", type=int, const=10, default=0, metavar="COUNT", help="operators instead"
    )
    parser.add_argument("--rounds", type=int, default=EFFORT.rounds, help="of turns, interleaved")
    parser.add_argument("--quick", action="store_true", help="few short rounds: whether it works, not how fast")
    parser.add_argument("--write-docs", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
