"""Expressions as machine code: all of one computed in registers, each tensor read once and the result written once.

A product that is added to something is rounded once with it, unless a formula `fuses` none. Conditions become
nested selections.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from dagexec.core.expressions import COUNT, ELEMENT, NUMBER, PRIMITIVES, Expression, in_order
from dagexec.ops.kernels import elementary
from dagexec.ops.kernels.builder import Builder, Vector
from dagexec.ops.kernels.expressions import DOWN, UP
from dagexec.platform.records import dataclass

Operand = Vector | float


def as_vector(build: Builder, value: Operand) -> Vector:
    """A number as every element."""
    return value if isinstance(value, Vector) else build.constant(value)


def _extreme(name: str) -> Callable[[Builder, Operand, Operand], Vector]:
    """The greater or the smaller, NaN where one is: the instruction gives its second operand then."""

    def extreme(build: Builder, left: Operand, right: Operand) -> Vector:
        join: Callable[[Vector | float, Vector], Vector] = getattr(build, name)
        if not isinstance(left, Vector):
            return join(left, as_vector(build, right))
        if not isinstance(right, Vector):
            return join(right, left)
        return build.select(build.is_nan(left), left, join(left, right))

    return extreme


def _sign(build: Builder, x: Operand) -> Vector:
    value = as_vector(build, x)
    return build.select(build.less(0.0, value), 1.0, build.select(build.less(value, 0.0), -1.0, value + 0.0))


def _unary(function: Callable[[Builder, Vector], Vector]) -> Callable[[Builder, Operand], Vector]:
    return lambda build, x: function(build, as_vector(build, x))


def _power(build: Builder, x: Operand, exponent: Operand) -> Vector:
    assert isinstance(exponent, float)
    value = elementary.power(build, as_vector(build, x), exponent)
    assert value is not None, "`has_kernel` says which exponents there are"
    return value


ARITHMETIC: Mapping[str, Callable[..., Vector]] = {
    "add": lambda build, a, b: a + b if isinstance(a, Vector) else b + a,
    "subtract": lambda build, a, b: a - b if isinstance(b, Vector) or isinstance(a, Vector) else build.constant(a - b),
    "multiply": lambda build, a, b: a * b if isinstance(a, Vector) else b * a,
    "divide": lambda build, a, b: a / b,
    "negative": lambda build, a: 0.0 - a,
    "maximum": _extreme("maximum"),
    "minimum": _extreme("minimum"),
    "absolute": _unary(lambda build, x: build.absolute(x)),
    "sign": _sign,
    "square": _unary(lambda build, x: x * x),
    "power": _power,
    "floor": _unary(lambda build, x: build.round(x, DOWN)),
    "ceil": _unary(lambda build, x: build.round(x, UP)),
    "rint": _unary(lambda build, x: build.round(x)),
    "sqrt": _unary(lambda build, x: build.square_root(x)),
    "exp": _unary(elementary.exp),
    "expm1": _unary(elementary.expm1),
    "log": _unary(elementary.log),
    "tanh": _unary(elementary.tanh),
    "logistic": _unary(elementary.sigmoid),
    "softplus": _unary(elementary.softplus),
    "erf": _unary(elementary.erf),
    "erfc": _unary(elementary.erfc),
    "constant": lambda build, x: x,
}
"""By kind, from vectors, or numbers in their place."""

_CONDITIONS = ("less", "less_equal", "equal", "isnan", "logical_and", "logical_or", "logical_not")


def has_kernel(*results: Expression, of_rows: bool = False) -> bool:
    """True where there is code for all primitives of expressions, which are numbers, of elements or also `of_rows`."""
    return not any(result.kind in _CONDITIONS for result in results) and all(
        node.kind in (ELEMENT, NUMBER, "select", *_CONDITIONS)
        or (node.kind in ARITHMETIC and (node.kind != "power" or elementary.has_power(node.operands[1].value)))
        or (of_rows and (node.kind == COUNT or PRIMITIVES[node.kind].is_reduction))
        for node in in_order(*results)
    )


@dataclass(frozen=True)
class ExpressionFormula:
    """Expressions as a formula (see `formulas`), of the inputs that they read, in order of position.

    Attributes:
        results: the expressions.
        positions: of the elements, which input of the formula each is.
        fuses: a product and a sum are rounded once; else each is, as by NumPy.
    """

    results: tuple[Expression, ...]
    positions: tuple[int, ...]
    fuses: bool = True

    def __call__(self, build: Builder, read: Callable[[int], Vector]) -> Sequence[Vector]:
        """The results' vectors."""
        values = Values(build, self.results, lambda position: read(self.positions.index(position)), self.fuses)
        return [as_vector(build, values.of(result)) for result in self.results]


