"""Operators that are expressions, in float32, by kernels of our own: for what oneDNN has no post-ops for.

All primitives of an expression need machine code (`has_kernel`); else NumPy computes it.
"""

from __future__ import annotations

import math

from dagexec.core.arguments import NOTHING, Arguments
from dagexec.core.dtypes import FLOAT32
from dagexec.core.expressions import inputs_of
from dagexec.core.operator import Step
from dagexec.core.operator_index import completes
from dagexec.core.registry import has_engine, operator, operator_class, schema_of
from dagexec.errors import UnsupportedFeatureError
from dagexec.ops.base.expressed import Expressed, expression_of
from dagexec.ops.base.row_operator import OfRows, RowOperator
from dagexec.ops.engines.onednn import elementwise  # noqa: F401  what post-ops say is registered before
from dagexec.ops.engines.onednn.operator import OneDNNOperator
from dagexec.ops.families.elementwise.fused_expression import FusedExpression, FusedRows
from dagexec.ops.kernels.expression_kernels import ExpressionFormula, has_kernel
from dagexec.ops.kernels.formulas import formula_step
from dagexec.ops.kernels.row_expressions import row_step


class ExpressionKernel(OneDNNOperator, Expressed):
    """Base: one kernel for all elements."""

    repeats = True
    metas = (FLOAT32,)

    def prepare_primitive(self) -> Step:
        """One formula. Raises UnsupportedFeatureError where there is no kernel."""
        expression = self.expression()
        positions = tuple(inputs_of(expression))
        if not positions or not has_kernel(expression):
            raise UnsupportedFeatureError(f"{self.label}: there is no kernel for these arguments")
        inputs = [self.x(position) for position in positions]
        formula = ExpressionFormula((expression,), positions)
        step = formula_step(self.onednn.machine, formula, inputs, [self.y(0)], self.label)
        if step is None:
            raise UnsupportedFeatureError(f"{self.label}: there is no kernel for these tensors")
        return step


class RowKernel(OneDNNOperator, OfRows):
    """Base: one kernel for rows whose members are neighbors."""

    repeats = True
    moved_inputs = 2
    metas = (FLOAT32,)

    def prepare_primitive(self) -> Step:
        """One kernel. Raises UnsupportedFeatureError where there is none."""
        (shape, axis), (sources, results) = self.elements(), self.operands()
        if math.prod(shape[axis + 1 :]) != 1:
            raise UnsupportedFeatureError(f"{self.label}: the kernel takes rows along the last axes")
        inputs, outputs = (
            [one.reshape(one.shape[: axis + 1]) for one in arrays] for arrays in (sources.values(), results)
        )
        step = row_step(self.onednn.machine, self.expressions(), inputs, outputs, shape[axis], self.label)
        if step is None:
            raise UnsupportedFeatureError(f"{self.label}: there is no kernel for these tensors")
        return step


@operator(FusedExpression.schema, engine="ONEDNN")
class FusedExpressionKernel(ExpressionKernel, FusedExpression):
    """A region of element-wise operators."""


@operator(FusedRows.schema, engine="ONEDNN")
class FusedRowsKernel(RowKernel, FusedRows):
    """A region of operators on rows."""


@completes
def register_expression(op_type: str) -> None:
    """Register an operator that is an expression, if kernels compute it and nothing else of this engine does."""
    default = operator_class(op_type)
    if not (isinstance(default, type) and issubclass(default, Expressed)) or has_engine(op_type, "ONEDNN"):
        return
    of_rows = issubclass(default, RowOperator)
    arguments = Arguments(NOTHING, op_type)
    if issubclass(default, RowOperator):
        expressions = default.form.definition.expressions(arguments, FLOAT32)
    else:
        expressions = (expression_of(default.formula, arguments, FLOAT32),)
    if has_kernel(*expressions, of_rows=of_rows):
        bases = (RowKernel if of_rows else ExpressionKernel, default)
        members = {"__doc__": default.__doc__, "__module__": __name__}
        operator(schema_of(op_type), engine="ONEDNN")(type(default.__name__, bases, members))
