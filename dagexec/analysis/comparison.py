"""Comparing runtimes on one model: times side by side in one interleaved run, and results byte by byte.

`analysis.statistics` says how certain a difference is. Every runtime is measured beside what its graph allows.
SimpleNet gives the operator times, alone and on all cores at once, and the cost of a run beyond them; handing out
pieces of operators on a virtual clock then predicts the milliseconds of W workers (`dagexec.analysis.what_if`). From
operator times alone it gives the speed-up that W workers can reach (`predicted`), and the critical path the one that no
number of workers can beat (`bound`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dagexec.analysis.environment import environment
from dagexec.analysis.foreign_share import foreign_share
from dagexec.analysis.peers import peers
from dagexec.analysis.rounds import Limits, Rounds, measure
from dagexec.analysis.statistics import FEWEST_ROUNDS, Finding, Verdict, spread, verdicts
from dagexec.analysis.what_if import LAUNCH_SECONDS, CostModel, CostProfiler, WhatIf, what_if
from dagexec.binding.parameters import initialized
from dagexec.compiler.compilation import compile_model
from dagexec.core.drawing.pictures import summary, table
from dagexec.core.dtypes import BOOL, FLOAT32, STRING
from dagexec.core.model import Model
from dagexec.core.operator_arguments import with_arguments
from dagexec.core.shapes import element_count
from dagexec.core.spelling import did_you_mean
from dagexec.errors import FeedError
from dagexec.executor.compile import compile
from dagexec.executor.executor import Executor
from dagexec.executor.source.loading import ModelSource, load_model
from dagexec.options import DEFAULT_OPTIONS, CompileOptions
from dagexec.platform import processor
from dagexec.platform.extras import require_pandas
from dagexec.platform.host_memory import check_fits
from dagexec.platform.records import dataclass
from dagexec.scheduler.run.prediction import Hardware, OperatorTasks, predict_host

if TYPE_CHECKING:
    import pandas

Array = npt.NDArray[Any]
Key = tuple[str, int]
"""A net type and a number of workers."""

_PROFILING_RUNS = 9

AS_GIVEN = "the net as it is given"

_CHOICES = {
    "measured": "measured now",
    "known": "measured earlier",
    "estimated": "by rules; `dagexec tune` or --tuning-seconds measures them",
}


@dataclass(frozen=True)
class RuntimeResult:
    """One runtime's row.

    Times are milliseconds of `Executor.run`: the median, and the quartiles as its spread. Speed-ups are over SimpleNet,
    from rounds in which both ran, and `verdict` says how sure that is: None for SimpleNet, and for too few rounds.
    `remarks` say of trends and of several speeds. `predicted_ms` is what the cost model predicts for this plan and
    these workers, `predicted_ratio` that over the measured median. `largest_difference` is from SimpleNet's outputs;
    `same_bytes` is stricter, as -0.0 and NaN count too. `samples_ms` are all runs, as they came.
    """

    net_type: str
    workers: int
    chains: int
    median_ms: float
    quartile_1_ms: float
    quartile_3_ms: float
    predicted_ms: float
    predicted_ratio: float
    speed_up: float
    predicted: float
    bound: float
    largest_difference: float
    same_bytes: bool
    samples_ms: tuple[float, ...] = ()
    verdict: Verdict | None = None
    remarks: tuple[str, ...] = ()

    @property
    def runtime(self) -> str:
        """The row in words."""
        return f"{self.net_type}, {self.workers} worker{'s' if self.workers > 1 else ''}"


@dataclass(frozen=True)
class PeerResult:
    """The row of another library: milliseconds as in `RuntimeResult`, and how far its outputs are from SimpleNet's."""

    name: str
    threads: int
    median_ms: float
    quartile_1_ms: float
    quartile_3_ms: float
    largest_difference: float
    samples_ms: tuple[float, ...]
    verdict: Verdict | None
    remarks: tuple[str, ...]

    @property
    def runtime(self) -> str:
        """The row in words."""
        return f"{self.name}, {self.threads} thread{'s' if self.threads > 1 else ''}"


