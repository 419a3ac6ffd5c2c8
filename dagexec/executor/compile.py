"""`dagexec.compile`: from a model in any supported form to an Executor that is ready to run."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dagexec.binding.parameters import check_operators
from dagexec.core.model import MakesModel, Model
from dagexec.core.runtime import runtime_of
from dagexec.core.spelling import did_you_mean
from dagexec.errors import FeedError
from dagexec.executor.executor import Executor
from dagexec.executor.source.loading import ModelSource, is_plan
from dagexec.executor.source.options import as_asked, kept_options, with_workers
from dagexec.executor.source.origin import Origin, loaded
from dagexec.executor.source.types import GivenTypes
from dagexec.ops.engines.onednn.binding import engine_library
from dagexec.options import CompileOptions, with_keywords_of
from dagexec.platform.deadline import check_stop
from dagexec.platform.host_memory import give_back_free_memory
from dagexec.platform.lazy import LazyModule
from dagexec.scheduler.workers.place import Place

if not TYPE_CHECKING:
    batch_axes = LazyModule("dagexec.executor.batching.axes")
    branches = LazyModule("dagexec.executor.branches")
    compilation = LazyModule("dagexec.compiler.compilation")
    metrics = LazyModule("dagexec.executor.telemetry.metrics")
    opening = LazyModule("dagexec.executor.opening")
    overriding = LazyModule("dagexec.executor.overriding")
    spans = LazyModule("dagexec.executor.telemetry.spans")
else:
    from dagexec.compiler import compilation
    from dagexec.executor import branches, opening, overriding
    from dagexec.executor.batching import axes as batch_axes
    from dagexec.executor.telemetry import metrics, spans


@with_keywords_of(CompileOptions)
def compile(model: ModelSource, options: CompileOptions) -> Executor:
    """Load a model and make it ready to run, from any number of threads and tasks.

        with dagexec.compile("model.onnx", net_type="dag", num_workers=2, replicas=4) as executor:
            outputs = executor.run({"data": array})  # {name: array}

    `model` is a file, a folder, a protobuf message or its bytes, a `Model`, a `Pipeline`, or "zoo:NAME": what
    `dagexec.load_model` accepts. Give options as keywords, or as one `CompileOptions`; additional keywords replace its
    fields. For a plan (`dagexec.open`), options at their defaults are the plan's; with others it is compiled anew.

    Raises ModelFormatError, SchemaError, UnsupportedOperatorError, CycleError, ShapeError, DeviceError, AccessError for
    an operator that accesses more than is allowed, ArgumentError for an argument that no operator has, FeedError for a
    blob in `keep` that the model does not have, SettingError for an option out of range, RowsError for requests to be
    joined (`max_batch`) by a model whose rows cannot be shown to be apart, and with `warm_start` what
    `Executor.warm_up` raises. ClosedError for a `pool` that is closed.
    """
    if is_plan(model):
        _require(options)
        return opening.opened(Path(model), opening.given_differently(options), _compiled)
    return _compiled(model, options)


def open(path: str | os.PathLike[str], *, mapped: bool = True, **options: Any) -> Executor:
    """The executor of a plan, a compiled model that `dagexec build` or `Executor.save` has put into a file.

        with dagexec.open("net.dagexec", replicas=4) as executor:
            outputs = executor.run({"data": array})

    Nothing in the file is executed, and nothing is compiled where it was made with the same versions and for such a
    processor; otherwise the model that it was made of is compiled, and one line of the log says why.

    Args:
        path: of the file.
        mapped: map the file, so that only what is used is read, and processes share it. It may be replaced or removed
            meanwhile, and must not be written to where it is. False reads all of it into memory and compares all hashes
            first, those of large weights too.
        options: keywords of `compile` that say how the model runs and is embedded, in place of those that it was
            compiled with: replicas, num_workers, pool, max_batch, ...

    Raises ModelFormatError for what is no plan or a damaged one, SettingError for an option that a plan has decided,
    PlanError where it has to be compiled anew and cannot be, and what `compile` does.
    """
    opening.check_running(options)
    _require(CompileOptions(**options))
    return opening.opened(Path(path), options, _compiled, mapped=mapped)


def build(model: ModelSource, path: str | os.PathLike[str], options: CompileOptions) -> Executor:
    """Compile `model`, run it once with zeros where its shapes are known, and save it as a plan at `path`.

    Returns the executor, which the caller closes. Raises what `compile` and `Executor.save` do.
    """
    executor = compile(model if isinstance(model, MakesModel) else loaded(model, options), options)
    try:
        executor.save(path)
    except BaseException:
        executor.close()
        raise
    return executor


def _require(options: CompileOptions) -> None:
    """Raise DagexecError for telemetry or metrics that are requested and not installed, before any other work."""
    if options.telemetry is not False:
        spans.require_telemetry()
    if options.metrics is not False:
        metrics.require_metrics()


def _compiled(model: ModelSource, options: CompileOptions) -> Executor:
    """The executor of anything but a plan."""
    origin = Origin.of(model, options)
    if options.replicas is None and any((options.net_type, options.num_workers, options.intra_op_threads)):
        options = replace(options, replicas=1)
    options = with_workers(options)
    if options.optimize:
        engine_library()  # first, as loading it takes a lot of memory for a moment
    source = loaded(model, options).as_records()
    check_stop()
    _require(options)
    return _executor(
        source, options, keeps_parameters=isinstance(model, Model | MakesModel), origin=origin, splits=True
    )


def _executor(
    model: Model,
    options: CompileOptions,
    place: Place | None = None,
    *,
    keeps_parameters: bool = False,
    origin: Origin | None = None,
    splits: bool = False,
) -> Executor:
    """Compile `model`, for the workers of `place` if given; the caller may keep the parameters in memory anyway.

    Where it `splits`, branches of which an input says which one is run are compiled when they are.
    """
    check_operators(model)
    overridable = model.overridable
    if overridable is not None and not overridable.belongs_to(model):
        overridable = None
    runtime_of(options.default_device)
    model = as_asked(model, options)
    _check_kept(model, options.keep)
    _check_shaped(model, options.shapes or ())
    splits = splits and overridable is None and options.max_batch == 1
    if splits and any(node.type == "If" for node in model.program.op) and (condition := branches.condition_of(model)):
        return _of_branches(model, options, condition, origin)
    source_types = GivenTypes.of(model) if options.optimize else None  # before parameters go
    axes = batch_axes.BatchAxes(model, options) if options.max_batch > 1 else None
    given = model if keeps_parameters else model.changed(parameters={})  # frees parameters that passes replaced
    takes, parameter_bytes = not keeps_parameters and model.overridable is None, _parameter_bytes(model)
    compiled = compilation.compile_model(model, options, takes_parameters=takes)
    give_back_free_memory(parameter_bytes + _parameter_bytes(compiled.model))
    kept = kept_options(compiled.model, compiled.options)
    types = None if source_types is None else lambda: source_types
    if overridable is None:
        executor = Executor(compiled.model, kept, given, place, types, axes, origin)
        if options.optimize and options.warm_start is False:
            _prepare_first_step(executor)
        return executor
    return overriding.OverridableExecutor(compiled.model, kept, given, types, overridable, _executor, axes)


def _prepare_first_step(executor: Executor) -> None:
    try:
        executor.prepare_first_step()
    except BaseException:
        executor.close()
        raise


def _of_branches(model: Model, options: CompileOptions, condition: str, origin: Origin | None) -> Executor:
    """The executor of a model of branches; what it has of both is not made for runs."""
    types, later = GivenTypes.of(model), replace(options, warm_start=False)
    whole = compilation.compile_model(model, replace(options, optimize=False))
    kept = replace(kept_options(whole.model, whole.options), warm_start=options.warm_start)

    def build(taken: bool | None, place: Place | None) -> Executor:
        if taken is None:
            return _executor(model, later, keeps_parameters=True, origin=origin)
        branch = branches.branch_of(model, condition, taken)
        shapes = {name: shape for name, shape in (options.shapes or {}).items() if name in branch.inputs}
        return _executor(branch, replace(later, shapes=shapes or None, keep=()), place)

    return branches.BranchedExecutor(whole.model, kept, model, lambda: types, condition, build, origin)


def _parameter_bytes(model: Model) -> int:
    return sum(array.nbytes for array in model.parameters.values())


def _check_shaped(model: Model, names: Iterable[str]) -> None:
    for name in names:
        if name not in model.inputs:
            hint = did_you_mean(name, model.inputs)
            raise FeedError(
                f"net {model.name!r}: shapes: {name!r} is not an input; it has {sorted(model.inputs)}{hint}"
            )


def _check_kept(model: Model, names: Iterable[str]) -> None:
    unknown = set(names) - model.inputs.keys() - model.parameters.keys()
    if unknown and (unknown := unknown.difference(*(operator.output for operator in model.program.op))):
        raise FeedError(f"net {model.name!r}: keep: {sorted(unknown)} are not blobs of this net")
