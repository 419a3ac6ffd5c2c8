"""Executors from plans: files of the compiler's decisions. A plan that does not fit this process is compiled anew."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dagexec.binding.parameters import check_operators
from dagexec.core.io_access import IO
from dagexec.core.model import Model
from dagexec.core.spelling import did_you_mean
from dagexec.errors import PlanError, SettingError
from dagexec.executor.batching.axes import BatchAxes
from dagexec.executor.executor import Executor
from dagexec.executor.source.options import as_asked, kept_options, with_workers
from dagexec.executor.source.origin import Origin
from dagexec.executor.source.types import GivenTypes
from dagexec.options import DEFAULT_OPTIONS, CompileOptions
from dagexec.plans.kept_options import DECIDED, RUNNING
from dagexec.plans.plan import KeptPlan, PlanFile
from dagexec.platform.garbage_collection import garbage_collection_paused
from dagexec.platform.lazy import LazyModule
from dagexec.platform.processor import available_cores

if not TYPE_CHECKING:
    bench = LazyModule("dagexec.compiler.tuning.bench")
    choosing = LazyModule("dagexec.compiler.tuning.choosing")
else:
    from dagexec.compiler.tuning import bench, choosing

logger = logging.getLogger("dagexec")

Compile = Callable[[Model, CompileOptions], Executor]


def check_running(names: Mapping[str, object]) -> None:
    """Raise SettingError for a name that is no option of running a plan."""
    for name in names.keys() - RUNNING:
        if name in DECIDED:
            raise SettingError(
                f"{name} was decided when the plan was built: build another, or compile the plan's model"
            )
        raise SettingError(f"{name!r} is no option for opening a plan{did_you_mean(name, RUNNING)}")


def given_differently(options: CompileOptions) -> dict[str, Any]:
    """The options that differ from the defaults."""
    values = ((field_.name, getattr(options, field_.name)) for field_ in fields(options))
    return {name: value for name, value in values if value != getattr(DEFAULT_OPTIONS, name)}


def plan_for(path: Path, options: CompileOptions) -> tuple[PlanFile | None, CompileOptions]:
    """The plan at `path` and its options, overridden by those of `options` that are set; None where they need another.

    Raises ModelFormatError.
    """
    plan, given = KeptPlan(path), given_differently(options)
    return None if _other(plan, given) else plan.file, replace(plan.options, **given)


def _other(plan: KeptPlan, given: Mapping[str, Any]) -> str | None:
    """The first option that decided the plan and is now different."""
    return next((name for name in sorted(DECIDED & given.keys()) if given[name] != getattr(plan.options, name)), None)


def opened(path: Path, given: Mapping[str, Any], compile_anew: Compile, *, mapped: bool = True) -> Executor:
    """The executor of the plan at `path`, with the options of `given` in place of its own.

    Where the plan does not fit this process or the options of `given`, its source model is compiled by
    `compile_anew`, and one line of the log says why.

    Raises ModelFormatError for a damaged plan, PlanError where the model cannot be compiled anew, and what `compile`
    does.
    """
    with garbage_collection_paused():
        plan = KeptPlan(path, mapped=mapped)
        options = replace(plan.options, **given)
        other = _other(plan, given)
        reason = plan.misfit() if other is None else f"it was made with {other}={getattr(plan.options, other)!r:.80}"
        if reason is None:
            return _executor(plan, options)
        if plan.is_calibrated and not options.calibration_runs:
            raise PlanError(
                f"{path}: {reason}; compiling anew needs inputs for calibration, which a plan does not keep"
            )
        logger.warning("%s: compiled anew: %s", path, reason)
        model = plan.checked_given()
    return compile_anew(_allowed(model, options), options)


def _executor(plan: KeptPlan, options: CompileOptions) -> Executor:
    given = _allowed(plan.given(), options)  # rarely used: its records are made on demand
    origin = Origin(given, options, plan.is_calibrated, plan.kept())
    if options.replicas is None and any((options.net_type, options.num_workers, options.intra_op_threads)):
        options = replace(options, replicas=1)
    options = with_workers(options)
    model = _allowed(plan.compiled(), options).as_records()
    check_operators(model)
    net_type = options.net_type or plan.net_type
    if options.net_type is None and (plan.cores != available_cores() or options.policy is not None):
        estimated = choosing.Estimated(model, bench.placeholder_inputs(model, options.shapes or {}))
        net_type = choosing.choose(model, options, estimated).net_type
    workers = options.num_workers or options.most_workers(net_type)
    given = as_asked(given, options)
    axes = BatchAxes(given.as_records(), options) if options.max_batch > 1 else None
    types = cache(partial(GivenTypes.of, given)) if options.optimize else None
    kept = kept_options(model, replace(options, net_type=net_type, num_workers=workers))
    return Executor(model, kept, given, given_types=types, batch_axes=axes, origin=origin)


def _allowed(model: Model, options: CompileOptions) -> Model:
    """The model with its operators' access rights, like those of any model from a file."""
    return model.changed(allow_io=IO.ANY if options.allow_io else IO.READ_FOLDER)
