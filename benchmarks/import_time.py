"""Processor time of a process that imports dagexec, beside one that imports NumPy and one that imports nothing.

    python benchmarks/import_time.py [--processes 15] [--json benchmarks/results/import_time.json]

User and system time of all threads, as the system counts it; medians of processes in turns. One process of each kind
goes first, uncounted, so that bytecode is written and files are in the cache of the disk.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from pathlib import Path

from environment import write_report

STATEMENTS = {"python": "pass", "numpy": "import numpy", "dagexec": "import dagexec"}


def processor_seconds(statement: str) -> float:
    """What a new process takes for `statement`. Raises RuntimeError when it fails."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    child = os.posix_spawn(sys.executable, [sys.executable, "-c", statement], environment)
    _, status, used = os.wait4(child, 0)
    if status != 0:
        raise RuntimeError(f"{statement!r} ended with status {os.waitstatus_to_exitcode(status)}")
    return used.ru_utime + used.ru_stime


def measure(processes: int) -> dict[str, list[float]]:
    """Seconds of each process, by name in STATEMENTS."""
    for statement in STATEMENTS.values():
        processor_seconds(statement)
    seconds: dict[str, list[float]] = {name: [] for name in STATEMENTS}
    for _ in range(processes):
        for name, statement in STATEMENTS.items():
            seconds[name].append(processor_seconds(statement))
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    medians = {name: statistics.median(each) for name, each in measure(options.processes).items()}
    for name, seconds in medians.items():
        print(f"{name:8} {seconds:.3f} s")
    if options.json is not None:
        write_report(options.json, processes=options.processes, processor_seconds=medians)


if __name__ == "__main__":
    main()
