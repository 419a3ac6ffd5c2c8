"""The static proof of `dagexec check`: seconds for 10,000 operators of a net and 100,000 of a foreign graph.

    python benchmarks/hazard_check.py [--operators 10000] [--repeat 5] [--json benchmarks/results/hazard_check.json]

Every shape is proved as the scheduler would chain it and with every operator a chain of its own, which is the most that
a proof of so many operators has to do. The graph and the plan are made before and timed apart. All seconds are of the
processor, as one thread does everything.

A foreign graph is read from its file and proved. Its operators read what the one before
and another one of the last forty wrote, and wait for its event; in "distant writes" each also writes over what was
written half of the list before, on another stream.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

from environment import write_report
from scheduler_cost import SHAPES, noop_net

from dagexec.analysis.foreign_graphs import read_graph
from dagexec.core.device import Device
from dagexec.core.graph import build_graph
from dagexec.scheduler.hazards import check_plan
from dagexec.scheduler.hazards.foreign import check_graph
from dagexec.scheduler.plan.chains import single_operator_chains
from dagexec.scheduler.plan.plan import build_plan
from dagexec.scheduler.plan.synchronization import synchronize

LIMIT_SECONDS = 5.0
FOREIGN_OPERATORS = 100_000
FOREIGN_LIMIT_SECONDS = 2.0


def measure(operators: int, repeat: int) -> dict[str, dict[str, dict[str, float | int]]]:
    results: dict[str, dict[str, dict[str, float | int]]] = {}
    for shape, parents_of in SHAPES.items():
        definition = noop_net(shape, parents_of(operators))
        definition.device_option.CopyFrom(Device("sim").to_option())
        start = time.process_time()
        graph = build_graph(definition)
        graph_seconds = time.process_time() - start
        results[shape] = {}
        for chaining in ("chains", "single operators"):
            start = time.process_time()
            chains = None if chaining == "chains" else single_operator_chains(graph)
            plan = build_plan(graph, [1e-6] * len(graph), chains)
            plan_seconds = time.process_time() - start
            sync = synchronize(plan, [()] * len(graph))
            seconds = []
            for _ in range(repeat):
                start = time.process_time()
                proof = check_plan(plan, sync)
                seconds.append(time.process_time() - start)
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


def foreign_graph(operators: int, streams: int, distant: bool) -> dict[str, object]:
    draw = random.Random(0)
    rows = []
    for index in range(operators):
        read = sorted({index - 1, index - draw.randint(2, 40)} - set(range(-40, 0)))
        written = [index, index - operators // 2 + 1] if distant and 2 * index > operators else [index]
        rows.append(
            {
                "name": f"operator {index}",
                "stream": f"stream {index % streams}",
                "reads": [f"x{number}" for number in read],
                "writes": [f"x{number}" for number in written],
                "waits": [f"end of {number}" for number in read],
                "records": [f"end of {index}"],
            }
        )
    return {"name": "pipeline", "operators": rows}


def measure_foreign(repeat: int) -> dict[str, dict[str, float | int]]:
    results: dict[str, dict[str, float | int]] = {}
    for streams in (4, FOREIGN_OPERATORS):
        for distant in (False, True):
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder, "graph.json")
                path.write_text(json.dumps(foreign_graph(FOREIGN_OPERATORS, streams, distant)))
                seconds = []
                for _ in range(repeat):
                    start = time.process_time()
                    graph = read_graph(path)
                    middle = time.process_time()
                    proof = check_graph(graph)
                    seconds.append((middle - start, time.process_time() - middle))
                    if not proof.holds:
                        sys.exit(f"{streams} streams: {proof.unordered[0]}")
                    del graph  # before the next one is timed
            name = f"{streams:,} streams" + (", distant writes" if distant else "")
            results[name] = {
                "operators": proof.operators,
                "pairs": proof.pairs_checked,
                "read_median_s": statistics.median(read for read, _ in seconds),
                "proof_median_s": statistics.median(proved for _, proved in seconds),
                "most_s": max(map(sum, seconds)),
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
    foreign = measure_foreign(options.repeat)
    for name, found in foreign.items():
        print(
            f"foreign graph of {found['operators']:,} operators, {name}: read in {found['read_median_s']:.2f} s, "
            f"proved in {found['proof_median_s']:.2f} s (most {found['most_s']:.2f} s, limit {FOREIGN_LIMIT_SECONDS} s)"
        )
    if options.json:
        limits = {"limit_s": LIMIT_SECONDS, "foreign_limit_s": FOREIGN_LIMIT_SECONDS}
        write_report(options.json, **limits, most_s=most, results=results, foreign=foreign)
    if options.operators <= 10_000 and most > LIMIT_SECONDS:
        sys.exit(1)


if __name__ == "__main__":
    main()
