"""What a model loses and gains in bfloat16 or int8: its outputs against those of float32, and the times of both.

`precision_report` compiles the model twice and runs both on the same inputs, alternately.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from dagexec.analysis.comparison import random_feeds
from dagexec.binding.parameters import initialized
from dagexec.compiler.passes.catalog import SIMPLIFYING
from dagexec.compiler.passes.low_precision import before_precision
from dagexec.compiler.passes.quantization import LayerError, errors_by_layer, relative
from dagexec.compiler.passes.rewriting import run_passes
from dagexec.core.feeds import Feeds
from dagexec.core.model import Model
from dagexec.errors import ArgumentError
from dagexec.executor.compile import compile
from dagexec.executor.executor import Executor
from dagexec.executor.source.loading import ModelSource, load_model
from dagexec.options import DEFAULT_OPTIONS, CompileOptions
from dagexec.platform.records import dataclass

Array = npt.NDArray[Any]
Outputs = Mapping[str, Array]
LowPrecision = Literal["bfloat16", "int8"]

RANDOM_INPUTS = 8


@dataclass(frozen=True)
class OutputError:
    """One output of the model over all inputs, against float32's.

    Attributes:
        largest: the largest difference over the largest magnitude.
        rms: root mean square of the difference over that of the output.
        cosine: of the angle between the two, as vectors.
        top_1: the share of samples (along the first axis) whose largest element is the same one; None for samples of
            one element.
    """

    name: str
    largest: float
    rms: float
    cosine: float
    top_1: float | None


@dataclass(frozen=True)
class PrecisionReport:
    """A model in `dtype` beside the same in float32.

    inputs: their number.
    outputs: the loss of each output.
    float32_ms, dtype_ms: medians of interleaved runs.
    speed_up: the first over the second.
    layers: on request, the loss of each layer when it alone is in `dtype`, the worst first.
    """

    model: str
    dtype: str
    inputs: int
    outputs: tuple[OutputError, ...]
    float32_ms: float
    dtype_ms: float
    speed_up: float
    layers: tuple[LayerError, ...] = ()

    @property
    def largest(self) -> float:
        """The largest relative error of any output."""
        return max((output.largest for output in self.outputs), default=0.0)

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)


def precision_report(
    source: ModelSource,
    dtype: LowPrecision,
    feeds: Sequence[Feeds] | int = RANDOM_INPUTS,
    *,
    options: CompileOptions = DEFAULT_OPTIONS,
    calibration: Sequence[Feeds] = (),
    repeat: int = 15,
    per_layer: bool = False,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    on_stage: Callable[[str], object] = lambda _stage: None,
) -> PrecisionReport:
    """Measure what a model loses in accuracy and gains in speed with fewer bits than float32.

        report = dagexec.precision_report("model.onnx", "int8", calibration=samples)
        print(report.speed_up, [output.rms for output in report.outputs])

    Args:
        source: a model in any form that `dagexec.compile` accepts.
        dtype: "bfloat16" or "int8".
        feeds: inputs to compare on, or a number of random ones (of `shapes`, see `comparison.random_feeds`).
        options: further options for compiling both.
        calibration: calibration inputs for int8; none for a model that is already quantized.
        repeat: timed runs of each, alternately.
        per_layer: also report the error of each layer on its own.
        on_stage: called with a description of each stage.

    Raises ArgumentError for another dtype, and what `compile` and `run` raise.
    """
    if dtype not in ("bfloat16", "int8"):
        raise ArgumentError(f"a precision to compare with float32 is bfloat16 or int8, not {dtype!r}")
    model = initialized(load_model(source))
    samples = [random_feeds(model, shapes, seed) for seed in range(feeds)] if isinstance(feeds, int) else list(feeds)
    if not samples or repeat < 1:
        raise ArgumentError(f"at least 1 input and 1 run are needed; found {len(samples)} and {repeat}")
    with ExitStack() as stack:
        executors = []
        for kind in ("float32", dtype):
            executor = compile(
                model,
                options,
                dtype=kind,
                calibration=list(calibration) if kind == "int8" else (),
                shapes={name: np.shape(array) for name, array in samples[0].items()},
                progress=lambda stage, kind=kind: on_stage(f"{kind}: {stage}"),  # type: ignore[misc]
            )
            executors.append(stack.enter_context(executor))
        on_stage("running")
        results = [[executor.run(sample) for sample in samples] for executor in executors]
        milliseconds = _times(executors, samples[0], repeat)
    layers = _layers(model, dtype, samples, calibration) if per_layer else ()
    outputs = tuple(_output_error(name, results[0], results[1]) for name in model.outputs)
    plain, narrow = milliseconds
    return PrecisionReport(model.name, dtype, len(samples), outputs, plain, narrow, plain / narrow, layers)


def _times(executors: Sequence[Executor], feeds: Feeds, repeat: int) -> list[float]:
    """The median milliseconds of each, run alternately."""
    seconds: list[list[float]] = [[] for _ in executors]
    for number in range(repeat):
        order = range(len(executors)) if number % 2 == 0 else reversed(range(len(executors)))
        for index in order:
            start = time.perf_counter()
            executors[index].run(feeds)
            seconds[index].append(time.perf_counter() - start)
    return [statistics.median(times) * 1e3 for times in seconds]


def _output_error(name: str, expected: Sequence[Outputs], found: Sequence[Outputs]) -> OutputError:
    """All runs of one output together."""
    largest, size, squares, whole, other, product = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    same = rows = 0
    for first, second in zip(expected, found, strict=True):
        a, b = first[name].astype(np.float64), second[name].astype(np.float64)
        if a.shape != b.shape:
            raise ArgumentError(f"output {name!r} has shape {b.shape}; in float32 {a.shape}")
        difference = b - a
        largest, size = max(largest, _largest(difference)), max(size, _largest(a))
        squares, whole, other = squares + (difference**2).sum(), whole + (a**2).sum(), other + (b**2).sum()
        product += (a * b).sum()
        samples = len(a) if a.ndim > 1 else 1
        if a.size > samples:
            same += int((a.reshape(samples, -1).argmax(1) == b.reshape(samples, -1).argmax(1)).sum())
            rows += samples
    cosine = product / np.sqrt(whole * other) if whole and other else float(whole == other)
    return OutputError(
        name,
        largest / size if size else (0.0 if largest == 0 else float("inf")),
        relative(squares, whole),
        float(cosine),
        same / rows if rows else None,
    )


def _largest(array: Array) -> float:
    return float(np.abs(array).max(initial=0.0))


def _layers(model: Model, dtype: str, samples: Sequence[Feeds], calibration: Sequence[Feeds]) -> tuple[LayerError, ...]:
    """The loss of each layer alone, the worst first; for int8 of the layers that calibration quantizes."""
    if dtype == "int8" and not calibration:
        return ()
    simple = run_passes(model, before_precision(SIMPLIFYING)).model
    errors = errors_by_layer(simple, dtype, samples, calibration)
    return tuple(sorted(errors, key=lambda layer: -layer.error))
