"""Compilation: from a model as it is given to the net that runs - passes, layout, net type and workers.

`compile_model` runs the init net, so that parameters are arrays, then the passes; it compares layouts of images by
measurement (`dagexec.compiler.tuning`) and remembers which one won (`core.choices`). What it returns is an ordinary
model, and a report of what was done to it.
"""

from __future__ import annotations

import gc
import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal

from dagexec.binding.parameters import initialized
from dagexec.compiler.compiled import CompilationReport, Compiled
from dagexec.compiler.passes.any_nan import ANY_NAN
from dagexec.compiler.passes.batch_variance import BATCH_VARIANCE
from dagexec.compiler.passes.bodies import PASS as BODIES
from dagexec.compiler.passes.catalog import FINISHING, SIMPLIFYING
from dagexec.compiler.passes.cudnn_engine import CUDNN_ENGINE, CUDNN_STATES
from dagexec.compiler.passes.engine import ENGINE
from dagexec.compiler.passes.layout import LAYOUT, layout_pass, layouts
from dagexec.compiler.passes.low_precision import PRECISION_PASSES, with_integers, with_precision
from dagexec.compiler.passes.own import own_passes, with_own
from dagexec.compiler.passes.owned_parameters import OwnedParameters
from dagexec.compiler.passes.padded_rows import PASS as PADDED_ROWS
from dagexec.compiler.passes.rewriting import Pass, PassReport, check_pass_names, run_passes
from dagexec.compiler.stages import by_stage
from dagexec.compiler.tuning.bench import Bench, placeholder_inputs, random_inputs
from dagexec.compiler.tuning.choosing import Choice, Estimated, Known, choose
from dagexec.compiler.tuning.layouts import estimated_layout, fastest_layout, fingerprint
from dagexec.core.choices import choices
from dagexec.core.device import CPU
from dagexec.core.model import Model
from dagexec.core.purity import is_known
from dagexec.errors import DeadlineExceededError, ResourceError, RunTimeoutError, SettingError
from dagexec.ops.base.layout import LAYOUTS, NCHW
from dagexec.ops.engines.onednn.binding import engine_library
from dagexec.ops.kernels.machine import are_switched_off
from dagexec.options import CompileOptions
from dagexec.platform import processor
from dagexec.platform.deadline import Deadline, check_stop
from dagexec.platform.garbage_collection import garbage_collection_paused
from dagexec.platform.lazy import LazyModule
from dagexec.scheduler.run.prediction import TimedTasks

if not TYPE_CHECKING:
    hashlib = LazyModule("hashlib")
else:
    import hashlib

logger = logging.getLogger("dagexec")

PASSES: tuple[Pass, ...] = (*with_integers(SIMPLIFYING), ENGINE, PADDED_ROWS, BODIES, LAYOUT, *FINISHING)
"""All passes, in order."""

_SMALL = 16  # operators

_LAYOUT_SHARE, _SEARCH_SHARE, _RUN_SHARE = 0.3, 0.5, 0.2  # of the seconds for tuning


def compile_model(model: Model, options: CompileOptions, *, takes_parameters: bool = False) -> Compiled:
    """Rewrite `model`, and choose for it what `options` leave open.

    With `takes_parameters` the model's are gone afterwards, so that no memory is spent on those that passes replace.

    Raises ArgumentError for a pass that does not exist, and what the init net, inference and passes raise.
    """
    model = model.as_records()
    of_options = (CUDNN_ENGINE, CUDNN_STATES, ANY_NAN, BATCH_VARIANCE)
    check_pass_names(options.without_passes, (*PASSES, *own_passes(options.passes), *of_options, *PRECISION_PASSES))
    if not options.optimize:
        return _as_given(model if options.batch_invariant else BATCH_VARIANCE.apply(model).model, options)
    if options.default_device != CPU:
        return _for_device(model, options)
    try:
        if options.dtype == "float32":
            options = replace(options, islands=options.islands or _default_islands(model))
            if options.islands != "none":
                return _with_islands(model, options)
        return _on_own_kernels(model, options, takes_parameters=takes_parameters)
    except MemoryError as error:
        raise ResourceError(f"net {model.name!r}: compilation: the system is out of memory: {error}") from error


def _default_islands(model: Model) -> Literal["none", "onnxruntime"]:
    """Those of onnxruntime where no kernels run, unless they are switched off, and it is installed."""
    if engine_library() is not None or are_switched_off() or find_spec("onnxruntime") is None:
        return "none"
    logger.info("net %r: no kernels run on this processor: onnxruntime computes what it can (islands)", model.name)
    return "onnxruntime"


