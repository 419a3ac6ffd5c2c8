"""What inter-operator parallelism gives: DAGNet against SimpleNet, one thread an operator, interleaved.

    python benchmarks/inter_op.py [--repeat 25] [--json benchmarks/results/inter_op.json]

Targets with 2 workers: on googlenet at least 0.93 of the speed-up that list scheduling predicts from the measured
operator times; on four squeezenet towers in one graph at least 1.85 times SimpleNet; on vgg19, a plain chain, never
less than 0.97.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from environment import write_report

from dagexec.analysis.comparison import Comparison, RuntimeResult, compare
from dagexec.options import CompileOptions

MODELS = ("zoo:googlenet", "zoo:squeezenet_towers", "zoo:vgg19")


def rows(comparison: Comparison) -> dict[str, RuntimeResult]:
    return {f"{row.net_type} {row.workers}": row for row in comparison.rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=25)
    parser.add_argument("--models", nargs="*", default=MODELS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = {}
    for model in options.models:
        comparison = compare(model, CompileOptions(optimize=False), repeat=options.repeat)
        if not comparison.agrees:
            raise SystemExit(f"{model}: results differ from SimpleNet's; nothing is reported")
        print(model)
        for name, row in rows(comparison).items():
            print(
                f"  {name:12} {row.median_ms:8.2f} ms  speed-up {row.speed_up:.3f}  list scheduling {row.predicted:.3f}"
                f"  reached {row.speed_up / row.predicted:.3f}"
            )
        results[model] = {name: asdict(row) for name, row in rows(comparison).items()}
    if options.json:
        write_report(options.json, repeat=options.repeat, results=results)


if __name__ == "__main__":
    main()
