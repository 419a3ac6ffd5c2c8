"""A net against itself: how often `compare`'s statistics call two copies of one net different.

    python benchmarks/null_comparison.py [--models zoo:lenet ...] [--experiments 200] [--json FILE]

In each experiment two executors are compiled anew from one model and measured in rounds as `compare` does, until
intervals are narrow or a second is over. Target: a difference is called in at most 5% of the experiments.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial
from pathlib import Path

from environment import write_report

import dagexec
from dagexec.analysis.comparison import random_feeds
from dagexec.analysis.rounds import Limits, measure
from dagexec.analysis.statistics import Finding, Verdict, verdicts

MODELS = ("zoo:lenet", "zoo:squeezenet")


def experiment(model: dagexec.Model, seed: int) -> Verdict:
    """Two copies, in rounds."""
    feeds = random_feeds(model)
    with dagexec.compile(model) as one, dagexec.compile(model) as other:
        for executor in (one, other):
            executor.run(feeds)
        contenders = {"one": partial(one.run, feeds), "other": partial(other.run, feeds)}
        rounds = measure(contenders, Limits(seconds=1.0), seed=seed)
    return verdicts({name: rounds.counted(name) for name in contenders}, "one", seed)["other"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=MODELS)
    parser.add_argument("--experiments", type=int, default=200)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = {}
    for name in options.models:
        model = dagexec.load_model(name)
        found = [experiment(model, seed) for seed in range(options.experiments)]
        called = sum(one.finding is not Finding.SAME for one in found)
        visible = statistics.median(one.visible for one in found)
        print(f"{name}: called different in {called} of {len(found)}; a difference of {visible:.1%} would be seen")
        results[name] = {
            "experiments": len(found),
            "called different": called,
            "visible": visible,
            "ratios": [one.ratio for one in found],
        }
    if options.json:
        write_report(options.json, results=results)


if __name__ == "__main__":
    main()