def _with_islands(model: Model, options: CompileOptions) -> Compiled:
    from dagexec.compiler.islands.choice import IslandsChoice  # nobody else pays for the import

    given, plain = initialized(model), replace(options, islands="none")
    key = _Compilation(given, plain, takes_parameters=False).key
    seconds = _tuning_seconds(options)
    return IslandsChoice(given, _with_kept(given, options), options, seconds, _on_own_kernels, key).result()


def _on_own_kernels(model: Model, options: CompileOptions, *, takes_parameters: bool = False) -> Compiled:
    compilation = _Compilation(model, options, takes_parameters=takes_parameters)
    if options.calibration_runs or _tuning_seconds(options):  # nets are run, and let go of
        found = compilation.result()
        del compilation
        gc.collect()  # the nets, with packed weights, are parts of circles
        return found
    with garbage_collection_paused():
        return compilation.result()


def _as_given(model: Model, options: CompileOptions, report: CompilationReport | None = None) -> Compiled:
    net_type = options.net_type or ("async_dag" if options.capture else "dag")
    workers = options.num_workers or options.most_workers(net_type)
    return Compiled(model, options.with_chosen(net_type=net_type, num_workers=workers), report)


def _for_device(model: Model, options: CompileOptions) -> Compiled:
    """On a device, the passes that are not for oneDNN; on CUDA those for cuDNN instead."""
    start = time.perf_counter()
    layout = options.layout or NCHW
    states = (CUDNN_STATES,) if options.library_states else ()
    any_nan = (ANY_NAN,) if options.nan == "any" else ()
    of_device = (CUDNN_ENGINE, *states, *any_nan, layout_pass(layout)) if options.default_device.kind == "cuda" else ()
    passes = with_own((*SIMPLIFYING, *of_device, *FINISHING), own_passes(options.passes))
    passes = with_precision(passes, options.dtype, options.calibration_runs)
    passed = _by_stage(_with_kept(initialized(model), options), options, lambda part: _run(part, passes, options))
    seconds = {"passes": time.perf_counter() - start}
    report = CompilationReport(passed.outcomes, layout, None, "estimated", seconds)
    return _as_given(passed.model.changed(outputs=model.outputs), options, report)


def _with_kept(model: Model, options: CompileOptions) -> Model:
    """The model with all blobs as outputs that may be requested: passes leave those alone."""
    return model.changed(outputs=(*model.outputs, *sorted(set(options.keep).difference(model.outputs))))


def _run(model: Model | PassReport, passes: Sequence[Pass], options: CompileOptions) -> PassReport:
    known = {one.name for one in passes}
    return run_passes(model, passes, known.intersection(options.without_passes))


def _by_stage(model: Model, options: CompileOptions, rewrite: Callable[[Model], PassReport]) -> PassReport:
    """A pipeline's stages one by one; all in one where calibration has to see it run."""
    return rewrite(model) if options.calibration_runs else by_stage(model, rewrite)


