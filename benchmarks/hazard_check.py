"""The static proof of `dagexec check`: seconds for 10,000 operators in four shapes, on a device and on the host.

    python benchmarks/hazard_check.py [--operators 10000] [--repeat 5] [--json benchmarks/results/hazard_check.json]

Every shape is proved as the scheduler would chain it and with every operator a chain of its own, which is the most that
a proof of so many operators has to do. The graph and the plan are made before and timed apart.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

from environment import write_report
from scheduler_cost import SHAPES, noop_net

from dagexec.core.device import Device
from dagexec.core.graph import build_graph
from dagexec.scheduler.hazards import check_plan
from dagexec.scheduler.plan.chains import single_operator_chains
from dagexec.scheduler.plan.plan import build_plan
from dagexec.scheduler.plan.synchronization import synchronize

LIMIT_SECONDS = 5.0


def measure(operators: int, repeat: int) -> dict[str, dict[str, dict[str, float | int]]]:
    results: dict[str, dict[str, dict[str, float | int]]] = {}
    for shape, parents_of in SHAPES.items():
        definition = noop_net(shape, parents_of(operators))
        definition.device_option.CopyFrom(Device("sim").to_option())
        start = time.perf_counter()
        graph = build_graph(definition)
        graph_seconds = time.perf_counter() - start
        results[shape] = {}
        for chaining in ("chains", "single operators"):
            start = time.perf_counter()
            chains = None if chaining == "chains" else single_operator_chains(graph)
            plan = build_plan(graph, [1e-6] * len(graph), chains)
            plan_seconds = time.perf_counter() - start
            sync = synchronize(plan, [()] * len(graph))
            seconds = []
            for _ in range(repeat):
                start = time.perf_counter()
                proof = check_plan(plan, sync)
                seconds.append(time.perf_counter() - start)
                if not proof.holds:
                    sys.exit(f"{shape}: {proof.unordered[0]}")
            results[shape][chaining] = {
                "operators": len(graph),
                "chains": proof.chains,
                "waits": proof.waits,
                "pairs": proof.pairs_checked,
                "graph_s": graph_seconds,
                "plan_s": plan_seconds,
                "proof_median_s": statistics.median(seconds),
                "proof_most_s": max(seconds),
            }
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--operators", type=int, default=10_000)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = measure(options.operators, options.repeat)
    for shape, rows in results.items():
        for chaining, row in rows.items():
            print(
                f"{shape:12} {chaining:17} {row['chains']:6} chains {row['waits']:6} waits {row['pairs']:6} pairs  "
                f"proof {row['proof_median_s']:.3f} s (most {row['proof_most_s']:.3f} s)"
            )
    most = max(row["proof_most_s"] for rows in results.values() for row in rows.values())
    print(f"most: {most:.3f} s, limit {LIMIT_SECONDS} s")
    if options.json:
        write_report(options.json, limit_s=LIMIT_SECONDS, most_s=most, results=results)
    if options.operators <= 10_000 and most > LIMIT_SECONDS:
        sys.exit(1)


if __name__ == "__main__":
    main()