@dataclass(frozen=True)
class Comparison:
    """All rows for one model, the measurements behind the predictions, and those for other machines on request.

    Attributes:
        repeat: rounds, of which the first `warm_up` do not count.
        choices: where layout and kernels come from, in words.
        foreign_share: the share of other runtimes in the operators' time, from 0 to 1; None when none is theirs.
    """

    model: str
    operators: int
    repeat: int
    rows: tuple[RuntimeResult, ...]
    cost_model: CostModel
    what_if: tuple[WhatIf, ...] = ()
    choices: str = AS_GIVEN
    foreign_share: float | None = None
    warm_up: int = 0
    environment: Mapping[str, object] = field(default_factory=dict)
    peers: tuple[PeerResult, ...] = ()

    @property
    def contenders(self) -> tuple[RuntimeResult | PeerResult, ...]:
        """All rows."""
        return self.rows + self.peers

    @property
    def finding(self) -> str:
        """The result in one sentence."""
        judged = [(row, row.verdict) for row in self.contenders if row.verdict is not None]
        if not judged:
            return f"{self.repeat} rounds are too few to say which runtime is faster; {FEWEST_ROUNDS} are needed."
        best, verdict = min(judged, key=lambda judgment: judgment[1].ratio)
        if verdict.finding is Finding.SAME and any(judgment.finding is Finding.FASTER for _, judgment in judged):
            best, verdict = min(
                (judgment for judgment in judged if judgment[1].finding is Finding.FASTER),
                key=lambda judgment: judgment[1].ratio,
            )
        return f"{best.runtime}, against SimpleNet: {verdict.sentence}."

    @property
    def agrees(self) -> bool:
        """True when every runtime gave SimpleNet's bytes."""
        return all(row.same_bytes for row in self.rows)

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)

    def to_pandas(self) -> pandas.DataFrame:
        """A row for each runtime. Raises DagexecError without pandas."""
        return require_pandas().DataFrame([asdict(row) for row in self.rows])

    def _repr_html_(self) -> str:
        """What a notebook shows: a row for each runtime."""
        columns = ("runtime", "median ms", "quartiles", "speed-up", "bound", "predicted ms", "same bytes")
        rows = [
            (
                row.runtime,
                f"{row.median_ms:.3g}",
                f"{row.quartile_1_ms:.3g} to {row.quartile_3_ms:.3g}",
                f"{row.speed_up:.2f}",
                f"{row.bound:.2f}",
                f"{row.predicted_ms:.3g}",
                "yes" if row.same_bytes else "no",
            )
            for row in self.rows
        ]
        return summary(f"Comparison of runtimes on {self.model}: {self.operators} operators", table(columns, rows))


def random_feeds(model: Model, shapes: Mapping[str, tuple[int, ...]] | None = None, seed: int = 0) -> dict[str, Array]:
    """An array for every input: standard normal floats, integers below 10. Axes of any size become 1.

    `shapes` gives or overrides the shapes of inputs. Raises FeedError for an input whose shape nobody tells.
    """
    known_shapes = dict(shapes or {})
    require_inputs(model, known_shapes)
    random = np.random.default_rng(seed)
    needed = model.needed_inputs()
    feeds: dict[str, Array] = {}
    for name, info in model.inputs.items():
        if name in known_shapes:
            shape = known_shapes[name]
        elif info.shape is not None:
            shape = tuple(1 if size is None else size for size in info.shape)
        elif name not in needed:
            continue
        else:
            raise FeedError(f"model {model.name!r}: the model does not specify the shape of input {name!r}; specify it")
        meta = info.dtype or FLOAT32
        drawn = 4 if meta.is_float else 8  # bytes of an element as it is drawn, before it has its type
        check_fits(
            element_count(shape) * (drawn + meta.itemsize), f"model {model.name!r}: input {name!r} of shape {shape}"
        )
        if meta.is_float:
            feeds[name] = random.standard_normal(shape, np.float32).astype(meta.numpy)
        elif meta is STRING:
            feeds[name] = np.full(shape, b"text", np.object_)
        else:
            feeds[name] = random.integers(0, 2 if meta is BOOL else 10, shape).astype(meta.numpy)
    return feeds


def require_inputs(model: Model, names: Iterable[str]) -> None:
    """Raises FeedError if shapes are given for `names` that are no inputs of `model`."""
    unknown = sorted(set(names) - set(model.inputs))
    if unknown:
        hint = did_you_mean(unknown[0], model.inputs)
        raise FeedError(
            f"model {model.name!r}: shapes given for {unknown}; its inputs are {sorted(model.inputs)}{hint}"
        )


