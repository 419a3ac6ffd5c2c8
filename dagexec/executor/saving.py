"""What an executor saves as a plan: the decisions of the compiler, and weights as kernels read them."""

from __future__ import annotations

from pathlib import Path

from dagexec.binding.kept import chosen_implementations, packed_forms
from dagexec.core.model import Model
from dagexec.core.workspace import Workspace
from dagexec.executor.source.origin import Origin
from dagexec.plans.plan import Plan, write_plan
from dagexec.platform.processor import available_cores
from dagexec.scheduler.nets.net import BaseNet


def save_plan(path: Path, origin: Origin, given: Model, compiled: Model, net: BaseNet, parameters: Workspace) -> None:
    """Write what the model `given`, of `origin`, was `compiled` to, and how `net` is prepared for it.

    Raises PlanError and OutputError, as `Executor.save` says.
    """
    plan = Plan(
        given=given,
        compiled=compiled,
        packed=packed_forms(parameters),
        chosen=chosen_implementations(net),
        options=origin.options,
        net_type=net.net_type,
        cores=available_cores(),
        is_calibrated=origin.is_calibrated,
    )
    write_plan(path, plan)
