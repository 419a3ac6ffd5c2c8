"""Whether oneDNN has code for an operator in a blocked order: the operator is made, and asks the library.

What it is asked does not depend on values, so an answer holds for all operators of the same arguments and shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from dagexec.core.arguments import Values
from dagexec.core.node import Node
from dagexec.core.registry import create_operator
from dagexec.core.schema import TensorType
from dagexec.core.workspace import Workspace
from dagexec.errors import DagexecError
from dagexec.ops.base.layout import blocked_orders
from dagexec.ops.engines.onednn.operator import OneDNNOperator

Operand = tuple[TensorType, bool]
"""The type of an input, and whether it is constant."""


def has_kernel(definition: Node, operands: Sequence[Operand]) -> bool:
    """False when oneDNN computes `definition`, in a blocked order, by its reference implementation or not at all.

    True for an operator that needs no oneDNN for its order, and where the library cannot be asked.
    """
    if not blocked_orders(definition.arguments()):
        return True
    names = {name: str(place) for place, name in enumerate(dict.fromkeys((*definition.input, *definition.output)))}
    inputs, outputs = (tuple(names[name] for name in blobs) for blobs in (definition.input, definition.output))
    return _has_kernel(definition.type, definition.engine, inputs, outputs, definition.values, tuple(operands))


@lru_cache(maxsize=4096)
def _has_kernel(
    op_type: str,
    engine: str,
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    values: Values,
    operands: tuple[Operand, ...],
) -> bool:
    definition = Node(op_type, inputs, outputs, values, engine=engine)
    workspace = Workspace()
    try:
        for name, (kind, is_constant) in zip(definition.input, operands, strict=True):
            tensor = workspace.create_blob(name).tensor()
            tensor.resize(kind.shape, kind.meta)
            if is_constant:
                tensor.freeze()
        made = create_operator(definition, workspace)
        if not isinstance(made, OneDNNOperator) or not made.needs_onednn():
            return True
        for index, kind in enumerate(made.infer() or ()):
            made.output(index).resize(kind.shape, kind.meta)
        return made.has_kernel()
    except DagexecError:
        return True
