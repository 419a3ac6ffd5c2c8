"""CompileOptions: all options of `dagexec.compile` in one value that is checked once and passed as a whole.

A field is declared, with its default and documentation, only here (or in `RunOptions`, for the options of nets):
`with_keywords_of` derives the signature and documentation of `compile`.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import field, replace
from functools import wraps
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, Protocol, TypeVar, cast, get_args

from dagexec.core.arguments import ArgumentValue
from dagexec.core.device import CPU
from dagexec.core.feeds import Feeds
from dagexec.errors import SettingError
from dagexec.ops.base.layout import LAYOUTS, NCHW, NHWC
from dagexec.platform.records import dataclass
from dagexec.scheduler.nets.options import RunOptions

if TYPE_CHECKING:
    from opentelemetry.metrics import Meter
    from opentelemetry.trace import Tracer

    from dagexec.scheduler.observe.run_times import RunTimes
    from dagexec.scheduler.workers.pool import Pool

logger = logging.getLogger("dagexec")

Precision = Literal["float32", "bfloat16", "float16", "int8"]
Nan = Literal["kept", "any"]
WhenFull = Literal["wait", "reject"]
Islands = Literal["none", "auto", "onnxruntime", "openvino"]

_ONE_OF = {
    name: get_args(kind)
    for name, kind in (("dtype", Precision), ("nan", Nan), ("islands", Islands), ("when_full", WhenFull))
}
Shapes = Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class BatchPadding:
    """Which inputs have lengths of their own, and to which sizes zeros fill them up: `batch_padding` of `compile`.

        BatchPadding({"input_ids": 1, "attention_mask": 1}, mask="attention_mask", sizes=(16, 32, 64, 128))

    The caller vouches that nothing can be seen of positions at which the mask is 0, in results that are cut to the
    length of the request.

    Attributes:
        axes: the axis of lengths, by input.
        mask: the one of these inputs that tells what is padding: 0 there.
        sizes: what is filled up to, the smallest first; a longer request is refused.
    """

    axes: Mapping[str, int]
    mask: str
    sizes: Sequence[int]

    def __post_init__(self) -> None:
        whole = all(isinstance(size, Integral) and size > 1 for size in self.sizes)
        if not whole or not self.sizes or list(self.sizes) != sorted(set(self.sizes)):
            raise SettingError(f"batch_padding: sizes must be 2 or more, the smallest first, not {self.sizes!r:.80}")
        for name, axis in self.axes.items():
            if not isinstance(axis, Integral) or axis < 0:
                raise SettingError(f"batch_padding: axes must be 0 or more, not {axis!r:.80} for {name!r:.80}")


@dataclass(frozen=True, kw_only=True)
class CompileOptions(RunOptions):
    """How a model is compiled, run and embedded: the keywords of `dagexec.compile`.

    How it is optimized:
        optimize: rewrite the net for speed (`dagexec.compiler.passes`), and choose everything left open. With False the
            net runs as given, under "dag" unless `net_type` is specified, and all its blobs can be requested.
        dtype: the type the net computes in: "float32", "bfloat16", "int8", or on a device "float16".
        calibration: inputs of one run, or of several, that determine the ranges for int8.
        layout: the order of images inside the net: "NCHW" or "NHWC", where cuDNN or oneDNN computes. None chooses one
            on cpu, and NCHW on devices.
        nan: "kept"; or "any" if maxima computed by oneDNN and cuDNN may turn NaN into a number, which saves a check
            (docs/precision.md gives its cost).
        batch_invariant: on cpu, operators that compute each row of a batch by itself give it the same bytes in every
            batch, alone too (docs/precision.md). False allows kernels that do not, which may be faster.
        passes: names of passes that installed packages have (docs/plugins.md), in the order in which they run: after
            constants are folded, before operators are fused.
        without_passes: names of passes to skip; `dagexec inspect --passes` lists them.
        keep: blobs that `outputs=` of a run may name in addition to the model's outputs. Without `optimize`, all may.
        shapes: input shapes to optimize for, by name; by default the model's own, with 1 for an axis of any size.
            An ONNX model that cannot be run for all sizes is loaded for these alone (see `load_model`).
        tuning_seconds: time limit for measuring layouts and kernels; by default DAGEXEC_TUNING_SECONDS, or
            0, which uses rules or earlier measurements of `dagexec tune` (docs/tuning.md).
        library_states: on CUDA, cuDNN operators take turns at the device's four library states instead of working on
            their own streams, which bounds the memory of their workspaces (docs/cudnn.md).
        operator_arguments: arguments for every operator that supports them and does not set them already:
            `{"shared_buffer": 1}` lets all convolutions share a buffer, `{"exhaustive_search": 1}` measures algorithms.
        islands: whether sessions of onnxruntime or OpenVINO compute parts of the net, on cpu (docs/islands.md). "auto":
            where measuring finds them faster, and tests that they keep what `nan` and `batch_invariant` promise; in
            short runs where there are neither `tuning_seconds` nor an earlier measurement. A runtime's name: that one
            computes all that it can and that passes the tests, faster or not. "none": own kernels only. None: the same,
            but onnxruntime, where it is installed, on processors for which there are no kernels at all.
        progress: called in the thread that compiles with a short description of each stage of compilation, which is
            also logged at level DEBUG for "dagexec".

    How it is embedded:
        foreign: nodes of an ONNX model that dagexec has no operators for are computed by onnxruntime, where it is
            installed, or else by onnx.reference, slowly (docs/onnx.md). With False such a model is refused.
        allow_io: allow operators to read and write files and to communicate with other processes; otherwise they can
            only read databases in the folder of the model's own files (docs/security.md).
        pool: who runs the model. None: if it only computes, on the host, and `num_workers` is left open, workers that
            the process has for all such models, no more than cores; otherwise workers of its own, as with "own". Or a
            `Pool`.
        max_queued: maximum number of requests that wait for a replica; None for no limit.
        when_full: what a call does when the queue is full: "wait" for admission, or "reject" with QueueFullError.
        max_batch: the most rows of one run: requests that wait are joined along the batch axis, and their results split
            again; 1 joins none. A request may have several rows, and no more than these. With `batch_invariant=False`
            the last places of a result may depend on who else was in the batch.
        max_wait: seconds that a request waits at most, while a replica is idle, for others to join it; none while
            requests come one at a time.
        batch_axes: the axis of each input that has one for rows; by default axis 0 wherever its size is free.
        batch_padding: joins requests of different lengths as well, padded to sizes that are given; the caller vouches
            that the model's mask makes padding invisible (`BatchPadding`).
        any_length: texts of any length run on a net for a full length, somewhat longer, so that a new length is not
            prepared (docs/memory.md); with False each length is prepared as it is.
        session_bytes: the most bytes that caches of all sessions may take (`Executor.session`); None for no limit but
            the machine's.
        warm_start: prepare and run every replica once with zeros, so that the first request is as fast as later ones
            (see `Executor.warm_up`); or the shapes of these zeros by input name.
        telemetry: create an OpenTelemetry span for each run; True uses the global tracer provider, or give a tracer.
        metrics: count requests and measure their times and memory with OpenTelemetry's metrics; True uses the global
            meter provider, or give a meter.
        run_times: where what requests wait, and their feeding, running and fetching take, is added up.
    """

    optimize: bool = True
    dtype: Precision = "float32"
    calibration: Feeds | Iterable[Feeds] | None = None
    layout: str | None = None
    nan: Nan = "kept"
    batch_invariant: bool = True
    passes: Sequence[str] = ()
    without_passes: Collection[str] = ()
    keep: Collection[str] = ()
    shapes: Shapes | None = None
    tuning_seconds: float | None = None
    library_states: bool = False
    operator_arguments: Mapping[str, ArgumentValue] | None = None
    islands: Islands | None = None
    progress: Callable[[str], object] | None = field(default=None, compare=False)

    foreign: bool = True
    allow_io: bool = False
    pool: Pool | Literal["own"] | None = None
    max_queued: int | None = None
    when_full: WhenFull = "wait"
    max_batch: int = 1
    max_wait: float = 0.002
    batch_axes: Mapping[str, int] | None = None
    batch_padding: BatchPadding | None = None
    any_length: bool = True
    session_bytes: int | None = None
    warm_start: bool | Shapes = False
    telemetry: bool | Tracer = False
    metrics: bool | Meter = False
    run_times: RunTimes | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "passes", (self.passes,) if isinstance(self.passes, str) else tuple(self.passes))
        object.__setattr__(self, "without_passes", frozenset(self.without_passes))
        object.__setattr__(self, "keep", frozenset(self.keep))
        object.__setattr__(self, "calibration", _runs(self.calibration))
        device = self.default_device
        for name, allowed in _ONE_OF.items():
            found = getattr(self, name)
            if found not in allowed and not (name == "islands" and found is None):
                raise SettingError(f"{name} is one of {', '.join(allowed)}, not {found!r}")
        if self.dtype == "float16" and device == CPU:
            raise SettingError("dtype 'float16' is for cuda:N: processors compute in it no faster; try 'bfloat16'")
        layouts = LAYOUTS if device == CPU else (NHWC, NCHW)
        if self.layout is not None and self.layout not in layouts:
            raise SettingError(f"layout is one of {', '.join(layouts)} on {device}, not {self.layout!r}")
        seconds = self.tuning_seconds
        if seconds is not None and (not isinstance(seconds, Real) or not seconds >= 0):
            raise SettingError(f"tuning_seconds must be 0 or more, not {seconds!r:.80}")
        for name in ("max_queued", "session_bytes"):
            most = getattr(self, name)
            if most is not None and (not isinstance(most, Integral) or most < 0):
                raise SettingError(f"{name} must be 0 or more, or None, not {most!r:.80}")
        if not isinstance(self.max_batch, Integral) or self.max_batch < 1:
            raise SettingError(f"max_batch must be 1 or more, not {self.max_batch!r:.80}")
        if not isinstance(self.max_wait, Real) or not 0 <= self.max_wait < math.inf:
            raise SettingError(f"max_wait must be 0 or more seconds, not {self.max_wait!r:.80}")
        for name, axis in (self.batch_axes or {}).items():
            if not isinstance(axis, Integral) or axis < 0:
                raise SettingError(f"batch_axes must be 0 or more, not {axis!r:.80} for {name!r:.80}")
        if self.batch_padding is not None and self.max_batch == 1:
            raise SettingError("batch_padding is for requests that are joined: give max_batch, too")

    @property
    def calibration_runs(self) -> tuple[Feeds, ...]:
        """Inputs, each for one run, that ranges for int8 are taken from."""
        return cast(tuple[Feeds, ...], self.calibration)

    def kept(self) -> CompileOptions:
        """The same without what is the caller's: inputs to calibrate with, and a function to report to."""
        if not self.calibration and self.progress is None:
            return self
        return self.with_chosen(calibration=(), progress=None)

    def report(self, stage: str) -> None:
        """Report the next stage to the log and to `progress`."""
        logger.debug("compilation: %s", stage)
        if self.progress is not None:
            self.progress(stage)


