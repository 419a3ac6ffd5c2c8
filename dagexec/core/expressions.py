"""Expressions: what an operator computes, said once; each engine reads them in its own way.

An expression is a graph of primitives over the inputs' elements:

    x = element(0)
    celu = select(x > 0, x, 0.5 * expm1(x / 0.5))

Expressions never change and equal ones are one object, so what occurs twice is computed once. Numbers are folded as
they are put together. A `row_sum` and its like join the members of a row, which may be any axes of a tensor; what
follows from them alone, and from inputs of one value a row, has one value a row, and meets elements as NumPy's
broadcasts do.

`derivatives` differentiates them; NumPy's calls are in `dagexec.ops.base.expression_steps`, machine code in
`dagexec.ops.kernels.expression_kernels`, CUDA in `dagexec.ops.engines.cuda.base.expressed`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from dagexec.platform.records import dataclass

Array = npt.NDArray[Any]
ELEMENT, NUMBER, COUNT = "element", "number", "count"


@dataclass(frozen=True)
class Primitive:
    """What a node of an expression computes.

    Attributes:
        function: on arrays, of float64 for references; of a reduction, with `axis` and `keepdims`.
        flops: operations an element.
        is_condition: it is true or false.
        is_reduction: it joins the members of a row.
    """

    function: Callable[..., Any]
    flops: float = 1
    is_condition: bool = False
    is_reduction: bool = False

    @property
    def arity(self) -> int:
        """How many operands it has."""
        return 3 if self.function is np.where else getattr(self.function, "nin", 1)


def _logistic(x: Array) -> Array:
    return np.exp(-np.logaddexp(0.0, -x))


def _each(function: Callable[[float], float]) -> Callable[[Array], Array]:
    return lambda x: np.vectorize(function, otypes=[float])(x)


PRIMITIVES: Mapping[str, Primitive] = {
    "add": Primitive(np.add),
    "subtract": Primitive(np.subtract),
    "multiply": Primitive(np.multiply),
    "divide": Primitive(np.divide),
    "negative": Primitive(np.negative),
    "maximum": Primitive(np.maximum),
    "minimum": Primitive(np.minimum),
    "absolute": Primitive(np.absolute),
    "sign": Primitive(np.sign),
    "square": Primitive(np.square),
    "power": Primitive(np.power, 20),
    "hypot": Primitive(np.hypot, 5),
    "copysign": Primitive(np.copysign),
    "floor": Primitive(np.floor),
    "ceil": Primitive(np.ceil),
    "rint": Primitive(np.rint),
    "sqrt": Primitive(np.sqrt, 4),
    "cbrt": Primitive(np.cbrt, 20),
    "exp": Primitive(np.exp, 10),
    "expm1": Primitive(np.expm1, 10),
    "log": Primitive(np.log, 10),
    "log1p": Primitive(np.log1p, 10),
    "sin": Primitive(np.sin, 10),
    "cos": Primitive(np.cos, 10),
    "tan": Primitive(np.tan, 10),
    "arcsin": Primitive(np.arcsin, 10),
    "arccos": Primitive(np.arccos, 10),
    "arctan": Primitive(np.arctan, 10),
    "sinh": Primitive(np.sinh, 10),
    "cosh": Primitive(np.cosh, 10),
    "tanh": Primitive(np.tanh, 10),
    "arcsinh": Primitive(np.arcsinh, 10),
    "arccosh": Primitive(np.arccosh, 10),
    "arctanh": Primitive(np.arctanh, 10),
    "logistic": Primitive(_logistic, 10),
    "softplus": Primitive(lambda x: np.logaddexp(0.0, x), 20),
    "erf": Primitive(_each(math.erf), 40),
    "erfc": Primitive(_each(math.erfc), 40),
    "less": Primitive(np.less, is_condition=True),
    "less_equal": Primitive(np.less_equal, is_condition=True),
    "equal": Primitive(np.equal, is_condition=True),
    "isnan": Primitive(np.isnan, is_condition=True),
    "logical_and": Primitive(np.logical_and, is_condition=True),
    "logical_or": Primitive(np.logical_or, is_condition=True),
    "logical_not": Primitive(np.logical_not, is_condition=True),
    "invert": Primitive(np.invert),
    "select": Primitive(np.where, 2),
    "constant": Primitive(np.positive, 0),
    "row_sum": Primitive(np.add.reduce, is_reduction=True),
    "row_max": Primitive(np.maximum.reduce, is_reduction=True),
    "row_min": Primitive(np.minimum.reduce, is_reduction=True),
}
"""By kind. `erfc` is for numbers from 0 to 6; `constant` is its operand, which counts as a constant in derivatives."""


class Expression:
    """A node: a primitive of operands, an element or a number.

    Attributes:
        kind: ELEMENT, NUMBER, COUNT, or a name of PRIMITIVES.
        operands: what it is computed from.
        value: of a number, or the position of an element's input; else 0.
        is_reduction: it joins the members of a row.
        joins_members: it is a reduction, or is computed from one.
        is_of_row: it has one value a row: a number, an input of one value a row, or what follows from these and from
            reductions alone.
        size: how long it is, written out.
    """

    def __init__(self, kind: str, operands: tuple[Expression, ...], value: float, *, of_row: bool = True) -> None:
        self.kind, self.operands, self.value = kind, operands, value
        self.is_reduction = kind in PRIMITIVES and PRIMITIVES[kind].is_reduction
        self.joins_members: bool = self.is_reduction or any(operand.joins_members for operand in operands)
        self.is_of_row: bool = self.is_reduction or (of_row and all(operand.is_of_row for operand in operands))
        self.size: int = 1 + sum(operand.size for operand in operands)

    def __add__(self, other: Expression | float) -> Expression:
        return apply("add", self, other)

    def __radd__(self, other: float) -> Expression:
        return apply("add", other, self)

    def __sub__(self, other: Expression | float) -> Expression:
        return apply("subtract", self, other)

    def __rsub__(self, other: float) -> Expression:
        return apply("subtract", other, self)

    def __mul__(self, other: Expression | float) -> Expression:
        return apply("multiply", self, other)

    def __rmul__(self, other: float) -> Expression:
        return apply("multiply", other, self)

    def __truediv__(self, other: Expression | float) -> Expression:
        return apply("divide", self, other)

    def __rtruediv__(self, other: float) -> Expression:
        return apply("divide", other, self)

    def __neg__(self) -> Expression:
        return apply("negative", self)

    def __lt__(self, other: Expression | float) -> Expression:
        return apply("less", self, other)

    def __le__(self, other: Expression | float) -> Expression:
        return apply("less_equal", self, other)

    def __gt__(self, other: Expression | float) -> Expression:
        return apply("less", other, self)

    def __ge__(self, other: Expression | float) -> Expression:
        return apply("less_equal", other, self)

    def __and__(self, other: Expression) -> Expression:
        return apply("logical_and", self, other)

    def __or__(self, other: Expression) -> Expression:
        return apply("logical_or", self, other)

    def __invert__(self) -> Expression:
        return apply("logical_not", self)

    def __repr__(self) -> str:
        if self.kind == ELEMENT:
            return f"element({self.value})"
        if self.kind == NUMBER:
            return repr(self.value)
        return f"{self.kind}({', '.join(map(repr, self.operands))})"


_interned: WeakValueDictionary[tuple[Any, ...], Expression] = WeakValueDictionary()


def _made(kind: str, operands: tuple[Expression, ...] = (), value: float = 0, *, of_row: bool = True) -> Expression:
    key = kind, operands, repr(value), of_row  # 0.0 and -0.0 are equal, and 1 is True
    return _interned.setdefault(key, Expression(kind, operands, value, of_row=of_row))


def element(position: int, *, of_row: bool = False) -> Expression:
    """The element of input number `position`, or the value that it has for the row."""
    return _made(ELEMENT, value=position, of_row=of_row)


def number(value: float) -> Expression:
    """A constant."""
    return _made(NUMBER, value=float(value))


ZERO, ONE = number(0), number(1)
ROW_COUNT = _made(COUNT)
"""How many members a row has; 1 where it has none, so that a mean is 0 there."""


def apply(kind: str, *operands: Expression | float) -> Expression:
    """A primitive of operands, folded where all are numbers, or where an operand leaves the other as it is."""
    nodes = tuple(operand if isinstance(operand, Expression) else number(operand) for operand in operands)
    if nodes and all(operand.kind == NUMBER for operand in nodes) and not PRIMITIVES[kind].is_reduction:
        with np.errstate(all="ignore"):
            return number(float(PRIMITIVES[kind].function(*(operand.value for operand in nodes))))
    first, last = nodes[0], nodes[-1]
    if kind == "select" and first.kind == NUMBER:
        return nodes[1] if first.value else last
    if kind == "select" and nodes[1] is last:
        return last
    if (kind, last) in (("multiply", ONE), ("divide", ONE), ("subtract", ZERO)):
        return first
    if (kind, first) == ("multiply", ONE):
        return last
    if kind == first.kind == "negative" or kind == first.kind == "logical_not":
        return first.operands[0]
    return _made(kind, nodes)


def maximum(left: Expression | float, right: Expression | float) -> Expression:
    """The greater; NaN where one is."""
    return apply("maximum", left, right)


def minimum(left: Expression | float, right: Expression | float) -> Expression:
    """The smaller; NaN where one is."""
    return apply("minimum", left, right)


def clip(x: Expression, low: float, high: float) -> Expression:
    """Not below `low`, not above `high`; NaN stays. Infinite limits are none."""
    x = x if low == -math.inf else maximum(x, low)
    return x if high == math.inf else minimum(x, high)


def select(condition: Expression, chosen: Expression | float, other: Expression | float) -> Expression:
    """`chosen` where the condition holds, else `other`, whatever the one that is left out is."""
    return apply("select", condition, chosen, other)


def between(x: Expression, low: float, high: float) -> Expression:
    """low < x < high; infinite limits are none."""
    above = ONE if low == -math.inf else x > low
    below = ONE if high == math.inf else x < high
    return below if above is ONE else above if below is ONE else above & below


def equal(left: Expression, right: Expression | float) -> Expression:
    """left = right, where neither is NaN."""
    return apply("equal", left, right)


def power(x: Expression, exponent: float) -> Expression:
    """x to a constant power."""
    return apply("power", x, exponent)


def _function(kind: str, doc: str) -> Callable[[Expression], Expression]:
    def function(x: Expression) -> Expression:
        return apply(kind, x)

    function.__name__, function.__doc__ = kind, doc
    return function


absolute = _function("absolute", "|x|.")
sign = _function("sign", "-1, 0 or 1; NaN of NaN.")
square = _function("square", "x * x.")
sqrt = _function("sqrt", "The square root; NaN of what is negative.")
exp = _function("exp", "e^x.")
expm1 = _function("expm1", "e^x - 1, near 0 too.")
log = _function("log", "The natural logarithm.")
log1p = _function("log1p", "ln(1 + x), near 0 too.")
sin = _function("sin", "The sine.")
cos = _function("cos", "The cosine.")
sinh = _function("sinh", "The hyperbolic sine.")
cosh = _function("cosh", "The hyperbolic cosine.")
tanh = _function("tanh", "The hyperbolic tangent.")
logistic = _function("logistic", "1 / (1 + e^-x).")
softplus = _function("softplus", "ln(1 + e^x), which does not overflow.")
erf = _function("erf", "The error function.")
erfc = _function("erfc", "1 - erf(x) for x from 0 to 6, where it is small too.")
isnan = _function("isnan", "Whether x is not a number.")
constant = _function("constant", "x, as a constant to derivatives: one whose choice does not change the result.")
row_sum = _function("row_sum", "The sum over the members of a row.")
row_max = _function("row_max", "The greatest member of a row; NaN where one is.")
row_min = _function("row_min", "The least member of a row; NaN where one is.")


def row_mean(x: Expression) -> Expression:
    """The mean of the members of a row; 0 where there are none."""
    return row_sum(x) / ROW_COUNT


def in_order(*results: Expression) -> list[Expression]:
    """All nodes that are needed, operands before what reads them; of two operands the longer expression first."""
    order: dict[Expression, None] = {}
    pending = list(reversed(results))
    while pending:
        node = pending[-1]
        missing = [operand for operand in node.operands if operand not in order] if node not in order else []
        if missing:
            missing.sort(key=lambda operand: -operand.size)
            pending += reversed(missing)
        else:
            order.setdefault(pending.pop())
    return list(order)


def inputs_of(*results: Expression) -> list[int]:
    """The positions of the inputs that are read."""
    return sorted({int(node.value) for node in in_order(*results) if node.kind == ELEMENT})


def flops_of(*results: Expression) -> float:
    """Operations for one element."""
    return sum(PRIMITIVES[node.kind].flops for node in in_order(*results) if node.kind in PRIMITIVES)


def replaced(expression: Expression, change: Callable[[Expression, tuple[Expression, ...]], Expression]) -> Expression:
    """The expression made anew from its leaves: `change` gets each node with its operands as they have become."""
    rebuilt_nodes: dict[Expression, Expression] = {}
    for node in in_order(expression):
        rebuilt_nodes[node] = change(node, tuple(rebuilt_nodes[one] for one in node.operands))
    return rebuilt_nodes[expression]


def rebuilt(node: Expression, operands: tuple[Expression, ...]) -> Expression:
    """A node of other operands."""
    return apply(node.kind, *operands) if node.operands else node


def with_inputs(expression: Expression, inputs: Mapping[Expression, Expression]) -> Expression:
    """The expression with other nodes in place of some."""
    return replaced(expression, lambda node, operands: inputs.get(node) or rebuilt(node, operands))


def evaluated(results: Sequence[Expression], inputs: Sequence[Array], axis: int | tuple[int, ...] = -1) -> list[Array]:
    """The results on arrays that broadcast, of float64 for a reference; `axis` has the members of a row."""
    values: dict[Expression, Any] = {}
    with np.errstate(all="ignore"):
        for node in in_order(*results):
            if node.kind == ELEMENT:
                values[node] = inputs[int(node.value)]
            elif node.kind == NUMBER:
                values[node] = node.value
            elif node.kind == COUNT:
                shape, axes = np.broadcast_shapes(*map(np.shape, inputs)), np.atleast_1d(axis)
                values[node] = max(1, math.prod(shape[operand] for operand in axes))
            else:
                primitive, operands = PRIMITIVES[node.kind], [values[operand] for operand in node.operands]
                if node.is_reduction:
                    members = np.broadcast_to(operands[0], np.broadcast_shapes(*map(np.shape, inputs)))
                    values[node] = primitive.function(members, axis=axis, keepdims=True)
                else:
                    values[node] = primitive.function(*operands)
    return [np.asarray(values[result]) for result in results]


def conditions(expression: Expression) -> Iterator[Expression]:
    """The nodes that are true or false."""
    return (node for node in in_order(expression) if node.kind in PRIMITIVES and PRIMITIVES[node.kind].is_condition)


def as_lines(result: Expression) -> list[str]:
    """The expression as text: a primitive a line, its operands being inputs (x0), numbers, lines before (%0), or n, how
    many members a row has."""
    lines: list[str] = []
    names: dict[Expression, str] = {}
    for node in in_order(result):
        if node.kind == ELEMENT:
            names[node] = f"x{int(node.value)}"
        elif node.kind == NUMBER:
            names[node] = repr(node.value)
        elif node is ROW_COUNT:
            names[node] = "n"
        else:
            names[node] = f"%{len(lines)}"
            lines.append(" ".join([node.kind, *(names[operand] for operand in node.operands)]))
    return lines


MOST_LINES = 128
"""Of an expression as text: more than a kernel has registers for."""


def from_lines(lines: Sequence[str]) -> Expression:
    """The expression of text as `as_lines` makes it. Raises ValueError for anything else."""
    if len(lines) > MOST_LINES:
        raise ValueError(f"an expression has at most {MOST_LINES} lines, found {len(lines)}")
    nodes: list[Expression] = []
    for line in lines:
        kind, *names = line.split() or [""]
        primitive = PRIMITIVES.get(kind)
        if primitive is None:
            raise ValueError(f"{line!r} begins with no primitive")
        if len(names) != primitive.arity:
            raise ValueError(f"{line!r} has {len(names)} operand(s), expected {primitive.arity}")
        nodes.append(apply(kind, *(_operand(name, nodes) for name in names)))
    if not nodes:
        raise ValueError("an expression has at least one line")
    return nodes[-1]


def _operand(name: str, nodes: Sequence[Expression]) -> Expression:
    if name[:1] in ("x", "%") and name[1:].isdecimal():
        place = int(name[1:])
        if name[0] == "x":
            return element(place)
        if place < len(nodes):
            return nodes[place]
        raise ValueError(f"{name!r} is no line before")
    return ROW_COUNT if name == "n" else number(float(name))