def compare(
    source: ModelSource,
    options: CompileOptions = DEFAULT_OPTIONS,
    *,
    net_types: Sequence[str] = ("dag", "async_dag"),
    workers: Sequence[int] = (1, 2),
    repeat: int | None = None,
    seconds: float = Limits.seconds,
    against: Sequence[str] = (),
    feeds: Mapping[str, Array] | None = None,
    what_if_workers: Sequence[int] = (),
    what_if_streams: Sequence[int] = (),
    launch_seconds: float = LAUNCH_SECONDS,
    progress: Callable[[float], object] = lambda _done: None,
    on_stage: Callable[[str], object] = lambda _stage: None,
    on_measured: Callable[[str, int, Executor, Mapping[str, Array]], object] = lambda *_: None,
) -> Comparison:
    """Run a model in rounds under SimpleNet and each of `net_types` with each number of `workers`.

    There are `repeat` rounds, or as many as it takes for intervals of 1%, or fit into so many `seconds`. Peers to run
    `against` are "onnxruntime" and "openvino".

    A net type may name a policy: "dag:heft". What-if is predicted under the first policy, where there is one.
    All run the same net, as it is rewritten by `options`. Predict the times of `what_if_workers` on the host, and
    launching on each number of `what_if_streams` at `launch_seconds` an operator. `progress` is called after every run
    with the share that is done, up to 1, and `on_stage` before with what is done next. `on_measured` is called for each
    runtime in the end, with its net type, workers, executor and feeds.
    Raises what `compile` and `run` raise.
    """
    given = model = initialized(load_model(source))
    if options.operator_arguments:
        model = replace(model, net=with_arguments(model.net, options.operator_arguments))
    origin = AS_GIVEN
    if options.optimize:
        alone = replace(options, net_type="simple", policy=None, num_workers=1, progress=on_stage)
        compiled_model = compile_model(model, alone)
        model = compiled_model.model
        if compiled_model.report is not None:
            origin = _CHOICES[compiled_model.report.origin]
    inputs = random_feeds(model) if feeds is None else feeds
    executors: dict[Key, Executor] = {}
    cores = min(max([1, *workers]), processor.available_cores())

    def compiled(kind: str, count: int, replicas: int = 1) -> Executor:
        net_type, _, policy = kind.partition(":")
        return compile(
            model,
            optimize=False,
            net_type=net_type,
            policy=policy or None,
            num_workers=count,
            intra_op_threads=options.intra_op_threads,
            replicas=replicas,
            any_length=False,
        )

    with ExitStack() as stack:
        executors["simple", 1] = stack.enter_context(compiled("simple", 1))
        for net_type in net_types:
            for count in (1,) if net_type == "simple" else workers:
                key = (net_type, count)
                if key not in executors:
                    executors[key] = stack.enter_context(compiled(net_type, count))
        crowd = stack.enter_context(compiled("simple", cores, cores)) if cores > 1 else None
        on_stage("first runs")
        outputs = {key: executor.run(inputs) for key, executor in executors.items()}
        on_stage("runs in turns")
        native = stack.enter_context(compiled("dag", 1))  # another than is measured, whose caches it would fill
        native.run(inputs)
        profiler = CostProfiler(executors["simple", 1], crowd, inputs, native)
        limits = Limits(repeat, seconds)
        others = peers(against, source, given, inputs, max([1, *workers]))
        peer_outputs = {name: dict(zip(given.outputs, run(), strict=True)) for name, run in others.items()}
        contenders = {key: partial(executor.run, inputs) for key, executor in executors.items()}
        rounds = _measured(contenders | {(name, 0): run for name, run in others.items()}, profiler, limits, progress)
        tasks = {key: executor.net().tasks() for key, executor in executors.items()}
        for (net_type, count), executor in executors.items():
            on_measured(net_type, count, executor, inputs)
        counted = {key: rounds.counted(key) for key in rounds.seconds}
        base = "simple", 1
        cost_model = profiler.cost_model(shared := _shared(tasks), counted[base])
    judged = _verdicts(counted) if len(counted[base]) >= FEWEST_ROUNDS else {}
    rows = tuple(
        _row(key, tasks[key], counted, judged.get(key), cost_model, outputs[base], outputs[key]) for key in executors
    )
    raced = next((tasks[key] for key in tasks if ":" in key[0]), shared)
    predictions = what_if(raced, cost_model, what_if_workers, what_if_streams, launch_seconds)
    graph = shared.plan.graph
    return Comparison(
        model.name,
        len(graph),
        len(rounds.seconds[base]),
        rows,
        cost_model,
        predictions,
        origin,
        foreign_share(graph, cost_model.operator_seconds),
        rounds.warm_up,
        environment(),
        tuple(
            _peer(name, max([1, *workers]), counted, judged.get((name, 0)), outputs[base], found)
            for name, found in peer_outputs.items()
        ),
    )