def _runs(feeds: Feeds | Iterable[Feeds] | None) -> tuple[Feeds, ...]:
    if feeds is None:
        return ()
    return (feeds,) if isinstance(feeds, Mapping) else tuple(feeds)


DEFAULT_OPTIONS = CompileOptions()


Source = TypeVar("Source", contravariant=True)
Fields = ParamSpec("Fields")
Made = TypeVar("Made", covariant=True)


class TakesOptions(Protocol[Source, Fields, Made]):
    """A function of a model and its options: the value, keywords for fields of it, or the value and what differs."""

    def __call__(
        self, model: Source, options: CompileOptions | None = None, *_: Fields.args, **fields: Fields.kwargs
    ) -> Made:
        """What the function returns for the model."""
        ...


def with_keywords_of(
    options_class: Callable[Fields, CompileOptions],
) -> Callable[[Callable[[Source, CompileOptions], Made]], TakesOptions[Source, Fields, Made]]:
    """A decorator for a function of options: it takes their fields as keywords, too, in its documentation as well."""

    def decorate(function: Callable[[Source, CompileOptions], Made]) -> TakesOptions[Source, Fields, Made]:
        @wraps(function)
        def public(
            model: Source, options: CompileOptions | None = None, *_: Fields.args, **fields: Fields.kwargs
        ) -> Made:
            return function(
                model,
                options_class(*_, **fields) if options is None else replace(options, **cast(dict[str, Any], fields)),
            )

        accepted = inspect.signature(public, follow_wrapped=False).parameters
        parameters = [accepted["model"], accepted["options"], *inspect.signature(options_class).parameters.values()]
        result = inspect.signature(function).return_annotation
        public.__signature__ = inspect.Signature(parameters, return_annotation=result)  # type: ignore[attr-defined]
        public.__doc__ = "\n\n".join((inspect.getdoc(function) or "", _sections(RunOptions), _sections(CompileOptions)))
        return public

    return decorate


def _sections(documented: type) -> str:
    return inspect.cleandoc(documented.__doc__ or "").partition("\n\n")[2]
