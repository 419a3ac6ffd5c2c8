"""All operators that are expressions, on CUDA: those of other packages, too, whenever they are registered."""

from __future__ import annotations

from dagexec.core.operator_index import completes
from dagexec.core.registry import has_implementation, operator_class, operator_module, registered_operators
from dagexec.ops.base.expressed import Expressed
from dagexec.ops.engines.cuda.base.expressed import register_expression


@completes
def register_expressed(op_type: str) -> None:
    """Register an operator that is an expression, unless its package has a class of its own for CUDA."""
    default = operator_class(op_type) if operator_module(op_type) else None
    if isinstance(default, type) and issubclass(default, Expressed) and not has_implementation("cuda", op_type):
        register_expression(op_type)


for _op_type in registered_operators():
    register_expressed(_op_type)
