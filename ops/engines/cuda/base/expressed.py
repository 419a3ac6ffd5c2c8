"""Operators that are expressions, on CUDA: the expression as C++.

A statement a node; what is added up, compared and so on is what the functions of `formulas` do, which keep NaN and let
integers wrap.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from dagexec.core.expressions import ELEMENT, NUMBER, PRIMITIVES, Expression, in_order, inputs_of
from dagexec.core.operator import Step
from dagexec.core.registry import operator, operator_class, schema_of
from dagexec.ops.base.expressed import Expressed
from dagexec.ops.engines.cuda.base.expression import computed_scalar, elementwise
from dagexec.ops.engines.cuda.base.operator import CudaOperator

CODE: Mapping[str, str] = {
    "add": "plus({}, {})",
    "subtract": "minus({}, {})",
    "multiply": "times({}, {})",
    "divide": "quotient({}, {})",
    "negative": "negated({})",
    "maximum": "nan_max({}, {})",
    "minimum": "nan_min({}, {})",
    "absolute": "magnitude({})",
    "sign": "sign_of({})",
    "square": "times({0}, {0})",
    "power": "pow({}, {})",
    "arcsin": "asin({})",
    "arccos": "acos({})",
    "arctan": "atan({})",
    "arcsinh": "asinh({})",
    "arccosh": "acosh({})",
    "arctanh": "atanh({})",
    "less": "{} < {}",
    "less_equal": "{} <= {}",
    "equal": "{} == {}",
    "isnan": "is_nan({})",
    "logical_and": "{} && {}",
    "logical_or": "{} || {}",
    "logical_not": "!{}",
    "invert": "complement({})",
    "select": "{} ? {} : {}",
    "constant": "{}",
}
"""By kind; the others are functions of the same name."""


class Statements:
    """C++ that computes nodes of expressions, each once, from the names of the elements.

    Attributes:
        lines: the statements so far.
        scalars: numbers that cannot be written, by name.
    """

    def __init__(self, name: Callable[[int], str], prefix: str = "t") -> None:
        self.lines: list[str] = []
        self.scalars: dict[str, float] = {}
        self._name, self._prefix = name, prefix
        self._names: dict[Expression, str] = {}

    def of(self, result: Expression) -> str:
        """The name of a result, after the statements that compute it."""
        for node in in_order(result):
            if node not in self._names:
                self._names[node] = self._made(node)
        return self._names[result]

    def set(self, node: Expression, name: str) -> None:
        """The name of a node that is there already."""
        self._names[node] = name

    def _made(self, node: Expression) -> str:
        if node.kind == ELEMENT:
            return self._name(int(node.value))
        if node.kind == NUMBER:
            if math.isfinite(node.value):
                return f"A({node.value!r})"
            name = f"{self._prefix}c{len(self.scalars)}"
            self.scalars[name] = node.value
            return name
        operands = [self._names[one] for one in node.operands]
        name = f"{self._prefix}{len(self._names)}"
        default = f"{node.kind}({', '.join(['{}'] * len(operands))})"
        kind = "bool" if PRIMITIVES[node.kind].is_condition else "A"
        self.lines.append(f"const {kind} {name} = {CODE.get(node.kind, default).format(*operands)};")
        return name


class CudaExpression(CudaOperator, Expressed):
    """Base: one kernel for all elements."""

    def prepare(self) -> Step:
        """The statements, and the inputs that they read."""
        expression = self.expression()
        inputs = {f"x{position}": self.x(position) for position in inputs_of(expression)}
        statements = Statements("x{}".format)
        result = statements.of(expression)
        code = "\n        ".join([*statements.lines, f"y = {result};"])
        scalars: dict[str, np.generic] = {
            name: computed_scalar(self.y(0), value) for name, value in statements.scalars.items()
        }
        return elementwise(self, type(self).schema.type.lower(), inputs, {"y": self.y(0)}, code, scalars)


def register(op_type: str, cuda: type[CudaOperator], **members: object) -> None:
    """Register operator `op_type` on CUDA: a class made of `cuda` with these members."""
    documented = {"__doc__": f"{op_type}.", "__module__": cuda.__module__, **members}
    operator(schema_of(op_type), device="cuda")(type(f"Cuda{op_type}", (cuda,), documented))


def register_expression(op_type: str) -> None:
    """Register an operator that is an expression."""
    host = operator_class(op_type)
    assert issubclass(host, Expressed)
    register(op_type, CudaExpression, formula=host.formula)