class _Compilation:
    """A model on its way: every stage is timed, and measures only what is not known already."""

    def __init__(self, model: Model, options: CompileOptions, *, takes_parameters: bool) -> None:
        self._outputs = model.outputs
        self._options = options
        self._seconds: dict[str, float] = {}
        self._stage: tuple[str, float] | None = None
        self._begin_stage("init net")
        self._model = _with_kept(initialized(model), options)
        self._tuning = _tuning_seconds(options)
        plain = options.dtype == "float32" and not options.calibration_runs
        if takes_parameters and plain and not self._tuning:  # models are neither run nor compared
            self._model = self._model.changed(parameters=OwnedParameters(self._model.parameters))
            if isinstance(model.parameters, dict):
                model.parameters.clear()
        self._deadline = Deadline(self._tuning)
        self._inputs = placeholder_inputs(self._model, options.shapes or {})
        self._bench: Bench | None = None
        self._laid_out: dict[str, PassReport] = {}
        self._origin = ""  # of the layout, where there is one to choose

    def result(self) -> Compiled:
        """The compiled model."""
        layouts: dict[str, None] = {}

        def rewrite(model: Model) -> PassReport:
            one = self if model is self._model else self._of_stage(model)
            layout, report = one.rewritten()
            layouts[layout] = None
            return report

        passed = _by_stage(self._model, self._options, rewrite)
        self._begin_stage("schedule")
        choice = self._schedule(passed.model)
        self._end_stage()
        report = CompilationReport(
            passed.outcomes, ", ".join(layouts), choice, self._origin or choice.origin, self._seconds
        )
        for line in report.lines() if logger.isEnabledFor(logging.DEBUG) else ():
            logger.debug("net %r: %s", self._model.name, line)
        options = self._options.with_chosen(net_type=choice.net_type, num_workers=choice.workers)
        return Compiled(passed.model.changed(outputs=self._outputs), options, report)

    def rewritten(self) -> tuple[str, PassReport]:
        """The layout of images, and the model in it."""
        passes = with_own(PASSES, own_passes(self._options.passes))
        passes = with_precision(passes, self._options.dtype, self._options.calibration_runs)
        place = passes.index(LAYOUT)
        before, after = passes[:place], passes[place + 1 :]
        if self._options.nan == "any":
            before = (*before, ANY_NAN)
        if not self._options.batch_invariant:
            before = (*before, BATCH_VARIANCE)
        self._begin_stage("passes")
        if not self._tuning:
            return self._in_one_run(before, after)
        early = _run(self._model, before, self._options)
        self._begin_stage("layout")
        layout = self._layout(early, after)
        late = self._late(early, after, layout)
        return layout, PassReport(late.model, (*early.outcomes, *late.outcomes))

    def _in_one_run(self, before: Sequence[Pass], after: Sequence[Pass]) -> tuple[str, PassReport]:
        """All passes, where layouts are not compared: the model as it is then tells which one it should have."""
        chosen = [NCHW if LAYOUT.name in self._options.without_passes else self._options.layout or NCHW]

        def layout(model: Model) -> str:
            self._begin_stage("layout")
            chosen[0] = self._layout_unmeasured(model)
            return chosen[0]

        report = _run(self._model, (*before, layout_pass(layout), *after), self._options)
        if self._origin == "estimated" and not _has_changed_layout(report):
            self._origin, chosen[0] = "", NCHW
        return chosen[0], report

    def _layout_unmeasured(self, model: Model) -> str:
        """The layout that is requested, or known from earlier measurements, or by rule."""
        if self._options.layout is not None:
            return self._options.layout
        known = self._known("layout", model)
        self._origin = "known" if known in LAYOUTS else "estimated"
        return known if known in LAYOUTS else self._layout_by_rule(model)

    def _of_stage(self, model: Model) -> _Compilation:
        """That of a stage, with its share of the seconds for tuning."""
        given = self._options.shapes or {}
        shapes = {name: given[name] for name in model.inputs if name in given}
        seconds = self._tuning / len(self._model.stages)
        options = replace(self._options, shapes=shapes or None, tuning_seconds=seconds)
        return _Compilation(model, options, takes_parameters=False)

    def _begin_stage(self, name: str) -> None:
        self._end_stage()
        check_stop()
        self._options.report(name)
        self._stage = name, time.perf_counter()

    def _end_stage(self) -> None:
        if self._stage is not None:
            name, start = self._stage
            self._seconds[name] = time.perf_counter() - start
            self._stage = None

    def _late(self, early: PassReport, after: Sequence[Pass], layout: str) -> PassReport:
        """The passes from `layout` on, for one of the layouts; run once for each."""
        if layout not in self._laid_out:
            self._laid_out[layout] = _run(early, [layout_pass(layout), *after], self._options)
        return self._laid_out[layout]

    def _layout(self, early: PassReport, after: Sequence[Pass]) -> str:
        """The layout: by rule where nothing may be measured, NCHW where nothing is there to choose."""
        model = early.model
        if "layout" in self._options.without_passes:
            return NCHW
        if self._options.layout is not None:
            return self._options.layout
        known = self._known("layout", model)
        if known in LAYOUTS:
            self._origin = "known"
            return known
        bench = self._measures()
        first = self._layout_by_rule(model) if bench is None else LAYOUTS[0]
        report = self._late(early, after, first)
        if not _has_changed_layout(report):
            self._laid_out[NCHW] = report
            return NCHW
        self._origin = "estimated" if bench is None else "measured"
        if bench is None:
            return first
        plain = len(model.program.op) <= _SMALL  # larger nets are faster in another order, and NCHW is slow to measure
        names = [name for name in layouts() if plain or name != NCHW]
        seconds = min(self._tuning * _LAYOUT_SHARE, self._left())
        found = fastest_layout(names, lambda name: self._late(early, after, name).model, bench, seconds, self._deadline)
        layout = self._layout_by_rule(model) if found is None else found
        if found is not None and not self._deadline.is_over:  # else some may not have been tried
            layout = choices.keep(self.key("layout", model), found)
        bench.keep_only(self._late(early, after, layout).model)
        return layout

    def _layout_by_rule(self, model: Model) -> str:
        return estimated_layout(model, self._inputs) if self._options.dtype == "float32" else LAYOUTS[0]

    def _schedule(self, model: Model) -> Choice:
        """Net type and workers, by what a run takes: as it is measured, as it was, or as it is estimated."""
        estimated = Estimated(model, self._inputs)
        known = _seconds(self._known("run", model))
        if known is not None:
            tasks = estimated.tasks
            return choose(model, self._options, Known(tasks and tasks.taking(known)), "known")
        measured = self._measured_tasks(model)
        if measured is not None:
            return choose(model, self._options, Known(measured), "measured")
        return choose(model, self._options, estimated)

    def _measured_tasks(self, model: Model) -> TimedTasks | None:
        """The tasks of a run with their times, which are kept; None where they cannot be measured."""
        bench = self._measures()
        try:
            found = None if bench is None else bench.tasks(model, min(self._tuning * _RUN_SHARE, self._left()))
        except (DeadlineExceededError, RunTimeoutError) as error:
            logger.info("net %r: scheduled by estimates: %s", model.name, str(error))
            found = None
        except Exception as error:  # whatever an operator raises for inputs that are made up
            logger.warning(
                "net %r: not measured, give compile() the shapes to tune for: %s: %s",
                model.name, type(error).__name__, str(error),
            )  # fmt: skip
            found = None
        if found is not None:
            choices.keep(self.key("run", model), repr(found.work))
            choices.flush()
        return found

    def _measures(self) -> Bench | None:
        """What measures; None where there is no time for it, or no inputs are known to do it with.

        An application's own operators are not run to be measured: they may do more than compute.
        """
        if self._deadline.is_over or self._inputs is None or not all(map(is_known, self._model.program.op)):
            return None
        if self._bench is None:
            try:
                inputs = random_inputs(self._model, self._options.shapes or {})
            except ResourceError as error:
                logger.warning("%s; not measured", str(error))
                return None
            assert inputs is not None
            self._bench = Bench(inputs, self._tuning * _SEARCH_SHARE, self._deadline, self._report_tuning)
        return self._bench

    def _report_tuning(self, stage: str) -> None:
        self._options.report(f"{stage} ({self._left():.1f} of {self._tuning:g} s left)")

    def _left(self) -> float:
        """What is left of the seconds for tuning."""
        return max(0.0, self._deadline.left())

    def _known(self, what: str, model: Model) -> str | None:
        """What was kept before under `key`."""
        return None if choices.is_empty() else choices.find(self.key(what, model))

    def key(self, what: str, model: Model, asked: object = None) -> str:
        """What a choice depends on: the net with its constants' shapes, the sizes, the machine, and what was asked."""
        found = engine_library()
        shapes = sorted((name, array.shape, str(array.dtype)) for name, array in model.parameters.items())
        sizes = sorted((name, array.shape, str(array.dtype)) for name, array in (self._inputs or {}).items())
        digest = hashlib.sha256(fingerprint(model.program))
        digest.update(repr((shapes, sizes, asked, sorted(self._options.without_passes))).encode())
        if self._options.passes:
            digest.update(repr(self._options.passes).encode())
        kernels = "none" if found is None else found.described()
        cores = processor.available_cores()
        net = f"{model.name} {digest.hexdigest()[:32]}"
        return f"{what} | {processor.processor_key()} | {cores} cores | onednn {kernels} | {net}"


def _has_changed_layout(report: PassReport) -> bool:
    return any(one.changes for one in report.outcomes if one.name == LAYOUT.name)


def _seconds(text: str | None) -> float | None:
    """The positive number that `text` is; None where it is something else."""
    try:
        seconds = float(text or "")
    except ValueError:
        return None
    return seconds if 0 < seconds < math.inf else None


def _tuning_seconds(options: CompileOptions) -> float:
    """The seconds that may be spent on measuring. Raises SettingError when DAGEXEC_TUNING_SECONDS is no such number."""
    if options.tuning_seconds is not None:
        return options.tuning_seconds
    given = os.environ.get("DAGEXEC_TUNING_SECONDS", "")
    try:
        seconds = float(given) if given else 0.0
    except ValueError:
        seconds = math.nan
    if not seconds >= 0:
        raise SettingError(f"DAGEXEC_TUNING_SECONDS must be a number of seconds, 0 or more, found {given!r}")
    return seconds