def _shared(tasks: Mapping[Key, OperatorTasks]) -> OperatorTasks:
    """Those of a runtime of several workers, if there is one."""
    return tasks[next((key for key in tasks if key[0] != "simple"), ("simple", 1))]


def _measured(
    contenders: Mapping[Key, Callable[[], object]],
    profiler: CostProfiler,
    limits: Limits,
    progress: Callable[[float], object],
) -> Rounds[Key]:
    """Rounds of all, followed by runs of profiling, which would disturb the caches of the rounds."""
    rounds = measure(contenders, limits, after_round=profiler.run_natively, progress=lambda done: progress(0.9 * done))
    for number in range(_PROFILING_RUNS):
        profiler.run()
        progress(0.9 + 0.1 * (number + 1) / _PROFILING_RUNS)
    return rounds


def _verdicts(seconds: Mapping[Key, Sequence[float]]) -> dict[Key, Verdict]:
    names = {f"{net_type} {workers}": (net_type, workers) for net_type, workers in seconds}
    judged = verdicts({name: seconds[key] for name, key in names.items()}, "simple 1")
    return {names[name]: verdict for name, verdict in judged.items()}


def _row(
    key: Key,
    tasks: OperatorTasks,
    counted: Mapping[Key, Sequence[float]],
    verdict: Verdict | None,
    cost_model: CostModel,
    expected: Mapping[str, Array],
    found: Mapping[str, Array],
) -> RuntimeResult:
    net_type, workers = key
    found_spread = spread(counted[key])
    median = found_spread.median
    alone = net_type == "simple"
    timed = tasks.timed(cost_model.operator_seconds)
    makespan = timed.work + cost_model.run_seconds
    predicted = makespan if alone else cost_model.predict(tasks, cost_model.hardware(workers))
    return RuntimeResult(
        net_type=net_type,
        workers=workers,
        chains=1 if alone else len(tasks.plan.chains),
        median_ms=median * 1e3,
        quartile_1_ms=found_spread.low * 1e3,
        quartile_3_ms=found_spread.high * 1e3,
        predicted_ms=predicted * 1e3,
        predicted_ratio=predicted / median,
        speed_up=spread(counted["simple", 1]).median / median if verdict is None else 1 / verdict.ratio,
        predicted=1.0 if alone else _ratio(timed.work, predict_host(timed, Hardware(workers))),
        bound=1.0 if alone else _ratio(timed.work, timed.critical_path(sys.maxsize)),
        largest_difference=max((_difference(expected[name], found[name]) for name in expected), default=0.0),
        same_bytes=all(_same_bytes(expected[name], found[name]) for name in expected),
        samples_ms=tuple(sample * 1e3 for sample in counted[key]),
        verdict=verdict,
        remarks=found_spread.remarks,
    )


def _peer(
    name: str,
    threads: int,
    counted: Mapping[Key, Sequence[float]],
    verdict: Verdict | None,
    expected: Mapping[str, Array],
    found: Mapping[str, Array],
) -> PeerResult:
    times = spread(counted[name, 0])
    return PeerResult(
        name,
        threads,
        times.median * 1e3,
        times.low * 1e3,
        times.high * 1e3,
        max((_difference(expected[output], found[output]) for output in expected), default=0.0),
        tuple(output * 1e3 for output in counted[name, 0]),
        verdict,
        times.remarks,
    )


def _ratio(whole: float, part: float) -> float:
    return whole / part if part else 1.0


def _same_bytes(expected: Array, found: Array) -> bool:
    """True for the same bits; of strings, those of their texts."""
    if expected.dtype == np.object_:
        return expected.shape == found.shape and expected.tolist() == found.tolist()
    return expected.tobytes() == found.tobytes()


def _difference(expected: Array, found: Array) -> float:
    """The largest absolute difference; infinite when shapes or types differ or only one side is a number."""
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return float("inf")
    if expected.dtype == np.object_ or not expected.size:
        return 0.0 if (expected == found).all() else float("inf")
    with np.errstate(invalid="ignore"):
        difference = np.abs(expected.astype(np.float64) - found.astype(np.float64))
    difference = np.where((expected == found) | (np.isnan(difference) & _both_nan(expected, found)), 0.0, difference)
    largest = float(difference.max())
    return float("inf") if np.isnan(largest) else largest


def _both_nan(expected: Array, found: Array) -> Array:
    both: Array = (expected != expected) & (found != found)
    return both
