"""Operators on CUDA that are one expression, such as those that `dagexec.ops.engines.cuda.elementwise.functions` lists.

An operator keeps the schema, the arguments and the defaults of its class for the host; the expression reads its float
arguments by name.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from dagexec.core.operator import Step
from dagexec.core.registry import operator, operator_class, schema_of
from dagexec.ops.base.pointwise import Pointwise
from dagexec.ops.base.pointwise_gradient import PointwiseGradient
from dagexec.ops.engines.cuda.base.expression import computed_scalar, elementwise
from dagexec.ops.engines.cuda.base.operator import CudaOperator


class ExpressionOperator(CudaOperator):
    """Base of operators whose inputs and outputs have one shape and whose step is one expression.

    Attributes:
        constants: the float arguments, by name, with their defaults.
        result: what the expression calls the output.
    """

    constants: ClassVar[Mapping[str, float]] = {}
    result: ClassVar[str] = "y"

    def prepare(self) -> Step:
        inputs = {name: self.x(index) for name, index in self.roles().items()}
        outputs = {self.result: self.y(0)}
        first = next(iter(inputs.values()))
        scalars: Mapping[str, np.generic] = {
            name: computed_scalar(first, value) for name, value in self.scalars().items()
        }
        return elementwise(self, type(self).schema.type.lower(), inputs, outputs, self.expression(), scalars)

    @abstractmethod
    def roles(self) -> dict[str, int]:
        """The inputs that the expression reads: what it calls them, and their numbers."""

    @abstractmethod
    def expression(self) -> str:
        """C++ that assigns the result."""

    def scalars(self) -> dict[str, float]:
        """Numbers that the expression reads, by name: the float arguments."""
        return {name: self.arguments.float(name, default) for name, default in self.constants.items()}


class PointwiseExpression(ExpressionOperator):
    """Base of y from x.

    Attributes:
        code: assigns y.
    """

    code: ClassVar[str]

    def roles(self) -> dict[str, int]:
        return {"x": 0}

    def expression(self) -> str:
        return self.code


class GradientExpression(ExpressionOperator):
    """Base of dx from x, y and dy, of which the operator's inputs are some.

    Attributes:
        code: assigns dx.
        reads: what the inputs are, in order: X, Y and dY.
    """

    code: ClassVar[str]
    reads: ClassVar[tuple[str, ...]]
    result = "dx"

    def roles(self) -> dict[str, int]:
        """Those that the expression names."""
        return {name.lower(): index for index, name in enumerate(self.reads) if _reads(self.expression(), name.lower())}

    def expression(self) -> str:
        return self.code


def _reads(expression: str, name: str) -> bool:
    return re.search(rf"\b{name}\b", expression) is not None


def register(op_type: str, cuda: type[CudaOperator], **members: object) -> None:
    """Register operator `op_type` on CUDA: a class made of `cuda` with these members."""
    documented = {"__doc__": f"{op_type}.", "__module__": cuda.__module__, **members}
    operator(schema_of(op_type), device="cuda")(type(f"Cuda{op_type}", (cuda,), documented))


def register_function(op_type: str, y: str, dx: str = "") -> None:
    """Register function `op_type` of one tensor, y from x, and, if there is one, its gradient, dx from dy and x or y.

    Both are C++ that reads the operator's float arguments by name.
    """
    cpu = operator_class(op_type)
    assert issubclass(cpu, Pointwise)
    register(op_type, PointwiseExpression, code=f"y = {y};", constants=cpu.constants)
    if dx:
        register_gradient(op_type, GradientExpression, code=f"dx = {dx};")


def register_gradient(op_type: str, base: type[GradientExpression], **members: object) -> None:
    """Register the gradient of function `op_type`: a class made of `base` with these members."""
    cpu = operator_class(f"{op_type}Gradient")
    assert issubclass(cpu, PointwiseGradient)
    register(f"{op_type}Gradient", base, constants=cpu.constants, reads=cpu.reads, **members)
