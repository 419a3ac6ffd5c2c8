"""Updates of parameters in one pass over memory, by kernels of our own.

NumPy's calls for a rule (`ops/families/optimize`) take five to ten passes over a piece and an interpreter's call for
each. The operations of a kernel are the same, and none is rounded otherwise, so that both give the same bytes.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from dagexec.core.dtypes import FLOAT32
from dagexec.core.expressions import inputs_of
from dagexec.core.operator import Step, in_sequence
from dagexec.core.operator_index import completes
from dagexec.core.registry import has_engine, operator, operator_class, schema_of
from dagexec.errors import UnsupportedFeatureError
from dagexec.ops.engines.onednn.operator import OneDNNOperator
from dagexec.ops.families.optimize.update import DenseUpdate, PieceRule, Rule
from dagexec.ops.kernels.expression_kernels import ExpressionFormula, has_kernel
from dagexec.ops.kernels.formulas import formula_step


class UpdateKernel(OneDNNOperator, DenseUpdate):
    """Base: parameter, state and gradient are read, and written where they lie, by one formula."""

    metas = (FLOAT32,)

    def prepare_primitive(self) -> Step:
        """The kernel. The rule begins before it, unless a rate that the kernel can read is all that it needs."""
        rule, rate, begin = self.make_rule(), self.parts.rate, []
        assert isinstance(rule, Rule)
        is_given = rate is not None and rate < len(self.input_blobs) and self.input(rate).meta is FLOAT32
        if rate is not None and is_given and type(rule).begin is PieceRule.begin:
            rule.of_run["rate"] = self.x(rate).reshape(())
        else:
            begin = [self.beginning(rule)]
        results, places, outs = rule.bound(self.whole())
        positions = tuple(inputs_of(*results))
        apply = None
        if has_kernel(*results):
            formula = ExpressionFormula(tuple(results), positions, fuses=False)
            inputs = [places[position] for position in positions]
            apply = formula_step(self.onednn.machine, formula, inputs, outs, self.label)
        if apply is None:
            raise UnsupportedFeatureError(f"{self.label}: there is no kernel for such arrays")
        return in_sequence([*begin, *(partial(np.copyto, *pair) for pair in self.moved()), apply])


@completes
def register_update(op_type: str) -> None:
    """Register an update by a dense gradient whose rule changes each element by itself."""
    default = operator_class(op_type)
    if not (isinstance(default, type) and issubclass(default, DenseUpdate)) or has_engine(op_type, "ONEDNN"):
        return
    if issubclass(default.rule, Rule):
        members = {"__doc__": default.__doc__, "__module__": __name__}
        operator(schema_of(op_type), engine="ONEDNN")(type(default.__name__, (UpdateKernel, default), members))
