"""Many callers: requests a second and latencies of dagexec, onnxruntime and OpenVINO under the same load.

    python benchmarks/load.py [--models squeezenet resnet50 text lenet] [--callers 1 4 16 64] [--rounds 5] [--quick]
                              [--seconds 1] [--json benchmarks/results/load.json]

Every contender serves as its users would set it up: dagexec.compile without options; one session of onnxruntime for
all callers, with its default threads and with one; OpenVINO for throughput and for latency, in float32. Each is a
process of its own that sleeps while another's turn is measured; turns are interleaved, and outputs compared.

A closed loop of so many threads gives the requests a second. Then arrivals of a Poisson process, at 70% of the most
that the best peer has answered, go to all of them at the same moments; latencies count from when an arrival was due.

Results are kept by instruction set. ONEDNN_MAX_CPU_ISA=AVX2 limits dagexec and OpenVINO; onnxruntime has no such
setting, and takes what the processor has.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from cnn_measure import compare_outputs, wait_until_asleep
from cnn_models import workload
from cnn_peers import Task
from cnn_process import AbsentError, Contender
from environment import describe
from load_generators import Latencies, arrivals

from dagexec.platform.processor import available_cores

OURS = "dagexec"
MODELS = ("squeezenet", "resnet50", "text", "lenet")
WORDS_READ = 64
LOAD = 0.7
"""Of what the best peer can answer, the part that arrives."""
OPEN_CALLERS = 64

CONTENDERS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    OURS: ("dagexec", {}),
    "onnxruntime": ("onnxruntime", {}),
    "onnxruntime, 1 thread": ("onnxruntime", {"intra": 1}),
    "openvino, throughput": ("openvino", {"PERFORMANCE_HINT": "THROUGHPUT"}),
    "openvino, latency": ("openvino", {"PERFORMANCE_HINT": "LATENCY"}),
}
"""By column, the peer and its settings."""


@dataclass(frozen=True)
class Effort:
    """Rounds, seconds of each contender's closed loop in a round, and seconds of arrivals."""

    rounds: int = 5
    seconds: float = 1.0
    open_seconds: float = 2.0


QUICK = Effort(2, 0.4, 1.0)


def main() -> None:
    """Measure, print, and write what was found to a file if one is given."""
    options = _arguments()
    effort = QUICK if options.quick else Effort(options.rounds, options.seconds, 2 * options.seconds)
    environment = describe()
    found = {}
    for name in options.models:
        found[name] = measure(name, options.callers, effort, options.contenders)
        print(f"{name} ({environment['instruction set']})")
        for line in lines(found[name]):
            print("  " + line, flush=True)
    if options.json is not None:
        reports = json.loads(options.json.read_text()) if options.json.exists() else {}
        kept = reports.setdefault(str(environment["instruction set"]), {"models": {}})
        kept["environment"] = environment
        kept["models"] |= found
        options.json.write_text(json.dumps(reports, indent=1) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=MODELS, default=MODELS)
    parser.add_argument("--callers", nargs="*", type=int, default=[1, 4, 16, 64])
    parser.add_argument("--contenders", nargs="*", choices=list(CONTENDERS), default=list(CONTENDERS))
    parser.add_argument("--rounds", type=int, default=Effort.rounds)
    parser.add_argument("--seconds", type=float, default=Effort.seconds, help="of a closed loop in a round")
    parser.add_argument("--quick", action="store_true", help="two short rounds")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def measure(name: str, callers: Sequence[int], effort: Effort, columns: Sequence[str]) -> dict[str, Any]:
    """Rates and latencies of one model by contender, and dagexec's in proportion to the best peer's of each round.

    Before it measures, each contender is called by all callers for the time of two rounds: dagexec makes replicas for
    them then, OpenVINO threads.
    """
    with _contenders(name, columns) as contenders:
        for contender in contenders.values():
            contender.closed_loop(max(callers), 2 * effort.seconds)
        rates: dict[int, dict[str, list[float]]] = {}
        for count in callers:
            rates[count] = {column: [] for column in contenders}
            for _ in range(effort.rounds):
                for column, contender in _turns(contenders):
                    rates[count][column].append(contender.closed_loop(count, effort.seconds).rate)
        best = max(statistics.median(row) for rows in rates.values() for column, row in rows.items() if column != OURS)
        rate = LOAD * best
        waits: dict[str, list[Latencies]] = {column: [] for column in contenders}
        for number in range(effort.rounds):
            moments = arrivals(rate, effort.open_seconds, seed=number)
            for column, contender in _turns(contenders):
                waits[column].append(contender.open_loop(moments, OPEN_CALLERS))
        return {
            "closed": {str(count): _rate_rows(rows) for count, rows in rates.items()},
            "open": {"rate": rate, **_wait_rows(waits)},
            "effort": vars(effort),
            "chosen": {column: dict(contender.chosen) for column, contender in contenders.items()},
        }


