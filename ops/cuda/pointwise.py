"""Operators on CUDA that are one expression: what the tables of `activation`, `unary` and their gradients register.

An operator keeps the schema, the arguments and the defaults of its class for the host; the expression reads its float
arguments by name.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

import numpy as np

from dagexec.core.operator import Operator, Step
from dagexec.core.registry import operator
from dagexec.ops.cuda.expression import computed_scalar, elementwise
from dagexec.ops.cuda.operator import CudaOperator
from dagexec.ops.pointwise import Pointwise
from dagexec.ops.pointwise_gradient import PointwiseGradient


class ExpressionOperator(CudaOperator):
    """Base of operators whose inputs and outputs have one shape and whose step is one expression."""

    def prepare(self) -> Step:
        """One kernel."""
        inputs = {name: self.x(index) for name, index in self.roles().items()}
        outputs = {self.result: self.y(0)}
        first = next(iter(inputs.values()))
        scalars: Mapping[str, np.generic] = {
            name: computed_scalar(first, value) for name, value in self.scalars().items()
        }
        return elementwise(self, type(self).schema.type.lower(), inputs, outputs, self.expression(), scalars)

    result = "y"

    @abstractmethod
    def roles(self) -> dict[str, int]:
        """The inputs that the expression reads: what it calls them, and their numbers."""

    @abstractmethod
    def expression(self) -> str:
        """C++ that assigns the result."""

    def scalars(self) -> dict[str, float]:
        """Numbers that the expression reads, by name: the float arguments."""
        constants = getattr(type(self), "constants", {})
        return {name: self.arguments.float(name, default) for name, default in constants.items()}


class PointwiseExpression(ExpressionOperator):
    """Base of y from x."""

    code: str

    def roles(self) -> dict[str, int]:
        """x."""
        return {"x": 0}

    def expression(self) -> str:
        """The table's."""
        return self.code


class GradientExpression(ExpressionOperator):
    """Base of dx from x, y and dy, of which the operator's inputs are some."""

    code: str
    reads: tuple[str, ...]
    result = "dx"

    def roles(self) -> dict[str, int]:
        """Those that the expression names; dy comes first, because it may be overwritten and gives the type."""
        return {name.lower(): index for index, name in enumerate(self.reads) if _reads(self.expression(), name.lower())}

    def expression(self) -> str:
        """The table's."""
        return self.code


def _reads(expression: str, name: str) -> bool:
    words = "".join(c if c.isalnum() or c == "_" else " " for c in expression).split()
    return name in words


def register(cpu: type[Operator], cuda: type[CudaOperator], **members: object) -> None:
    """Register for CUDA a class made of `cuda`, with the schema of `cpu`."""
    name = f"Cuda{cpu.schema.type}"
    operator(cpu.schema, device="cuda")(
        type(name, (cuda,), {"__doc__": f"{cpu.schema.type}.", "__module__": cuda.__module__, **members})
    )


def register_pointwise(cpu: type[Pointwise], code: str, base: type[PointwiseExpression] = PointwiseExpression) -> None:
    """Register `y = code` as the operator of `cpu` on CUDA; `code` reads x and the operator's float arguments."""
    register(cpu, base, code=f"y = {code};", constants=cpu.constants)


def register_pointwise_gradient(
    cpu: type[PointwiseGradient], code: str, base: type[GradientExpression] = GradientExpression
) -> None:
    """Register `dx = code` as the operator of `cpu` on CUDA; `code` reads x, y, dy and the float arguments."""
    register(cpu, base, code=f"dx = {code};", constants=cpu.constants, reads=cpu.reads)
