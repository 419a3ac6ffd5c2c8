"""How `cnn.py` measures: the best setting of each peer first, then interleaved rounds of all, outputs compared.

Ratios are medians over the rounds of (ours / theirs) within a round, so that what slows the machine for a while slows
both sides of a quotient.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from cnn_models import Workload
from cnn_peers import Task, Turn
from cnn_process import AbsentError, Contender, ContenderError

from dagexec.core.dtypes import from_numpy
from dagexec.core.graph import build_graph
from dagexec.core.inference import infer_net
from dagexec.core.schema import TensorType
from dagexec.executor.source.loading import load_model

TOLERANCE = 1e-3
"""Of the largest output: far more than what another order of sums and Winograd's transforms change, far less than what
a wrong operator or bfloat16 would."""
OURS = "dagexec"
PEERS = ("onnxruntime", "openvino")
MATRIX_SIZE = 1024
CALLERS = 4
_GLANCE = 0.005
_ASLEEP = 0.02

Options = Mapping[str, Any]


@dataclass(frozen=True)
class Effort:
    """How long things are measured: seconds of a turn, rounds, and rounds for the choice of a peer's setting."""

    turn_seconds: float = 0.2
    rounds: int = 11
    settings_rounds: int = 3
    serve_seconds: float = 1.0
    serve_rounds: int = 5


def settings(threads: int, torch: bool) -> dict[str, tuple[Options, ...]]:
    """Column of the table to the settings that are tried for it; the fastest is measured against the others.

    Every torch variant is a column of its own.
    """
    tried: dict[str, tuple[Options, ...]] = {
        OURS: ({},),
        "onnxruntime": ({"intra": threads, "spin": True},),
        "openvino": (
            {"PERFORMANCE_HINT": "LATENCY"},
            {"PERFORMANCE_HINT": "LATENCY", "ENABLE_CPU_PINNING": False},
        ),
    }
    if threads > 1:
        tried["onnxruntime"] += (
            {"intra": threads, "spin": False},
            {"intra": 1, "inter": threads, "parallel": True, "spin": True},
            {"intra": threads, "inter": threads, "parallel": True, "spin": True},
        )
        tried["openvino"] += ({"PERFORMANCE_HINT": "THROUGHPUT"}, {"NUM_STREAMS": 1, "ENABLE_CPU_PINNING": False})
    if torch:
        tried |= {"torch eager": ({},), "torch channels-last": ({"channels_last": True},)}
        tried["torch inductor"] = ({"inductor": True}, {"inductor": True, "channels_last": True})
    return tried


def serve_settings(cores: int) -> dict[str, tuple[Options, ...]]:
    """The same for concurrent requests."""
    return {
        OURS: ({"replicas": 2},),
        "onnxruntime": ({"intra": 1}, {"intra": cores, "spin": False}, {"intra": cores, "spin": True}),
        "openvino": (
            {"PERFORMANCE_HINT": "THROUGHPUT"},
            {"PERFORMANCE_HINT": "THROUGHPUT", "PERFORMANCE_HINT_NUM_REQUESTS": CALLERS},
            {"NUM_STREAMS": cores},
        ),
    }


@dataclass(frozen=True)
class Time:
    """One contender's result.

    Attributes:
        milliseconds: the median over the rounds of a round's median.
        least: the shortest run.
        setting: the fastest of those tried.
        tried: milliseconds of each setting tried, by its text.
        load_seconds: from the start of the process to the end of the first run.
        difference: largest difference of an output from the reference's, over the largest output.
        chosen: what the contender chose itself.
    """

    milliseconds: float
    least: float
    setting: Options
    tried: Mapping[str, float]
    load_seconds: float
    difference: float
    chosen: Options


@dataclass(frozen=True)
class Latency:
    """One network at one batch size and number of threads.

    Attributes:
        times: by contender.
        ratios: ours over each other contender's, the median over the rounds.
        gflop: floating-point operations of a run, in billions.
        floor_ms: the time of those at the rate of a matrix product of the same threads in the same rounds.
        disturbance: the largest share of a turn that a contender computed which was not its own.
    """

    model: str
    batch: int
    threads: int
    times: Mapping[str, Time]
    ratios: Mapping[str, float]
    gflop: float
    floor_ms: float
    disturbance: float