class Values:
    """The values of nodes in a kernel that is being written.

    `read` gives the element of an input.
    """

    def __init__(
        self, build: Builder, results: Sequence[Expression], read: Callable[[int], Vector], fuses: bool = True
    ) -> None:
        self._build, self._read, self._fuses = build, read, fuses
        self._readers = Counter(one for node in in_order(*results) for one in node.operands)
        self._values: dict[Expression, Operand] = {}

    def of(self, node: Expression) -> Operand:
        """The value of a node, written where it is first asked for."""
        if node not in self._values:
            self._values[node] = self._made(node)
        return self._values[node]

    def set(self, node: Expression, value: Vector) -> None:
        """The value of a node that is known otherwise."""
        self._values[node] = value

    def _made(self, node: Expression) -> Operand:
        if node.kind == NUMBER:
            return node.value
        if node.kind == ELEMENT:
            return self._read(int(node.value))
        if node.kind == "select":
            condition, chosen, other = node.operands
            return self._selected(condition, self.of(chosen), self.of(other))
        fused = self._fused(node)
        if fused is not None:
            return fused
        operands = [self.of(one) for one in sorted(node.operands, key=lambda one: -one.size)]
        if len(operands) == 2 and node.operands[0].size < node.operands[1].size:
            operands.reverse()
        return ARITHMETIC[node.kind](self._build, *operands)

    def _fused(self, node: Expression) -> Vector | None:
        """A product and a sum that are rounded once; None for what is no such sum."""
        if not self._fuses or node.kind not in ("add", "subtract"):
            return None
        left, right = node.operands
        for product, addend in ((left, right), (right, left)):
            is_product = product.kind in ("multiply", "square") and self._readers[product] == 1
            if not is_product or product in self._values:
                continue
            a, b = product.operands if product.kind == "multiply" else product.operands * 2
            if a.kind == NUMBER:
                a, b = b, a
            if node.kind == "add":
                return self._build.fma(as_vector(self._build, self.of(a)), self.of(b), self.of(addend))
            if product is right:
                left_value = as_vector(self._build, self.of(left))
                return self._build.fnma(as_vector(self._build, self.of(a)), self.of(b), left_value)
        return None

    def _selected(self, condition: Expression, chosen: Operand, other: Operand) -> Vector:
        build, kind = self._build, condition.kind
        if kind == "logical_not":
            return self._selected(condition.operands[0], other, chosen)
        if kind in ("logical_and", "logical_or"):
            first, second = condition.operands
            inner = self._selected(second, chosen, other)
            return (
                self._selected(first, inner, other) if kind == "logical_and" else self._selected(first, chosen, inner)
            )
        operands = [self.of(one) for one in condition.operands]
        if kind == "isnan":
            return build.select(build.is_nan(as_vector(build, operands[0])), chosen, other)
        if kind == "equal":
            return build.select(build.equal(*operands), chosen, other)
        below = build.less(*operands)
        if kind == "less_equal":
            other = build.select(build.equal(*operands), chosen, other)
        return build.select(below, chosen, other)


assert set(_CONDITIONS) == {kind for kind, one in PRIMITIVES.items() if one.is_condition}
