"""`dagexec.compile`: from a model, wherever it comes from, to an Executor that is ready to run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from dagexec.binding.parameters import check_operators
from dagexec.core.device import CPU
from dagexec.core.host_placement import model_on_host
from dagexec.core.model import Model
from dagexec.core.operator_arguments import with_arguments
from dagexec.core.runtime import runtime_of
from dagexec.errors import FeedError
from dagexec.options import CompileOptions, with_keywords_of
from dagexec.platform.lazy import LazyModule
from dagexec.serving.executor import Executor
from dagexec.serving.model_source import ModelSource, load_model
from dagexec.serving.telemetry import require_telemetry

if not TYPE_CHECKING:
    compilation = LazyModule("dagexec.compiler.compilation")
else:
    from dagexec.compiler import compilation


@with_keywords_of(CompileOptions)
def compile(model: ModelSource, options: CompileOptions) -> Executor:
    """Load a model and make it ready to run.

    `model` is what `dagexec.load_model` takes: a file, a folder, a message, or "zoo:NAME". Options are
    given as keywords, or as one `CompileOptions`; keywords beside it replace fields of it.

    Raises ModelFormatError, SchemaError, UnsupportedOperatorError, CycleError, ShapeError, DeviceError, AccessError for
    an operator that reaches further than is allowed, ArgumentError for an argument that no operator knows, FeedError
    for a blob to keep that the model has not, SettingError for an option out of range, and with `warm_start` what
    `warm_up` raises.
    """
    loaded = load_model(model, allow_io=options.allow_io)
    check_operators(loaded)
    if options.device is not None and options.default_device == CPU:
        loaded = model_on_host(loaded)
    runtime_of(options.default_device)
    if options.telemetry is not False:
        require_telemetry()  # before anything is measured
    if options.operator_arguments:
        loaded = replace(loaded, net=with_arguments(loaded.net, options.operator_arguments))
    _check_kept(loaded, options.keep)
    compiled = compilation.compile_model(loaded, options)
    given = loaded if isinstance(model, Model) else replace(loaded, parameters={})  # nobody needs those that are gone
    kept = replace(compiled.options, calibration=None, progress=None)  # an executor holds on to nothing of its caller
    return Executor(compiled.model, kept, given, compiled.parameters)


def _check_kept(model: Model, names: Iterable[str]) -> None:
    written = {name for operator in model.net.op for name in operator.output}
    unknown = sorted(set(names) - written - model.inputs.keys() - model.parameters.keys())
    if unknown:
        raise FeedError(f"net {model.name!r}: keep: {unknown} are no blobs that this net writes")
