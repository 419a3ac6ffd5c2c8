"""Whole networks: dagexec against onnxruntime, OpenVINO and PyTorch, each at its best settings, on the processor.

    python benchmarks/cnn.py [--quick] [--models resnet50 ...] [--batch 1 8] [--threads 1 2] [--no-torch]
                             [--rounds 11] [--write-docs] [--add] [--json FILE]

Every contender is a process of its own that sleeps while another's turn is measured, on the first 1 or 2 cores; turns
are interleaved, outputs compared, and nothing is reported when one differs. A peer that is not installed is left out.
`--write-docs` writes benchmarks/results/cnn.json, docs/benchmarks.md and docs/benchmarks.svg; with `--add` rows of
other networks that were measured in the same way stay. `make benchmark-cnn` installs the peers and does it all.

Results are kept by instruction set: ONEDNN_MAX_CPU_ISA=AVX2 OPENBLAS_CORETYPE=Haswell limits dagexec, NumPy and
OpenVINO. onnxruntime takes what the processor has.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import onnx
from cnn_measure import OURS, Absent, Effort, Latency, Throughput, latency, throughput
from cnn_models import NAMES, TINY_NAMES, Workload, workload
from environment import describe

from dagexec.platform.processor import available_cores

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "cnn.json"
QUICK = Effort(turn_seconds=0.02, rounds=3, settings_rounds=1, serve_seconds=0.05, serve_rounds=1)


def main() -> None:
    options = _arguments()
    if options.write_docs:
        from cnn_page import write_page  # needs matplotlib: better now than after an hour
    effort = QUICK if options.quick else dataclasses.replace(Effort(), rounds=options.rounds)
    absent = Absent(print)
    environment = describe()
    where = f"{environment['processor']}, {environment['instruction set']}"
    latencies: list[Latency] = []
    throughputs: list[Throughput] = []
    for name in options.models:
        for batch in options.batch if name in NAMES else options.batch[:1]:
            with _stored(workload(name, batch)) as (load, file):
                for threads in options.threads:
                    latencies.append(latency(load, file, threads, effort, absent, torch=options.torch))
                    _print(latencies[-1], where)
                if batch == options.batch[0] and options.serve and name in NAMES:
                    throughputs.append(throughput(load, file, max(options.threads), effort, absent))
                    _print_rates(throughputs[-1], where)
    report = {
        "environment": environment,
        "effort": asdict(effort),
        "absent": absent.reasons,
        "latencies": [asdict(row) for row in latencies],
        "throughputs": [asdict(row) for row in throughputs],
    }
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    if options.write_docs:
        reports: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        name = str(environment["instruction set"])
        reports[name] = added(reports[name], report) if options.add and name in reports else report
        RESULTS.write_text(json.dumps(reports, indent=1) + "\n")
        write_page(reports, ROOT / "docs")


def added(before: Mapping[str, Any], report: dict[str, Any]) -> dict[str, Any]:
    """The report with the rows of `before` that it lacks. Raises SystemExit where those were measured otherwise."""
    for what in ("environment", "effort"):
        if before[what] != report[what]:
            raise SystemExit(f"--add: another {what} measured the rows that are there: {before[what]}, {report[what]}")

    def place(row: Mapping[str, Any]) -> tuple[int, int, int]:
        return [*NAMES, *TINY_NAMES].index(row["model"]), row.get("batch", 1), row.get("threads", 1)

    merged = dict(report)
    for kind in ("latencies", "throughputs"):
        rows = {place(row): row for row in (*before[kind], *report[kind])}
        merged[kind] = [rows[key] for key in sorted(rows)]
    return merged


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=[*NAMES, *TINY_NAMES], help="networks, by default all")
    parser.add_argument("--batch", nargs="*", type=int, default=[1, 8])
    parser.add_argument("--threads", nargs="*", type=int, default=[n for n in (1, 2) if n <= available_cores()])
    parser.add_argument("--no-torch", dest="torch", action="store_false", help="leave PyTorch out, which takes longest")
    parser.add_argument("--no-serve", dest="serve", action="store_false", help="leave concurrent requests out")
    parser.add_argument("--quick", action="store_true", help="few short rounds: whether it works, not how fast")
    parser.add_argument("--rounds", type=int, default=Effort().rounds, help="of turns, interleaved")
    parser.add_argument("--write-docs", action="store_true")
    parser.add_argument("--add", action="store_true", help="keep the rows of other networks in the results")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


@contextmanager
def _stored(load: Workload) -> Iterator[tuple[Workload, Path]]:
    """The workload with its model in a file, which every contender reads."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"{load.name}.onnx"
        onnx.save(load.model, os.fspath(file))
        yield load, file


def _print(row: Latency, where: str) -> None:
    print(
        f"{where}: {row.model}, batch {row.batch}, {row.threads} threads: {row.gflop:.2f} GFLOP, "
        f"floor {row.floor_ms:.2f} ms; others computed {row.disturbance:.1%} of a turn at most"
    )
    for column, time in row.times.items():
        ratio = "" if column == OURS else f"  dagexec / it {row.ratios[column]:.3f}"
        print(f"  {column:20} {time.milliseconds:9.3f} ms  loaded in {time.load_seconds:5.1f} s{ratio}", flush=True)
        for setting, milliseconds in time.tried.items():
            print(f"    {setting:70} {milliseconds:9.3f} ms")


def _print_rates(row: Throughput, where: str) -> None:
    print(f"{where}: {row.model}, concurrent requests")
    for column, rate in row.rates.items():
        ratio = "" if column == OURS else f"  dagexec / it {row.ratios[column]:.3f}"
        setting: dict[str, Any] = dict(row.settings[column])
        print(f"  {column:20} {rate:9.1f} a second  {setting}{ratio}", flush=True)


if __name__ == "__main__":
    main()
