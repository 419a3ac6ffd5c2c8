"""Whole networks: dagexec against onnxruntime, OpenVINO and PyTorch, each at its best settings, on the processor.

    python benchmarks/cnn.py [--quick] [--models resnet50 ...] [--batch 1 8] [--threads 1 2] [--no-torch]
                             [--write-docs] [--json FILE]

Every contender is a process of its own that sleeps while another's turn is measured, on the first 1 or 2 cores; turns
are interleaved, outputs compared, and nothing is reported when one differs. A peer that is not installed is left out.
`--write-docs` writes benchmarks/results/cnn.json, docs/benchmarks.md and docs/benchmarks.svg. `make benchmark-cnn`
installs the peers and does it all.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import onnx
from cnn_measure import OURS, Absent, Effort, Latency, Throughput, latency, throughput
from cnn_models import NAMES, TINY_NAMES, Workload, workload
from environment import describe

from dagexec.core.processor import available_cores

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "cnn.json"
QUICK = Effort(turn_seconds=0.02, rounds=3, settings_rounds=1, serve_seconds=0.05, serve_rounds=1)


def main() -> None:
    options = _arguments()
    if options.write_docs:
        from cnn_page import write_page  # needs matplotlib: better now than after an hour
    effort = QUICK if options.quick else Effort()
    absent = Absent(print)
    latencies: list[Latency] = []
    throughputs: list[Throughput] = []
    for name in options.models:
        for batch in options.batch if name in NAMES else options.batch[:1]:
            with _stored(workload(name, batch)) as (load, file):
                for threads in options.threads:
                    latencies.append(latency(load, file, threads, effort, absent, torch=options.torch))
                    _print(latencies[-1])
                if batch == options.batch[0] and options.serve and name in NAMES:
                    throughputs.append(throughput(load, file, max(options.threads), effort, absent))
                    _print_rates(throughputs[-1])
    report = {
        "environment": describe(),
        "effort": asdict(effort),
        "absent": absent.reasons,
        "latencies": [asdict(row) for row in latencies],
        "throughputs": [asdict(row) for row in throughputs],
    }
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    if options.write_docs:
        RESULTS.write_text(json.dumps(report, indent=1) + "\n")
        write_page(report, ROOT / "docs")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=[*NAMES, *TINY_NAMES], help="networks, by default all")
    parser.add_argument("--batch", nargs="*", type=int, default=[1, 8])
    parser.add_argument("--threads", nargs="*", type=int, default=[n for n in (1, 2) if n <= available_cores()])
    parser.add_argument("--no-torch", dest="torch", action="store_false", help="leave PyTorch out, which takes longest")
    parser.add_argument("--no-serve", dest="serve", action="store_false", help="leave concurrent requests out")
    parser.add_argument("--quick", action="store_true", help="few short rounds: whether it works, not how fast")
    parser.add_argument("--write-docs", action="store_true")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


@contextmanager
def _stored(load: Workload) -> Iterator[tuple[Workload, Path]]:
    """The workload with its model in a file, which every contender reads."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"{load.name}.onnx"
        onnx.save(load.model, os.fspath(file))
        yield load, file


def _print(row: Latency) -> None:
    print(
        f"{row.model}, batch {row.batch}, {row.threads} threads: {row.gflop:.2f} GFLOP, floor {row.floor_ms:.2f} ms; "
        f"others computed {row.disturbance:.1%} of a turn at most"
    )
    for column, time in row.times.items():
        ratio = "" if column == OURS else f"  dagexec / it {row.ratios[column]:.3f}"
        print(f"  {column:20} {time.milliseconds:9.3f} ms  loaded in {time.load_seconds:5.1f} s{ratio}", flush=True)
        for setting, milliseconds in time.tried.items():
            print(f"    {setting:70} {milliseconds:9.3f} ms")


def _print_rates(row: Throughput) -> None:
    print(f"{row.model}, concurrent requests")
    for column, rate in row.rates.items():
        ratio = "" if column == OURS else f"  dagexec / it {row.ratios[column]:.3f}"
        setting: dict[str, Any] = dict(row.settings[column])
        print(f"  {column:20} {rate:9.1f} a second  {setting}{ratio}", flush=True)


if __name__ == "__main__":
    main()
