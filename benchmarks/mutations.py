"""How many waits, records, mutexes and dependencies were taken from plans, one at a time, and how many were missed.

    python benchmarks/mutations.py [--case NAME] [--json benchmarks/results/mutations.json]

For each case and kind: mutants tried; those that lack something they need, by a judge that shares nothing with the
proof (`tests/planted/plans.py`); those that the static proof and the detector of a run have found. A run has every
chain on a stream of its own. A record that is left out makes the run end with an error, and counts as found by that; a
lost record is one that nobody notices to be missing. Exits with status 1 when what was needed was not found, or
something was found that was not needed.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from environment import write_report

from tests.planted.plans import MutantNet, conflicts_of, mutants_of, try_mutant
from tests.planted.zoo import CASES, Case, mutant_net, random_mutant_net

KINDS = ("wait", "record", "lost record", "guard", "dependency")
RANDOM_NETS = 20
Counts = dict[str, dict[str, int]]


def measure(case: Case) -> Counts:
    with mutant_net(case) as net:
        return counts_of(net)


def measure_random(nets: int) -> Counts:
    total = {kind: Counter[str]() for kind in KINDS}
    for seed in range(nets):
        with random_mutant_net(seed) as net:
            for kind, row in counts_of(net).items():
                total[kind].update(row)
    return {kind: dict(row) for kind, row in total.items() if row}


def counts_of(net: MutantNet) -> Counts:
    counts = {kind: Counter[str]() for kind in KINDS}
    conflicts = conflicts_of(net)
    for mutant in mutants_of(net):
        outcome = try_mutant(net, mutant, conflicts)
        found = outcome.disproved
        counts[mutant.kind].update(
            tried=1,
            needed=outcome.needed,
            proof=outcome.needed and found,
            detector=outcome.needed and outcome.detected,
            false_alarms=not outcome.needed and (found or outcome.detected),
        )
    return {kind: dict(row) for kind, row in counts.items() if row}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", metavar="NAME", help="this one only")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    logging.disable(logging.WARNING)  # of runs that end with an error, as they should
    results: dict[str, Counts] = {}
    total = {kind: Counter[str]() for kind in KINDS}
    measures = {case.name: partial(measure, case) for case in CASES}
    measures[f"{RANDOM_NETS} random nets"] = partial(measure_random, RANDOM_NETS)
    for name, counts in measures.items():
        if options.case in (None, name):
            start = time.perf_counter()
            results[name] = counts()
            print(f"{name} ({time.perf_counter() - start:.0f} s)")
            for kind, row in results[name].items():
                total[kind].update(row)
                print(f"  {kind:12}", "  ".join(f"{what} {count}" for what, count in row.items()), flush=True)
    print("all")
    for kind, sums in total.items():
        print(f"  {kind:12}", "  ".join(f"{what} {count}" for what, count in sums.items()))
    missed = sum(2 * row["needed"] - row["proof"] - row["detector"] + row["false_alarms"] for row in total.values())
    if options.json:
        write_report(options.json, total={k: dict(c) for k, c in total.items()}, cases=results)
    if missed:
        sys.exit(f"{missed} missed or found for nothing")


if __name__ == "__main__":
    main()