def lines(found: Mapping[str, Any]) -> Iterator[str]:
    """The results of one model as text."""
    for count, row in found["closed"].items():
        rates = ", ".join(f"{column} {rate:.1f}" for column, rate in row["rates"].items())
        yield f"{count:>3} callers: {row['ratio']:.2f} of the best peer's rate ({rates} a second)"
    row = found["open"]
    waits = ", ".join(
        f"{column} {1e3 * p50:.2f} and {1e3 * p99:.2f}" for column, (p50, p99) in row["latencies"].items()
    )
    yield f"Poisson, {row['rate']:.1f} a second: p99 {row['ratio']:.2f} of the best peer's (p50 and p99, ms: {waits})"


def _rate_rows(rates: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    peers = [row for column, row in rates.items() if column != OURS]
    ratios = [mine / max(others) for mine, *others in zip(rates[OURS], *peers, strict=True)]
    return {
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "rates": {column: statistics.median(row) for column, row in rates.items()},
    }


def _wait_rows(waits: Mapping[str, Sequence[Latencies]]) -> dict[str, Any]:
    """Medians over the rounds; the best peer is the one with the least p99 in a round."""
    peers = [[one.p99 for one in row] for column, row in waits.items() if column != OURS]
    ratios = [mine.p99 / min(others) for mine, *others in zip(waits[OURS], *peers, strict=True)]
    return {
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "latencies": {
            column: (statistics.median(one.p50 for one in row), statistics.median(one.p99 for one in row))
            for column, row in waits.items()
        },
    }


@contextmanager
def _contenders(name: str, columns: Sequence[str]) -> Iterator[dict[str, Contender]]:
    """A process for each contender that is installed, with the model loaded and its output compared."""
    model, feeds = _workload(name)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        file = Path(folder) / f"{name}.onnx"
        onnx.save(model, os.fspath(file))
        task = Task(file, feeds, available_cores())
        contenders = {}
        for column in columns:
            try:
                contenders[column] = stack.enter_context(Contender(*_told(column, task)))
            except AbsentError as error:
                print(f"{column}: {error}; left out")
        compare_outputs(contenders, task)
        yield contenders


def _told(column: str, task: Task) -> tuple[str, Task, Mapping[str, Any]]:
    peer, settings = CONTENDERS[column]
    return peer, task, settings


def _workload(name: str) -> tuple[onnx.ModelProto, dict[str, Any]]:
    """The model and what each request is fed: one image, or one text."""
    if name == "text":
        from shapes import WORDS, text

        model = text()
        for dim, size in zip(model.graph.input[0].type.tensor_type.shape.dim, (1, WORDS_READ), strict=True):
            dim.dim_value = size  # OpenVINO's outputs have no shape before a run otherwise
        return model, {"words": np.random.default_rng(0).integers(0, WORDS, (1, WORDS_READ))}
    load = workload(name, 1)
    return load.model, load.feeds


def _turns(contenders: Mapping[str, Contender]) -> Iterator[tuple[str, Contender]]:
    """Each contender in turn, while the others sleep."""
    for column, contender in contenders.items():
        wait_until_asleep([other for other in contenders.values() if other is not contender])
        yield column, contender


if __name__ == "__main__":
    main()
