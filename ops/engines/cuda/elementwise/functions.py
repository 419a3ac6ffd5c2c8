"""All of dagexec's operators that are expressions, on CUDA."""

from __future__ import annotations

from dagexec.core.registry import operator_class, operator_module, registered_operators
from dagexec.ops.base.expressed import Expressed
from dagexec.ops.engines.cuda.base.expressed import register_expression

for _op_type in registered_operators():
    if operator_module(_op_type).startswith("dagexec.ops.") and issubclass(operator_class(_op_type), Expressed):
        register_expression(_op_type)
