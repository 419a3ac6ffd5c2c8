"""How many schedules each sampling strategy needs to find the planted bugs, and how few preemptions show them.

    python benchmarks/planted.py [--bug TEXT] [--trials 100] [--processes 2] [--json benchmarks/results/planted.json]

A trial is a stretch of seeds of its own, up to the first schedule in which the bug shows (`tests/planted`), or
MOST schedules. Of the first failing schedule of the portfolio, one with fewer preemptions is looked for that fails
likewise. Bugs that need a long exact sequence (`deep`) are looked for in one trial of MOST_WHEN_DEEP random walks, and
in MOST_REDUCED schedules with reduction. What `--json` has of bugs that are not measured now stays there.
"""

from __future__ import annotations

import argparse
import json
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

from dagexec.scheduler.exploration import Sampling, explore_seeds, reduction
from dagexec.scheduler.exploration.fewest import fewest_preemptions
from tests.planted import deep
from tests.planted.bug import Bug, planted
from tests.planted.catalog import BUGS

MOST, MOST_WHEN_DEEP, MOST_REDUCED = 10_000, 100_000, 1_000
APART = 1_000_000  # between the first seeds of two trials; a multiple of the portfolio's turns
SHRINK_SECONDS = 60.0
KINDS = (*get_args(Sampling), "preemptions", "reduction")


@dataclass(frozen=True)
class Found:
    """What one strategy needs for one bug.

    Attributes:
        schedules: the median over the trials; the most that are tried where half of them found nothing.
        trials: how many were made; one, if that is of very many schedules.
        missed: trials that found nothing.
    """

    schedules: float
    trials: int
    missed: int


def needed(bug: Bug, strategy: str, trials: int) -> Found:
    most = MOST
    if bug in deep.BUGS and strategy == "random":
        trials, most = 1, MOST_WHEN_DEEP
    counts: list[int] = []
    with planted(bug):
        for trial in range(trials):
            seeds = range(trial * APART, trial * APART + most)
            found = explore_seeds(bug.scene, seeds, strategy=strategy, timeouts=bug.timeouts)  # type: ignore[arg-type]
            counts.append(found.tried if found.failed is not None else most + 1)
            missed = sum(count > most for count in counts)
            if 2 * missed >= trials:
                break
    return Found(most if 2 * missed >= trials else statistics.median(counts), len(counts), missed)


def reduced(bug: Bug) -> Found:
    """With reduction, of what fields are guarded by locks."""
    with planted(bug):
        found = reduction(bug.scene, MOST_REDUCED, race_free=True, timeouts=bug.timeouts)
    return Found(found.tried, 1, int(found.failed is None))


def preemptions(bug: Bug) -> dict[str, object]:
    """Of the schedule with the fewest that was found, and whether there is none with fewer."""
    with planted(bug):
        found = explore_seeds(bug.scene, range(MOST), timeouts=bug.timeouts)
        assert found.failed is not None
        shrunk = fewest_preemptions(bug.scene, found.failed, seconds=SHRINK_SECONDS)
    return {"fewest": shrunk.preemptions, "proved": shrunk.fewest}


def measured(job: tuple[str, str, int]) -> tuple[str, str, object]:
    """One thing of one bug, in a process of its own."""
    logging.disable(logging.CRITICAL)
    os.nice(5)
    name, what, trials = job
    bug = next(bug for bug in BUGS if bug.name == name)
    if what == "preemptions":
        return name, what, preemptions(bug)
    return name, what, asdict(reduced(bug) if what == "reduction" else needed(bug, what, trials))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bug", metavar="TEXT", default="", help="those with this in their names")
    parser.add_argument("--what", choices=KINDS, help="this only")
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    sampled = [bug for bug in BUGS if bug.found_by == "schedules"]
    results: dict[str, dict[str, object]] = {bug.name: {} for bug in sampled}
    if options.json and options.json.exists():
        known = json.loads(options.json.read_text())["bugs"]
        results = {name: known.get(name, {}) for name in results}
    jobs = [
        (bug.name, what, options.trials)
        for what in KINDS
        for bug in sampled
        if options.bug in bug.name and options.what in (None, what) and (what != "reduction" or bug in deep.BUGS)
    ]
    with multiprocessing.get_context("spawn").Pool(options.processes, maxtasksperchild=1) as pool:
        for name, what, found in pool.imap_unordered(measured, jobs):
            results[name][what] = found
            print(name, what, found, flush=True)
            if options.json:
                write_report(options.json, most=MOST, most_when_deep=MOST_WHEN_DEEP, bugs=results)


if __name__ == "__main__":
    main()
