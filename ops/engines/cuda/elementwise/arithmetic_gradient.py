"""Gradients of operators of several operands on CUDA: the host's expressions, summed where an operand was stretched.

Which inputs there are, and the shapes they are stretched to, is asked of the host's classes.
"""

from __future__ import annotations

import numpy as np

from dagexec.core.expressions import element
from dagexec.core.operator import Step, in_sequence
from dagexec.ops.base.broadcasting import reduced_view
from dagexec.ops.base.gradient_selection import wanted_inputs
from dagexec.ops.base.operand_gradients import OperandGradients, stretched_views
from dagexec.ops.engines.cuda.base.broadcast_reduction import reduced
from dagexec.ops.engines.cuda.base.expressed import Statements, register
from dagexec.ops.engines.cuda.base.expression import computed_scalar
from dagexec.ops.engines.cuda.base.kinds import on_cuda, registered_kinds
from dagexec.ops.engines.cuda.base.operator import CudaOperator


@on_cuda(*registered_kinds(OperandGradients))
class CudaOperandGradients(CudaOperator):
    """Gradients of several operands."""

    def prepare(self) -> Step:
        """A kernel for each gradient that is requested; one that overwrites that of the output is the last."""
        assert isinstance(self, OperandGradients)
        call = self.call()
        views, roles = self.views(call), self.roles(call)
        given = self.definition.input[roles[self.given]]
        wanted = list(enumerate(wanted_inputs(call, self.operands(call))))
        wanted.sort(key=lambda entry: self.definition.output[entry[0]] == given)
        steps = []
        for index, name in wanted:
            sources, expression = self.form(name)
            arrays = {f"x{place}": self.x(roles[of]).reshape(views[of]) for place, of in enumerate(sources)}
            target = self.y(index).reshape(views[name])
            statements = Statements("x{}".format)
            result = statements.of(expression)
            code = "" if expression is element(0) else " ".join([*statements.lines, f"value = {result};"])
            scalars: dict[str, np.generic] = {
                key: computed_scalar(target, value) for key, value in statements.scalars.items()
            }
            kernel = f"{type(self).schema.type.lower()}_{'x' if name[:1] == 'X' else name.lower()}"
            steps.append(reduced(self, kernel, views[self.given], arrays, target, code, scalars))
        return in_sequence(steps)


class SumReduceLike(CudaOperator):
    """Sum to the shape of another tensor."""

    def prepare(self) -> Step:
        a, view = self.x(0), reduced_view(self.call())
        target = self.y(0).reshape(stretched_views({"B": view}, a.shape)["B"])
        return reduced(self, "sum", a.shape, {"a": a}, target)


register("SumReduceLike", SumReduceLike)
