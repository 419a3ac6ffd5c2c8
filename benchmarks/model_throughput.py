"""Four requests at once: how many a second dagexec, onnxruntime and OpenVINO answer, for the models of `models.py`.

    python benchmarks/model_throughput.py [PATTERN ...] [--folder FOLDER] [--callers 4] [--rounds 5] [--seconds 0.5]
                                          [--json benchmarks/results/model_throughput.json]

The files are those that `models.py --make` writes. So many threads of one process each ask again as soon as they have
their answer. Every contender serves as in `load.py`: dagexec.compile without options, onnxruntime with its default
threads and with one, OpenVINO for throughput and for latency. In each round every contender has a turn while the
others sleep; a ratio is dagexec's rate over the best peer's of the same round, and a row the median of these. Rows are
kept by instruction set, each as soon as it is measured.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from cnn_measure import compare_outputs, wait_until_asleep
from cnn_process import AbsentError, Contender, ContenderError
from environment import describe
from load import CONTENDERS, OURS
from model_contenders import Case, columns
from model_files.recipe import matches, stored_feeds, stored_names
from record import read_record, source_commit, write_record

from dagexec.platform.processor import available_cores

RESULTS = Path(__file__).parent / "results" / "model_throughput.json"


def main() -> None:
    """Measure the models whose names match, print their rates, and add them to the record."""
    options = _arguments()
    environment = describe()
    for name in stored_names(options.folder):
        if not matches(name, options.patterns):
            continue
        row = measure(options.folder, name, options.callers, options.rounds, options.seconds)
        print(f"{name} ({environment['instruction set']}): {_line(row)}", flush=True)
        reports = read_record(options.json)
        report = reports.setdefault(str(environment["instruction set"]), {"rows": {}})
        report["environment"] = environment
        report["rows"][name] = row | {"commit": source_commit()}
        write_record(options.json, reports)


def measure(folder: Path, name: str, callers: int, rounds: int, seconds: float) -> dict[str, Any]:
    """Requests a second by contender and dagexec's ratio to the best peer, or why a contender has none."""
    case = Case(name, batch=1, threads=available_cores())
    task = columns(folder, case, next(stored_feeds(folder, name)))[OURS].task
    rates: dict[str, list[float]] = {}
    refused: dict[str, str] = {}
    with ExitStack() as stack:
        contenders = {}
        for column, (peer, settings) in CONTENDERS.items():
            try:
                contenders[column] = stack.enter_context(Contender(peer, task, settings))
                contenders[column].closed_loop(callers, 2 * seconds)
            except (AbsentError, ContenderError) as error:
                contenders.pop(column, None)
                refused[column] = str(error).strip().splitlines()[-1]
        compare_outputs(contenders, task)
        for _ in range(rounds):
            for column, contender in contenders.items():
                wait_until_asleep([other for other in contenders.values() if other is not contender])
                rates.setdefault(column, []).append(contender.closed_loop(callers, seconds).rate)
    return {"callers": callers, "rates": _medians(rates), "ratio": _ratio(rates), "refused": refused}


def _ratio(rates: Mapping[str, Sequence[float]]) -> float | None:
    peers = [found for column, found in rates.items() if column != OURS]
    if OURS not in rates or not peers:
        return None
    ratios = [mine / max(others) for mine, *others in zip(rates[OURS], *peers, strict=True)]
    return float(statistics.median(ratios))


def _medians(rates: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {column: round(statistics.median(found), 2) for column, found in rates.items()}


def _line(row: Mapping[str, Any]) -> str:
    ratio = "no ratio" if row["ratio"] is None else f"{row['ratio']:.2f} of the best peer's rate"
    rates = ", ".join(f"{column} {rate:.1f}" for column, rate in row["rates"].items())
    return f"{ratio} ({rates} a second)" + "".join(f"; {column}: {why}" for column, why in row["refused"].items())


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("patterns", nargs="*", metavar="PATTERN", help="part of a model's name")
    parser.add_argument("--folder", type=Path, default=Path.home() / ".cache" / "dagexec" / "models")
    parser.add_argument("--callers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.5, help="of a contender's turn in a round")
    parser.add_argument("--json", type=Path, default=RESULTS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
