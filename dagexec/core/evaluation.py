"""A single operator, computed on arrays without a net: for values that are known before a net runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy.typing as npt

from dagexec.core.node import Node, node_of
from dagexec.core.proto import OperatorDef
from dagexec.core.registry import create_operator
from dagexec.core.workspace import Workspace
from dagexec.platform.arithmetic import operator_arithmetic

Array = npt.NDArray[Any]


def evaluated(definition: OperatorDef | Node, values: Mapping[str, Array]) -> list[Array]:
    """The outputs of an operator of the host; `values` has those of its inputs, by name.

    Raises DagexecError where it cannot be made, and what its step raises.
    """
    definition = node_of(definition)
    workspace = Workspace()
    for name in set(definition.input):
        workspace.adopt_blob(name, values[name])
    operator = create_operator(definition, workspace)
    with operator_arithmetic():
        operator.bind(operator.infer()).step()
    return [workspace.fetch_blob(name) for name in definition.output]