@dataclass(frozen=True)
class Throughput:
    """One network under concurrent requests: inferences a second, settings, and ours over each other's rate."""

    model: str
    rates: Mapping[str, float]
    settings: Mapping[str, Options]
    ratios: Mapping[str, float]


class Absent:
    """Columns whose peer is not installed, each reported once."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self.reasons: dict[str, str] = {}

    def note(self, column: str, reason: str) -> None:
        """Remember that `column` stays empty. Raises ContenderError when that is dagexec's."""
        if column == OURS:
            raise ContenderError(reason)
        if column not in self.reasons:
            self._report(f"{column}: {reason}; left out")
        self.reasons[column] = reason


def latency(load: Workload, file: Path, threads: int, effort: Effort, absent: Absent, *, torch: bool) -> Latency:
    """Measure one network. Raises ContenderError when an output differs from the reference's."""
    task = Task(file, load.feeds, threads)
    with ExitStack() as stack:
        contenders: dict[str, Contender] = {}
        tried: dict[str, Mapping[str, float]] = {}
        for column, options in settings(threads, torch).items():
            if column in absent.reasons:
                continue
            try:
                contenders[column], tried[column] = stack.enter_context(best(column, task, options, effort))
            except AbsentError as error:
                absent.note(column, str(error))
            except ContenderError as error:
                if column == OURS:
                    raise
                print(f"{load.name}: {error}; left out of this row")
        differences = compare_outputs(contenders, task)
        product = stack.enter_context(Contender("matrix product", task, {"size": MATRIX_SIZE}))
        turns_of, disturbance = rounds(contenders | {"matrix product": product}, effort)
    gflop = flops(load.model, load.feeds) / 1e9
    product_rate = 2e-9 * MATRIX_SIZE**3 / statistics.median(turn.median for turn in turns_of.pop("matrix product"))
    times = {
        column: Time(
            1e3 * statistics.median(turn.median for turn in turns),
            1e3 * min(turn.least for turn in turns),
            contenders[column].options,
            tried[column],
            contenders[column].load_seconds,
            differences[column],
            contenders[column].chosen,
        )
        for column, turns in turns_of.items()
    }
    ratios = {column: paired(turns_of[OURS], turns) for column, turns in turns_of.items() if column != OURS}
    return Latency(load.name, load.batch, threads, times, ratios, gflop, 1e3 * gflop / product_rate, disturbance)


def throughput(load: Workload, file: Path, cores: int, effort: Effort, absent: Absent) -> Throughput:
    """Inferences a second with CALLERS concurrent requests, in rounds over all contenders and settings."""
    task = Task(file, load.feeds, cores)
    with ExitStack() as stack:
        contenders: dict[tuple[str, int], Contender] = {}
        for column, options in serve_settings(cores).items():
            for number, option in enumerate(options):
                if column not in absent.reasons:
                    try:
                        contenders[column, number] = stack.enter_context(Contender(_peer(column), task, option))
                    except AbsentError as error:
                        absent.note(column, str(error))
        rates: dict[tuple[str, int], list[float]] = {key: [] for key in contenders}
        for _ in range(effort.serve_rounds):
            for key, contender in contenders.items():
                wait_until_asleep([other for other in contenders.values() if other is not contender])
                rates[key].append(contender.serve(CALLERS, effort.serve_seconds))
        best: dict[str, tuple[str, int]] = {}
        for key in contenders:
            kept = best.setdefault(key[0], key)
            if statistics.median(rates[key]) > statistics.median(rates[kept]):
                best[key[0]] = key
        return Throughput(
            load.name,
            {column: statistics.median(rates[key]) for column, key in best.items()},
            {column: contenders[key].options for column, key in best.items()},
            {
                column: statistics.median(
                    ours / theirs for ours, theirs in zip(rates[best[OURS]], rates[key], strict=True)
                )
                for column, key in best.items()
                if column != OURS
            },
        )


def flops(model: onnx.ModelProto, feeds: Mapping[str, npt.NDArray[Any]]) -> int:
    """Floating-point operations of one run, as dagexec's schemas count them on the model as it is given.

    Raises ValueError when that of an operator cannot be told without a run.
    """
    loaded = load_model(model)
    arrays = {**loaded.parameters, **feeds}
    types = {name: TensorType(array.shape, from_numpy(array.dtype)) for name, array in arrays.items()}
    if loaded.init_net is not None:
        found = infer_net(build_graph(loaded.init_net), types, loaded.parameters).blobs
        types |= {name: kind for name, kind in found.items() if kind is not None}
    costs = infer_net(build_graph(loaded.net), types, loaded.parameters).costs
    if None in costs:
        raise ValueError(f"the cost of {costs.count(None)} operators is not known")
    return sum(cost.flops for cost in costs if cost is not None)


