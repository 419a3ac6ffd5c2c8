"""Operators that are expressions, on CUDA: the expression as C++.

A statement a node; what is added up, compared and so on is what the functions of `formulas` do, which keep NaN and let
integers wrap.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from dagexec.core.expressions import ELEMENT, NUMBER, PRIMITIVES, ROW_COUNT, Expression, inputs_of
from dagexec.core.operator import Step
from dagexec.core.registry import operator, operator_class, schema_of
from dagexec.ops.base.expressed import Expressed
from dagexec.ops.base.row_operator import OfRows
from dagexec.ops.engines.cuda.base.expression import computed_scalar, elementwise
from dagexec.ops.engines.cuda.base.operator import CudaOperator
from dagexec.ops.engines.cuda.base.row_reduction import Groups, Phase, by_groups
from dagexec.ops.kernels.row_expressions import Passes

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
        names: of the nodes that are there.
    """

    def __init__(
        self, name: Callable[[int], str], prefix: str = "t", names: Mapping[Expression, str] | None = None
    ) -> None:
        self.lines: list[str] = []
        self.scalars: dict[str, float] = {}
        self.names = dict(names or {})
        self._name, self._prefix = name, prefix

    def of(self, result: Expression) -> str:
        """The name of a result, after the statements that compute it."""
        if result not in self.names:
            for operand in result.operands:
                self.of(operand)
            self.names[result] = self._made(result)
        return self.names[result]

    def set(self, node: Expression, name: str) -> None:
        """The name of a node that is there already."""
        self.names[node] = name

    def _made(self, node: Expression) -> str:
        if node.kind == ELEMENT:
            return self._name(int(node.value))
        if node.kind == NUMBER:
            if math.isfinite(node.value):
                return f"A({node.value!r})"
            name = f"{self._prefix}c{len(self.scalars)}"
            self.scalars[name] = node.value
            return name
        operands = [self.names[one] for one in node.operands]
        name = f"{self._prefix}{len(self.names)}"
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


class CudaRowExpression(CudaOperator, OfRows):
    """Base: a group of threads a row, a phase for the reductions of each pass over its members."""

    def prepare(self) -> Step:
        """What has one value a row is computed after the reductions that it follows from."""
        expressions, (shape, axis), (sources, results) = self.expressions(), self.elements(), self.operands()
        inputs = {f"x{position}": array for position, array in sources.items()}
        of_row = Statements("x{}".format, "r", {ROW_COUNT: "A(w.length > 1 ? w.length : 1)"})
        passes, phases, before = Passes(expressions), list[Phase](), ""
        for number in range(passes.joining + 1):
            known = len(of_row.lines)
            for node in passes.of_row(number):
                of_row.of(node)
            lines = "\n".join(of_row.lines[known:])
            if phases:
                phases[-1] = replace(phases[-1], after=lines)
            else:
                before = lines
            if number < passes.joining:
                phases.append(self._phase(number, passes.reductions(number), of_row))
        outputs = {f"y{number}": result for number, result in enumerate(results)}
        code, last = self._statements(of_row), ""
        for name, result, node in zip(outputs, results, expressions, strict=True):
            if result.shape == shape:
                code.lines.append(f"{name} = {code.of(node)};")
            else:
                last += f"{name} = {of_row.of(node)};"
        each = "\n".join(code.lines)
        groups = Groups(phases, before, each, last)
        return by_groups(self, type(self).schema.type.lower(), shape, (axis,), groups, inputs, outputs)

    def _phase(self, number: int, reductions: Sequence[Expression], of_row: Statements) -> Phase:
        """What joins the reductions of a pass; states of several are one in the other."""
        code, state, absorbed = self._statements(of_row), "", list[str]()
        for place, node in reversed(list(enumerate(reductions))):
            own, absorb, value = _STATES[node.kind]
            path = "other." * place + ("one." if state else "")
            state = f"both_of<{own}, {state}>" if state else own
            absorbed.append(absorb.format(path, code.of(node.operands[0])))
            of_row.set(node, f"(A)total{number}.{path}{value}")
        return Phase(state, "\n".join([*code.lines, *absorbed]), size=16 * len(reductions))

    def _statements(self, of_row: Statements) -> Statements:
        """Statements for an element, which know what there is of its row."""
        return Statements("x{}".format, "e", of_row.names)


_STATES: Mapping[str, tuple[str, str, str]] = {
    "row_sum": ("sum_of<W>", "s.{}add((W){});", "total"),
    "row_max": ("max_of<A>", "s.{}add({});", "value"),
    "row_min": ("min_of<A>", "s.{}add({});", "value"),
}
"""By kind: the state of a phase, how it takes an element, and what has the result."""


def register(op_type: str, cuda: type[CudaOperator], **members: object) -> None:
    """Register operator `op_type` on CUDA: a class made of `cuda` with these members."""
    documented = {"__doc__": f"{op_type}.", "__module__": cuda.__module__, **members}
    operator(schema_of(op_type), device="cuda")(type(f"Cuda{op_type}", (cuda,), documented))


def register_expression(op_type: str) -> None:
    """Register an operator that is an expression."""
    host = operator_class(op_type)
    if issubclass(host, OfRows):
        members = {"__doc__": f"{op_type}.", "__module__": __name__}
        operator(schema_of(op_type), device="cuda")(type(f"Cuda{op_type}", (CudaRowExpression, host), members))
    else:
        assert issubclass(host, Expressed)
        register(op_type, CudaExpression, formula=host.formula)
