"""`python -m tests.fuzz`: many cases, or one; docs/testing.md says what is counted."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from pathlib import Path
from typing import get_args

os.environ["DAGEXEC_CHOICES"] = os.environ["DAGEXEC_KERNELS"] = "off"  # before anything of dagexec looks
os.environ["DAGEXEC_TUNING_SECONDS"] = "0"
os.environ["OPENBLAS_NUM_THREADS"] = "1"  # before NumPy starts threads

from tests.fuzz.case import Cases, WholeCases
from tests.fuzz.runner import Summary, run_cases
from tests.fuzz.seeds import DRAWN, Kind, Seed, make_seeds
from tests.fuzz.worker import Outcome
from tests.selection import number_of_commit


def main() -> int:
    """Exit status 1 when a case failed."""
    options = _options()
    seeds = [DRAWN] if options.kind == ["drawn"] else _seeds(with_suite=not options.whole)  # the suite has own tests
    cases = WholeCases(seeds) if options.whole else Cases(seeds, options.kind or ())
    alone = options.case is not None
    first = number_of_commit() % 10**6 * options.cases if options.first is None else options.first
    numbers = range(len(seeds)) if options.whole else range(first, first + options.cases)
    if alone:
        numbers = range(options.case, options.case + 1)
    report = _Report(cases, options.keep, len(numbers))
    summary = run_cases(cases, numbers, seen=report.seen)
    if alone:
        print(report.last.word, report.last.detail, report.last.place, report.last.text, sep="\n")
    else:
        _print(summary, numbers[0])
    if options.json is not None:
        options.json.write_text(json.dumps({"first": numbers[0]} | summary.as_dict(), indent=1) + "\n")
    return 1 if summary.failures else 0


def _seeds(*, with_suite: bool) -> list[Seed]:
    """Made in another process: compiling starts threads of libraries, which do not outlive a fork of this one."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(make_seeds, kwds={"with_suite": with_suite})


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=2000, help="how many")
    parser.add_argument("--first", type=int, help="the number of the first one; by default the commit decides")
    parser.add_argument("--whole", action="store_true", help="the files that are damaged, as they are before")
    parser.add_argument("--case", type=int, help="this one alone, and what came of it in full")
    parser.add_argument("--kind", action="append", choices=get_args(Kind), help="of files of this kind only")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="put the files of failing cases there")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args()


class _Report:
    """What is told and kept while cases are done."""

    def __init__(self, cases: Cases, folder: Path | None, count: int) -> None:
        self._cases, self._folder, self._count = cases, folder, count
        self._done = 0
        self._told = time.monotonic()
        self.last = Outcome(-1, "", "ok")

    def seen(self, outcome: Outcome) -> None:
        """One more."""
        self.last = outcome
        self._done += 1
        if outcome.is_failure:
            print(f"case {outcome.number}: {_in_words(outcome)}", flush=True)
            if self._folder is not None:
                self._cases.case(outcome.number).write(self._folder / str(outcome.number))
        if time.monotonic() - self._told > 60:
            self._told = time.monotonic()
            print(f"{self._done} of {self._count}", file=sys.stderr, flush=True)


def _in_words(outcome: Outcome) -> str:
    return f"{outcome.kind}: {outcome.word} {outcome.detail} {outcome.place}"


def _print(summary: Summary, first: int) -> None:
    words = ", ".join(f"{word} {count}" for word, count in summary.words().items())
    print(f"{summary.cases} cases from {first} on in {summary.processor_seconds:.0f} s of processor time: {words}")
    for (word, detail, place), numbers in sorted(summary.alike().items(), key=lambda item: -len(item[1])):
        print(f"{len(numbers)} times {word} {detail} {place}: cases {', '.join(map(str, numbers[:5]))}")


if __name__ == "__main__":
    sys.exit(main())
