"""dagexec: a DAG execution engine with an async scheduler for neural-network operator graphs."""

from importlib.metadata import version

from dagexec import ops as _ops
from dagexec import scheduler as _scheduler
from dagexec.core.choices import load_choices, save_choices
from dagexec.core.errors import DagexecError
from dagexec.core.net_file import load_net, save_net
from dagexec.core.proto import NetDef, OperatorDef
from dagexec.core.shared_buffer import create_shared_buffer, force_shared_buffer
from dagexec.core.workspace import Workspace
from dagexec.executor import Executor, compile
from dagexec.precision import PrecisionReport, precision_report

__version__ = version("dagexec")

__all__ = [
    "DagexecError",
    "Executor",
    "NetDef",
    "OperatorDef",
    "PrecisionReport",
    "Workspace",
    "compile",
    "create_shared_buffer",
    "force_shared_buffer",
    "load_choices",
    "load_net",
    "precision_report",
    "save_choices",
    "save_net",
]

del _ops, _scheduler
