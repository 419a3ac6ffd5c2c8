"""dagexec runs neural-network operator graphs in parallel, on worker threads and device streams.

with dagexec.compile("model.onnx") as executor:
    outputs = executor.run({"data": array})
"""

from typing import TYPE_CHECKING

from dagexec.platform.garbage_collection import garbage_collection_paused
from dagexec.platform.lazy import lazy_names

with garbage_collection_paused():  # all that imports make stays
    from dagexec import devices as _devices
    from dagexec import ops as _ops
    from dagexec import scheduler as _scheduler
    from dagexec.core.choices import choices, load_choices, measuring, save_choices
    from dagexec.core.model import InputInfo, Model
    from dagexec.core.operator_def import op
    from dagexec.core.proto import NetDef, OperatorDef
    from dagexec.core.shared_buffer import create_shared_buffer, force_shared_buffer
    from dagexec.core.tensor_spec import TensorSpec
    from dagexec.core.workspace import Workspace
    from dagexec.errors import DagexecError
    from dagexec.executor.compile import build, compile, open
    from dagexec.executor.executor import Executor
    from dagexec.executor.source.loading import load_model
    from dagexec.options import BatchPadding, CompileOptions
    from dagexec.platform.version import VERSION
    from dagexec.storage.net_file import load_net, save_net

if not TYPE_CHECKING:
    __getattr__ = lazy_names(
        __name__,
        {
            "dagexec.analysis.precision_report": ("PrecisionReport", "precision_report"),
            "dagexec.pipelines": ("Pipeline", "load_pipeline"),
            "dagexec.executor.compile_async": ("compile_async",),
            "dagexec.executor.sessions.session": ("Session",),
            "dagexec.scheduler.workers.pool": ("Pool",),
        },
    )
else:
    from dagexec.analysis.precision_report import PrecisionReport, precision_report
    from dagexec.executor.compile_async import compile_async
    from dagexec.executor.sessions.session import Session
    from dagexec.pipelines import Pipeline, load_pipeline
    from dagexec.scheduler.workers.pool import Pool

__version__ = VERSION

__all__ = [
    "BatchPadding",
    "CompileOptions",
    "DagexecError",
    "Executor",
    "InputInfo",
    "Model",
    "NetDef",
    "OperatorDef",
    "Pipeline",
    "Pool",
    "PrecisionReport",
    "Session",
    "TensorSpec",
    "Workspace",
    "build",
    "choices",
    "compile",
    "compile_async",
    "create_shared_buffer",
    "force_shared_buffer",
    "load_choices",
    "load_model",
    "load_net",
    "load_pipeline",
    "measuring",
    "op",
    "open",
    "precision_report",
    "save_choices",
    "save_net",
]

del _devices, _ops, _scheduler


def __dir__() -> list[str]:
    """With what is imported when it is first used."""
    return sorted({*globals(), *__all__})
