"""The memory plan of a model under a net type, without an executor: as for one that only keeps inputs and outputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from dagexec.binding.parameters import parameter_workspace
from dagexec.core.model import Model
from dagexec.core.workspace import Workspace
from dagexec.errors import ArgumentError
from dagexec.scheduler.nets.async_dag import AsyncDAGNet
from dagexec.scheduler.nets.dag import DAGNet
from dagexec.scheduler.nets.net import BaseNet
from dagexec.scheduler.nets.simple import SimpleNet
from dagexec.scheduler.plan.preparation import Preparation

NETS: Mapping[str, type[BaseNet]] = {"simple": SimpleNet, "dag": DAGNet, "async_dag": AsyncDAGNet}


@contextmanager
def planned(model: Model, net_type: str, feeds: Mapping[str, npt.NDArray[np.generic]]) -> Iterator[Preparation]:
    """A preparation with a memory plan for the shapes of `feeds`, while its net lives. Raises what preparing raises."""
    workspace = Workspace(parent=parameter_workspace(model))
    for name, array in feeds.items():
        workspace.create_local_blob(name)
        workspace.feed_blob(name, array)
    written = {name for definition in model.program.op for name in definition.output}
    constants = frozenset(model.parameters) - written - set(model.inputs)
    keep = frozenset(model.outputs) | frozenset(model.inputs)
    with NETS[net_type](model.program, workspace, constants=constants, keep=keep) as net:
        preparation = net.prepared()
        if preparation.memory is None:
            raise ArgumentError(f"net {net.name!r} has no memory plan")
        yield preparation
