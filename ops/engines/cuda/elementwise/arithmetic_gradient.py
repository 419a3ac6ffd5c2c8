"""Gradients of the operators of several operands on CUDA: tables of expressions, summed where an operand was stretched.

Those of binary operators, Pow and Where are in `dagexec.ops.families.elementwise.arithmetic_gradient` for the host,
those of Max, Min and Mean in `dagexec.ops.families.elementwise.variadic_gradient`; which inputs there are, and the
shapes they are stretched to, is asked there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from dagexec.core.operator import Step, in_sequence
from dagexec.core.registry import operator, operator_class
from dagexec.ops.base.broadcasting import reduced_view
from dagexec.ops.base.gradient_selection import wanted_inputs
from dagexec.ops.base.operand_gradients import OperandGradients, stretched_views
from dagexec.ops.engines.cuda.base.broadcast_reduction import reduced
from dagexec.ops.engines.cuda.base.expressed import register
from dagexec.ops.engines.cuda.base.expression import computed_scalar
from dagexec.ops.engines.cuda.base.operator import CudaOperator

CudaForm = tuple[tuple[str, ...], str]
"""What the gradient of an operand is computed from, and the C++ that assigns `value`; "" is the first of these."""


class CudaOperandGradients(CudaOperator):
    """Base of the gradients of several operands, mixed into classes made of the host's.

    Attributes:
        expressions: by what the operand is called, its gradient; "" is that of any other operand, called `x`.
    """

    expressions: ClassVar[Mapping[str, CudaForm]]

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
            sources, code, scalars = self.cuda_form(name)
            arrays = {
                source.lower(): self.x(roles[of]).reshape(views[of])
                for source in sources
                for of in [name if source == "x" else source]
            }
            target = self.y(index).reshape(views[name])
            kernel = f"{type(self).schema.type.lower()}_{'x' if '' in self.expressions else name.lower()}"
            steps.append(reduced(self, kernel, views[self.given], arrays, target, code, scalars))
        return in_sequence(steps)

    def cuda_form(self, name: str) -> tuple[tuple[str, ...], str, Mapping[str, np.generic]]:
        """What the gradient of operand `name` is computed from, the C++, and the numbers it reads."""
        sources, code = self.expressions.get(name) or self.expressions[""]
        return sources, f"value = {code};" if code else "", {}


def _register(op_type: str, base: type[CudaOperandGradients] = CudaOperandGradients, **members: object) -> None:
    cpu = operator_class(op_type)
    documented = {"__doc__": f"{op_type}.", "__module__": __name__, **members}
    operator(cpu.schema, device="cuda")(type(f"Cuda{op_type}", (base, cpu), documented))


EXPRESSIONS: Mapping[str, Mapping[str, CudaForm]] = {
    "AddGradient": {"A": (("dC",), ""), "B": (("dC",), "")},
    "SubGradient": {"A": (("dC",), ""), "B": (("dC",), "-dc")},
    "MulGradient": {"A": (("dC", "B"), "dc * b"), "B": (("dC", "A"), "dc * a")},
    "DivGradient": {"A": (("dC", "B"), "dc / b"), "B": (("dC", "C", "B"), "-(dc * c / b)")},
    "WhereGradient": {"X": (("dZ", "C"), "c ? dz : A(0)"), "Y": (("dZ", "C"), "c ? A(0) : dz")},
}

for _op_type, _forms in EXPRESSIONS.items():
    _register(_op_type, expressions=_forms)
for _op_type in ("MaxGradient", "MinGradient"):
    _register(_op_type, expressions={"": (("dY", "x", "Y"), "x == y ? dy : A(0)")})


class MeanGradient(CudaOperandGradients):
    """Gradients of Mean."""

    expressions = {"": (("dY",), "dy / count")}

    def cuda_form(self, name: str) -> tuple[tuple[str, ...], str, Mapping[str, np.generic]]:
        assert isinstance(self, OperandGradients)
        count = computed_scalar(self.y(0), len(self.operands(self.call())))
        return (*super().cuda_form(name)[:2], {"count": count})


class PowGradient(CudaOperandGradients):
    """Gradients of Pow by the base, A, and the exponent, B."""

    expressions = {
        "A": (("dC", "A", "B"), "dc * (b == 0 ? A(0) : A(b) * pow(a, A(b) - A(1)))"),
        "B": (("dC", "A", "C"), "dc * (a != A(0) || c == A(float_of(0x7f800000u)) ? c * log(a) : A(0))"),
    }

    def cuda_form(self, name: str) -> tuple[tuple[str, ...], str, Mapping[str, np.generic]]:
        """The exponent is an input or the argument."""
        if len(self.input_blobs) == 4:
            return super().cuda_form(name)
        exponent = self.arguments.float("exponent", 1.0)
        if exponent in (0, 1, 2):
            code = {0: "A(0)", 1: "dc", 2: "dc * (A(2) * a)"}[int(exponent)]
            return ("dC", "A"), f"value = {code};", {}
        scalars = {key: computed_scalar(self.y(0), value) for key, value in (("e", exponent), ("rest", exponent - 1))}
        return ("dC", "A"), "value = dc * (pow(a, rest) * e);", scalars


_register("MeanGradient", MeanGradient)
_register("PowGradient", PowGradient)


class SumReduceLike(CudaOperator):
    """Sum to the shape of another tensor."""

    def prepare(self) -> Step:
        a, view = self.x(0), reduced_view(self.call())
        target = self.y(0).reshape(stretched_views({"B": view}, a.shape)["B"])
        return reduced(self, "sum", a.shape, {"a": a}, target)


register("SumReduceLike", SumReduceLike)