def _peer(column: str) -> str:
    return "torch" if column.startswith("torch") else column


@contextmanager
def best(
    column: str, task: Task, options: Sequence[Options], effort: Effort
) -> Iterator[tuple[Contender, Mapping[str, float]]]:
    """The contender with the fastest of these settings, and the milliseconds of each; the others are ended."""
    with ExitStack() as stack:
        found: list[Contender] = []
        for option in options:
            found.append(stack.enter_context(Contender(_peer(column), task, option)))
        times: dict[int, list[float]] = {number: [] for number in range(len(found))}
        for _ in range(effort.settings_rounds if len(found) > 1 else 0):
            for number, contender in enumerate(found):
                wait_until_asleep([other for other in found if other is not contender])
                times[number].append(contender.turn(effort.turn_seconds).median)
        medians = {number: 1e3 * statistics.median(row) for number, row in times.items() if row}
        best = min(medians, key=medians.__getitem__) if medians else 0
        for number, contender in enumerate(found):
            if number != best:
                contender.close()
        yield found[best], {_text(found[number].options): time for number, time in medians.items()}


def _text(options: Options) -> str:
    return ", ".join(f"{name}={value}" for name, value in options.items())


def compare_outputs(contenders: Mapping[str, Contender], task: Task) -> dict[str, float]:
    """How far each contender's result is from onnxruntime's, or without it from that of dagexec's plain engines."""
    if "onnxruntime" in contenders:
        reference = contenders["onnxruntime"].outputs()[0]
    else:
        with Contender(OURS, task, {"optimize": False}) as plain:
            reference = plain.outputs()[0]
    largest = float(np.abs(reference).max())
    differences = {}
    for column, contender in contenders.items():
        output = contender.outputs()[0]
        if output.shape != reference.shape:
            raise ContenderError(f"{column}: shape {output.shape}, expected {reference.shape}")
        differences[column] = float(np.abs(output - reference).max()) / largest
        if not differences[column] <= TOLERANCE:
            raise ContenderError(
                f"{column} {contender.options}: an output is off by {differences[column]:.2g} of the largest, more "
                f"than {TOLERANCE:g}; nothing is reported"
            )
    return differences


def rounds(contenders: Mapping[str, Contender], effort: Effort) -> tuple[dict[str, list[Turn]], float]:
    """The turns of every contender, and the largest share of a turn that another one computed."""
    turns: dict[str, list[Turn]] = {column: [] for column in contenders}
    disturbance = 0.0
    for _ in range(effort.rounds):
        for column, contender in contenders.items():
            others = [other for other in contenders.values() if other is not contender]
            before = wait_until_asleep(others)
            turns[column].append(contender.turn(effort.turn_seconds))
            spent = _processor_seconds(others) - before
            last = turns[column][-1]
            disturbance = max(disturbance, spent / max(effort.turn_seconds, last.median * last.runs))
    return turns, disturbance


def wait_until_asleep(contenders: Sequence[Contender], most_seconds: float = 2.0) -> float:
    """Wait until none of them computes any more (pools spin on for a while); their processor seconds so far."""
    spent, end = _processor_seconds(contenders), time.monotonic() + most_seconds
    while time.monotonic() < end:
        time.sleep(_GLANCE)
        before, spent = spent, _processor_seconds(contenders)
        if spent - before < _ASLEEP * _GLANCE:
            break
    return spent


def _processor_seconds(contenders: Sequence[Contender]) -> float:
    return sum(contender.processor_seconds() for contender in contenders)


def paired(ours: Sequence[Turn], theirs: Sequence[Turn]) -> float:
    """The median over the rounds of our time over theirs."""
    return statistics.median(a.median / b.median for a, b in zip(ours, theirs, strict=True))


def better_ratio(row: Mapping[str, Any]) -> float | None:
    """Ours over the better of onnxruntime and OpenVINO: the greater ratio. None when neither was measured."""
    return max((row["ratios"][peer] for peer in PEERS if peer in row["ratios"]), default=None)
