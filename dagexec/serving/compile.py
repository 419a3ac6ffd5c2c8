"""`dagexec.compile`: from a model in any supported form to an Executor that is ready to run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from dagexec.binding.parameters import check_operators
from dagexec.core.device import CPU
from dagexec.core.host_placement import model_on_host
from dagexec.core.model import MakesModel, Model
from dagexec.core.operator_arguments import with_arguments
from dagexec.core.purity import only_computes
from dagexec.core.runtime import runtime_of
from dagexec.core.spelling import did_you_mean
from dagexec.errors import FeedError, SettingError, UnsupportedOperatorError
from dagexec.ops.onednn.binding import library
from dagexec.options import CompileOptions, with_keywords_of
from dagexec.platform.deadline import check_stop
from dagexec.platform.host_memory import give_back_free_memory
from dagexec.platform.lazy import LazyModule
from dagexec.platform.processor import available_cores
from dagexec.platform.threads import threads
from dagexec.scheduler.plan.copies import names_devices
from dagexec.serving.batch_axes import BatchAxes
from dagexec.serving.executor import Executor
from dagexec.serving.given_types import GivenTypes
from dagexec.serving.metrics import require_metrics
from dagexec.serving.model_source import ModelSource, load_model
from dagexec.serving.overriding import OverridableExecutor
from dagexec.serving.places import Place
from dagexec.serving.telemetry import require_telemetry

if not TYPE_CHECKING:
    pools = LazyModule("dagexec.serving.pool")
    compilation = LazyModule("dagexec.compiler.compilation")
else:
    from dagexec.compiler import compilation
    from dagexec.serving import pool as pools


@with_keywords_of(CompileOptions)
def compile(model: ModelSource, options: CompileOptions) -> Executor:
    """Load a model and make it ready to run, from any number of threads and tasks.

        with dagexec.compile("model.onnx", net_type="dag", num_workers=2, replicas=4) as executor:
            outputs = executor.run({"data": array})  # {name: array}

    `model` is a file, a folder, a protobuf message, a `Model`, a `Pipeline`, or "zoo:NAME": what `dagexec.load_model`
    accepts. Give options as keywords, or as one `CompileOptions`; additional keywords replace its fields.

    Raises ModelFormatError, SchemaError, UnsupportedOperatorError, CycleError, ShapeError, DeviceError, AccessError for
    an operator that accesses more than is allowed, ArgumentError for an argument that no operator has, FeedError for a
    blob in `keep` that the model does not have, SettingError for an option out of range, RowsError for requests to be
    joined (`max_batch`) by a model whose rows cannot be shown to be apart, and with `warm_start` what
    `Executor.warm_up` raises. ClosedError for a `pool` that is closed.
    """
    if options.replicas is None and any((options.net_type, options.num_workers, options.intra_op_threads)):
        options = replace(options, replicas=1)
    options = _with_workers(options)
    if options.optimize:
        library()  # first, as it takes most memory for a moment
    loaded = _load(model, options)
    check_stop()
    if options.telemetry is not False:
        require_telemetry()  # before anything is measured
    if options.metrics is not False:
        require_metrics()
    return _executor(loaded, options, keeps_parameters=isinstance(model, Model | MakesModel))


def _executor(
    loaded: Model, options: CompileOptions, place: Place | None = None, *, keeps_parameters: bool = False
) -> Executor:
    """Compile `loaded`, for workers of `place` if there is one; the caller `keeps_parameters` in memory anyway."""
    check_operators(loaded)
    overridable = loaded.overridable
    if overridable is not None and not overridable.belongs_to(loaded):
        overridable = None
    if options.device is not None and options.default_device == CPU:
        loaded = model_on_host(loaded)
    runtime_of(options.default_device)
    if options.operator_arguments:
        loaded = replace(loaded, net=with_arguments(loaded.net, options.operator_arguments))
    _check_kept(loaded, options.keep)
    _check_shaped(loaded, options.shapes or ())
    types = GivenTypes.of(loaded) if options.optimize else None
    axes = BatchAxes(loaded, options) if options.max_batch > 1 else None
    given = loaded if keeps_parameters else replace(loaded, parameters={})  # frees parameters that passes replaced
    takes = not keeps_parameters and loaded.overridable is None
    compiled = compilation.compile_model(loaded, options, takes_parameters=takes)
    give_back_free_memory()
    kept = replace(compiled.options, calibration=None, progress=None)  # an executor keeps nothing of its caller
    if kept.pool is None and not _may_share_workers(compiled.model, kept):
        kept = replace(kept, pool="own")
    if overridable is None:
        return Executor(compiled.model, kept, given, place, types, axes)
    return OverridableExecutor(compiled.model, kept, given, types, overridable, _executor, axes)


def _with_workers(options: CompileOptions) -> CompileOptions:
    """The options for a model on a `Pool`: its workers, and no more threads than cores when all of them are busy.

    Who asks for a number of workers gets that many of their own. Raises SettingError for what is no pool and for
    another number of workers.
    """
    pool = options.pool
    if pool is None or pool == "own":
        return options if options.num_workers is None else replace(options, pool="own")
    if not isinstance(pool, pools.Pool):
        raise SettingError(f'pool must be a dagexec.Pool, "own" or None, not {pool!r:.80}')
    if options.num_workers not in (None, pool.workers):
        raise SettingError(f"num_workers={options.num_workers}: pool {pool.name!r} has {pool.workers}; leave it out")
    share = max(1, available_cores() // pool.workers)
    return replace(options, num_workers=pool.workers, intra_op_threads=options.intra_op_threads or share)


def _may_share_workers(model: Model, options: CompileOptions) -> bool:
    """True for what does nothing but compute on the host.

    An operator of the application, or one that communicates, may hold its worker until another model has run.
    """
    on_host = options.default_device == CPU and not names_devices(model.net)
    return on_host and threads().concurrent and all(map(only_computes, model.net.op))


def _load(model: ModelSource, options: CompileOptions) -> Model:
    """The model; one of an ONNX file that cannot be run for all sizes with those of `options.shapes` alone."""
    try:
        return load_model(model, allow_io=options.allow_io, foreign=options.foreign)
    except UnsupportedOperatorError:
        if not options.shapes:
            raise
        return load_model(model, allow_io=options.allow_io, foreign=options.foreign, shapes=options.shapes)


def _check_shaped(model: Model, names: Iterable[str]) -> None:
    for name in names:
        if name not in model.inputs:
            hint = did_you_mean(name, model.inputs)
            raise FeedError(
                f"net {model.name!r}: shapes: {name!r} is not an input; it has {sorted(model.inputs)}{hint}"
            )


def _check_kept(model: Model, names: Iterable[str]) -> None:
    written = {name for operator in model.net.op for name in operator.output}
    unknown = sorted(set(names) - written - model.inputs.keys() - model.parameters.keys())
    if unknown:
        raise FeedError(f"net {model.name!r}: keep: {unknown} are not blobs of this net")
