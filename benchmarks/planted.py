"""How many schedules each sampling strategy needs to find the planted bugs, and how few preemptions show them.

    python benchmarks/planted.py [--bug TEXT] [--trials 100] [--processes 2] [--json benchmarks/results/planted.json]

A trial is a stretch of seeds of its own, up to the first schedule in which the bug shows (`tests/planted`), or
MOST schedules. Of the first failing schedule of the portfolio, a shorter one is looked for that fails likewise, with
fewer preemptions. Bugs that need a long exact sequence are given `--deep` schedules of the random walk, and are then
looked for among all schedules with reduction.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import get_args

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from environment import write_report

from dagexec.scheduler.exploration import Sampling, explore_seeds
from dagexec.scheduler.exploration.fewest import fewest_preemptions
from tests.planted.bug import Bug, planted
from tests.planted.catalog import BUGS

MOST = 10_000
APART = 1_000_000  # between the first seeds of two trials; a multiple of the portfolio's turns
SHRINK_SECONDS = 60.0


@dataclass(frozen=True)
class Found:
    """What one strategy needs for one bug.

    Attributes:
        schedules: the median over the trials; MOST where more than half of them found nothing.
        trials: how many were made: no more than half of them and one, where they all find nothing.
        missed: trials that found nothing.
    """

    schedules: float
    trials: int
    missed: int


def needed(bug: Bug, strategy: Sampling, trials: int) -> Found:
    counts: list[int] = []
    with planted(bug):
        for trial in range(trials):
            seeds = range(trial * APART, trial * APART + MOST)
            found = explore_seeds(bug.scene, seeds, strategy=strategy, timeouts=bug.timeouts)
            counts.append(found.tried if found.failed is not None else MOST + 1)
            missed = sum(count > MOST for count in counts)
            if missed > trials // 2:
                break
    return Found(min(MOST, statistics.median(counts)), len(counts), missed)


def preemptions(bug: Bug) -> tuple[int, bool]:
    """Of the shortest schedule found, and whether there is none with fewer."""
    with planted(bug):
        found = explore_seeds(bug.scene, range(MOST), timeouts=bug.timeouts)
        assert found.failed is not None
        shrunk = fewest_preemptions(bug.scene, found.failed, seconds=SHRINK_SECONDS)
    return shrunk.preemptions, shrunk.fewest


def measured(job: tuple[str, int]) -> tuple[str, dict[str, object]]:
    """All of one bug, in a process of its own."""
    logging.disable(logging.CRITICAL)
    os.nice(10)
    name, trials = job
    bug = next(bug for bug in BUGS if bug.name == name)
    found: dict[str, object] = {one: asdict(needed(bug, one, trials)) for one in get_args(Sampling)}
    fewest, proved = preemptions(bug)
    return name, found | {"preemptions": fewest, "none_with_fewer": proved}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bug", metavar="TEXT", default="", help="those with this in their names")
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    bugs = [bug for bug in BUGS if options.bug in bug.name and bug.found_by == "schedules"]
    results: dict[str, dict[str, object]] = {}
    with multiprocessing.get_context("spawn").Pool(options.processes, maxtasksperchild=1) as pool:
        for name, found in pool.imap_unordered(measured, [(bug.name, options.trials) for bug in bugs]):
            results[name] = found
            print(name, found, flush=True)
    if options.json:
        write_report(options.json, trials=options.trials, most=MOST, bugs=results)


if __name__ == "__main__":
    main()
