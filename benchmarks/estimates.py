"""How near estimates come to what nets take on one thread, and predictions to what they take on several.

    python benchmarks/estimates.py [--workers 2] [--json benchmarks/results/estimates.json] [MODEL...]

By default the networks of the zoo, batch 1. Operators are timed by the processor time of their thread, the shortest of
ten runs each. Estimates are those of `compile` before anything has run. Predictions start from what the tasks of a run
on one worker took, as machine code counts it, and are compared with the median of runs. Target: estimates within a
factor of 2.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import numpy as np
from environment import write_report

from dagexec import zoo
from dagexec.binding.parameters import initialized, parameter_workspace
from dagexec.compiler.compilation import compile_model
from dagexec.compiler.tuning.bench import random_inputs
from dagexec.compiler.tuning.choosing import Estimated
from dagexec.compiler.tuning.runner import Runner, Trial
from dagexec.executor.source.loading import load_model
from dagexec.options import CompileOptions
from dagexec.scheduler.nets.options import RunOptions
from dagexec.scheduler.run.prediction import Hardware, predict_host

RUNS = 10
WAKE_SECONDS, PIECE_SECONDS = 40e-6, 0.2e-6


def measure(source: str, workers: int) -> dict[str, object]:
    """A model's row; times in milliseconds."""
    model = compile_model(initialized(load_model(source)), CompileOptions(tuning_seconds=0)).model
    inputs = random_inputs(model, {})
    assert inputs is not None
    estimated = Estimated(model, inputs).tasks
    assert estimated is not None
    with Runner(Trial(model), parameter_workspace(model)) as simple:
        simple.run(inputs)
        took = float(np.sum(np.min([simple.run_operators(inputs) for _ in range(RUNS)], axis=0)))
    row: dict[str, object] = {
        "model": source,
        "operators": len(model.net.op),
        "measured_ms": took * 1e3,
        "estimated_ms": estimated.work * 1e3,
        "ratio": estimated.work / took,
    }
    options = [RunOptions(net_type="dag", num_workers=count) for count in (1, workers)]
    with (
        Runner(Trial(model, options[0]), parameter_workspace(model)) as alone,
        Runner(Trial(model, options[1]), parameter_workspace(model)) as together,
    ):
        times: list[list[float]] = [[], []]
        for _ in range(RUNS):
            for runner, row_of_times in zip((alone, together), times, strict=True):
                runner.run(inputs)
                start = time.perf_counter()
                runner.run(inputs)
                row_of_times.append(time.perf_counter() - start)
        tasks = alone.measured_tasks()
    if tasks is not None:
        for count, seconds in zip((1, workers), map(statistics.median, times), strict=True):
            predicted = predict_host(tasks, Hardware(count, 0, PIECE_SECONDS, WAKE_SECONDS))
            row |= {f"predicted_{count}_ms": predicted * 1e3, f"median_{count}_ms": seconds * 1e3}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", default=[f"zoo:{name}" for name in zoo.names()])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    for source in arguments.models:
        rows.append(measure(source, arguments.workers))
        print("  ".join(f"{key} {one:.3f}" if isinstance(one, float) else str(one) for key, one in rows[-1].items()))
    if arguments.json is not None:
        write_report(arguments.json, rows=rows)


if __name__ == "__main__":
    main()
