"""Whether time limits hold: compile() with seconds for tuning and an empty cache, and Ctrl-C at many moments.

    python benchmarks/tuning_limits.py [--seconds 2 10] [--interrupts 12] [--json benchmarks/results/tuning_limits.json]
        [MODEL...]

Each compilation is the first of a new process; loading the model and making its parameters is not counted. Beyond its
seconds it may take a fifth of them and one run of the net, which is what `over` says: 1 or less is within. Commands are
interrupted at moments spread over their first seconds, from the first thing that they show on. Results are kept by
instruction set: repeat with ONEDNN_MAX_CPU_ISA for others. What is not measured anew stays in the file.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from environment import describe

MODELS = ("squeezenet", "mobilenet_v2", "nasnet_a")
ALLOWED = 1.2
COMMANDS = (
    ("compare", "zoo:squeezenet", "--tuning-seconds", "5"),
    ("run", "zoo:mobilenet_v2", "--tuning-seconds", "5"),
    ("tune", "zoo:squeezenet", "--seconds", "5"),
)
INTERRUPTED = 130
SPREAD_SECONDS = 6.0


# --- in a process of its own


def compile_once(source: str, seconds: float) -> dict[str, Any]:
    """Seconds that compilation takes, and a run of what comes out."""
    from dagexec.analysis.comparison import random_feeds
    from dagexec.binding.parameters import initialized
    from dagexec.compiler.compilation import compile_model
    from dagexec.executor.compile import compile as compile_executor
    from dagexec.executor.source.loading import load_model
    from dagexec.options import CompileOptions

    model = initialized(load_model(f"zoo:{source}"))
    start = time.perf_counter()
    compiled = compile_model(model, CompileOptions(tuning_seconds=seconds))
    took = time.perf_counter() - start
    assert compiled.report is not None
    feeds = random_feeds(model)
    times = []
    with compile_executor(model, tuning_seconds=0) as executor:  # takes what was chosen
        for _ in range(8):
            start = time.perf_counter()
            executor.run(feeds)
            times.append(time.perf_counter() - start)
    run = float(np.median(times))
    return {
        "model": source,
        "seconds": seconds,
        "compile_seconds": took,
        "run_ms": run * 1e3,
        "over": (took - run) / (ALLOWED * seconds),
        "layout": compiled.report.layout,
        "origin": compiled.report.origin,
        "stages": dict(compiled.report.seconds),
    }


# --- in the process that measures


def child_environment(choices: Path) -> dict[str, str]:
    """That of a user with an empty cache, at a terminal."""
    return os.environ | {"DAGEXEC_CHOICES": str(choices), "FORCE_COLOR": "1"}


def limit(source: str, seconds: float) -> dict[str, Any]:
    """`compile_once` in a new process with an empty cache."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--child", source, "--seconds", str(seconds)]
        environment = child_environment(Path(folder) / "choices.json")
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def interrupt(command: tuple[str, ...], after: float) -> dict[str, Any]:
    """How long a command goes on after Ctrl-C, `after` seconds from the first thing that it shows."""
    with tempfile.TemporaryDirectory() as folder:
        choices = Path(folder) / "choices.json"
        words = [sys.executable, "-m", "dagexec", *command]
        with subprocess.Popen(
            words, env=child_environment(choices), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        ) as process:
            assert process.stderr is not None
            start = time.perf_counter()
            process.stderr.read(1)
            shown = time.perf_counter() - start
            time.sleep(after)
            process.send_signal(signal.SIGINT)
            start = time.perf_counter()
            rest = process.stderr.read()
            status = process.wait()
            took = time.perf_counter() - start
        if choices.exists():
            json.loads(choices.read_text())
    return {
        "command": " ".join(command[:2]),
        "first_shown_seconds": shown,
        "after_seconds": after,
        "ended_in_seconds": took,
        "status": status,
        "traceback": b"Traceback" in rest,
    }


def main() -> None:
    """Measure, print a line for each, keep all in a JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=MODELS, help="of the zoo, or none")
    parser.add_argument("--seconds", nargs="+", type=float, default=[2.0, 10.0])
    parser.add_argument("--interrupts", type=int, default=12, help="of each command")
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "tuning_limits.json")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(compile_once(options.child, options.seconds[0])))
        return
    rows = []
    for source in () if "none" in options.models else options.models:
        for seconds in options.seconds:
            row = limit(source, seconds)
            rows.append(row)
            took, run = row["compile_seconds"], row["run_ms"]
            print(
                f"{source:14} {seconds:4g} s: {took:6.2f} s, a run {run:.2f} ms, {row['over']:.2f} of what is allowed"
            )
    ended = []
    for command in COMMANDS if options.interrupts else ():
        for number in range(options.interrupts):
            row = interrupt(command, SPREAD_SECONDS * number / options.interrupts)
            ended.append(row)
            print("{command}: after {after_seconds:.1f} s, in {ended_in_seconds:.2f} s, status {status}".format(**row))
    environment = describe()
    kept = json.loads(options.json.read_text()) if options.json.exists() else {}
    record: dict[str, Any] = kept.setdefault(str(environment.get("instruction set", "no oneDNN")), {})
    record["environment"] = environment
    old = {(row["model"], row["seconds"]): row for row in record.get("compilations", ())}
    record["compilations"] = list((old | {(row["model"], row["seconds"]): row for row in rows}).values())
    if ended:
        record["interrupts"] = ended
        stopped = [row["ended_in_seconds"] for row in ended if row["status"] == INTERRUPTED]
        if stopped:
            record["longest_seconds_after_interrupt"] = max(stopped)
            print(f"the longest after Ctrl-C: {max(stopped):.2f} s")
    options.json.write_text(json.dumps(dict(sorted(kept.items())), indent=1) + "\n")


if __name__ == "__main__":
    main()
