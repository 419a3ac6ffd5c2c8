"""Derivatives of expressions by reverse mode (Griewank and Walther, "Evaluating Derivatives", 2nd ed. 2008, chapter 3).

From the result back to the inputs each node passes on its adjoint, the derivative of the result by the node times that
of what comes after, to its operands. The adjoint of something that has one value a row is summed over the row.

A derivative often follows from the result: that of tanh is 1 - Y^2. `gradient` is told which of X and Y may be read,
and finds what nodes within are from Y, as far as numbers alone stand between them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from dagexec.core.expressions import (
    NUMBER,
    ONE,
    ROW_COUNT,
    ZERO,
    Expression,
    apply,
    conditions,
    cos,
    cosh,
    equal,
    exp,
    in_order,
    logistic,
    power,
    row_sum,
    select,
    sign,
    sin,
    sinh,
    sqrt,
    square,
    with_inputs,
)


def gradient(
    result: Expression, inputs: list[Expression], dy: Expression, y: Expression | None = None
) -> list[Expression]:
    """The derivatives of `result` by each of `inputs`, times `dy`; from `y` in place of the result, if it is given.

    With `y`, an input that occurs in a comparison has the sign of `y`, or whatever the comparison asks: it may only be
    given for such expressions.
    """
    order = in_order(result)
    values = {} if y is None else _from_result(result, y, order)
    adjoints: dict[Expression, Expression] = {result: dy}
    for node in reversed(order):
        adjoint = adjoints.get(node, ZERO)
        if adjoint is ZERO or node.kind not in RULES:
            continue
        for operand, part in zip(node.operands, RULES[node.kind](node, adjoint, values.get(node, node)), strict=True):
            if part is ZERO or operand.kind == NUMBER:
                continue
            if operand.is_of_row and not node.is_of_row:
                part = times(part, ROW_COUNT) if part.is_of_row else row_sum(part)
            adjoints[operand] = plus(adjoints.get(operand, ZERO), part)
    found = [adjoints.get(one, ZERO) for one in inputs]
    return found if y is None else [_comparing(one, dict.fromkeys(inputs, y)) for one in found]


def _comparing(expression: Expression, stands_for: Mapping[Expression, Expression]) -> Expression:
    """The expression with other nodes as operands of its comparisons."""
    compared = [node for node in conditions(expression) if set(node.operands) & set(stands_for)]
    changed = {
        node: apply(node.kind, *(stands_for.get(operand, operand) for operand in node.operands)) for node in compared
    }
    return with_inputs(expression, changed)


def _from_result(result: Expression, y: Expression, order: list[Expression]) -> dict[Expression, Expression]:
    """What nodes are from the result: those that are read once, and of which numbers alone make the result."""
    readers: dict[Expression, int] = {}
    for node in order:
        for operand in node.operands:
            readers[operand] = readers.get(operand, 0) + 1
    values = {result: y}
    for node in reversed(order):
        if node not in values:
            continue
        for operand, value in _operands_from(node, values[node]):
            if readers[operand] == 1 and operand.operands:
                values[operand] = value
    return values


def _operands_from(node: Expression, value: Expression) -> list[tuple[Expression, Expression]]:
    """The operands that follow from the value of a node."""
    if node.kind == "negative":
        return [(node.operands[0], -value)]
    if node.kind == "select":
        return [(operand, value) for operand in node.operands[1:]]
    if len(node.operands) != 2:
        return []
    left, right = node.operands
    if node.kind in ("maximum", "minimum") and right.kind == NUMBER:
        return [(left, value)]
    if right.kind == NUMBER:
        undone = {"add": value - right, "subtract": value + right, "divide": value * right}
        if right.value:
            undone["multiply"] = value / right
        return [(left, undone[node.kind])] if node.kind in undone else []
    if left.kind == NUMBER:
        undone = {"add": value - left, "subtract": left - value, "divide": apply("divide", left, value)}
        if left.value:
            undone["multiply"] = value / left
        return [(right, undone[node.kind])] if node.kind in undone else []
    return []


def times(left: Expression, right: Expression) -> Expression:
    """left * right, simplified: 0 where a selection of `left` is 0, whatever `right` is there."""
    if ZERO in (left, right):
        return ZERO
    for one, other in ((left, right), (right, left)):
        if one.kind == "select" and ZERO in one.operands and (other.is_of_row or not one.is_of_row):
            condition, chosen, rest = one.operands
            return (
                select(condition, times(chosen, other), ZERO)
                if rest is ZERO
                else select(condition, ZERO, times(rest, other))
            )
    for one, other in ((right, left), (left, right)):
        if one is ONE:
            return other
        if one.kind == "negative":
            return -times(other, one.operands[0])
        if one.kind == "divide" and one.operands[0] is ONE:
            return over(other, one.operands[1])
    return left * right


def over(left: Expression, right: Expression) -> Expression:
    """left / right, simplified likewise."""
    if left.kind == "select" and ZERO in left.operands:
        condition, chosen, rest = left.operands
        return (
            select(condition, over(chosen, right), ZERO) if rest is ZERO else select(condition, ZERO, over(rest, right))
        )
    if left.kind == "negative":
        return -over(left.operands[0], right)
    if right.kind == "negative":
        return -over(left, right.operands[0])
    if right.kind == "divide" and right.operands[0] is ONE:
        return times(left, right.operands[1])
    return left / right


def plus(left: Expression, right: Expression) -> Expression:
    """left + right, simplified: two selections by one condition, each 0 where the other is not, are one."""
    if left is ZERO:
        return right
    if right is ZERO:
        return left
    if left.kind == right.kind == "select" and left.operands[0] is right.operands[0]:
        condition, *ours = left.operands
        theirs = right.operands[1:]
        if all(ZERO in pair for pair in zip(ours, theirs, strict=True)):
            return select(condition, *(plus(*pair) for pair in zip(ours, theirs, strict=True)))
    if right.kind == "negative":
        return left - right.operands[0]
    return left + right


Rule = Callable[[Expression, Expression, Expression], tuple[Expression, ...]]
"""What a node passes on to each operand, from the node, its adjoint, and its value."""


def _by_factor(factor: Callable[[Expression, Expression], Expression]) -> Rule:
    """The rule of a function of one operand: its slope from the operand and the value."""
    return lambda node, adjoint, value: (times(adjoint, factor(node.operands[0], value)),)


def _by_divisor(divisor: Callable[[Expression, Expression], Expression]) -> Rule:
    """Likewise, of a slope that is 1 over something."""
    return lambda node, adjoint, value: (over(adjoint, divisor(node.operands[0], value)),)


def _multiply(node: Expression, adjoint: Expression, _value: Expression) -> tuple[Expression, ...]:
    left, right = node.operands
    return times(adjoint, right), times(adjoint, left)


def _divide(node: Expression, adjoint: Expression, value: Expression) -> tuple[Expression, ...]:
    left, right = node.operands
    if left.kind == NUMBER:
        slope = square(value) if left is ONE else square(value) / left
        return ZERO, -times(adjoint, slope)
    part = over(adjoint, right)
    return part, -times(part, value)


def _extreme(node: Expression, adjoint: Expression, value: Expression) -> tuple[Expression, ...]:
    """To the operand that is the result; where it is a limit, a number, to none."""
    left, right = node.operands
    if right.kind == NUMBER:
        x = left if value is node else value
        is_free = x > right if node.kind == "maximum" else x < right
        return select(is_free, adjoint, ZERO), ZERO
    is_left = left >= right if node.kind == "maximum" else left <= right
    return select(is_left, adjoint, ZERO), select(is_left, ZERO, adjoint)


def _select(node: Expression, adjoint: Expression, _value: Expression) -> tuple[Expression, ...]:
    condition = node.operands[0]
    return ZERO, select(condition, adjoint, ZERO), select(condition, ZERO, adjoint)


def _power(node: Expression, adjoint: Expression, _value: Expression) -> tuple[Expression, ...]:
    x, exponent = node.operands
    return times(adjoint, power(x, exponent.value - 1) * exponent), ZERO


def _row_extreme(node: Expression, adjoint: Expression, _value: Expression) -> tuple[Expression, ...]:
    return (select(equal(node.operands[0], node), adjoint, ZERO),)


RULES: Mapping[str, Rule] = {
    "add": lambda node, adjoint, value: (adjoint, adjoint),
    "subtract": lambda node, adjoint, value: (adjoint, -adjoint),
    "multiply": _multiply,
    "divide": _divide,
    "negative": lambda node, adjoint, value: (-adjoint,),
    "maximum": _extreme,
    "minimum": _extreme,
    "select": _select,
    "power": _power,
    "row_sum": lambda node, adjoint, value: (adjoint,),
    "row_max": _row_extreme,
    "row_min": _row_extreme,
    "absolute": _by_factor(lambda x, y: sign(x)),
    "square": lambda node, adjoint, value: (times(adjoint * 2, node.operands[0]),),
    "sqrt": _by_divisor(lambda x, y: y * 2),
    "cbrt": _by_divisor(lambda x, y: square(y) * 3),
    "exp": _by_factor(lambda x, y: y),
    "expm1": _by_factor(lambda x, y: y + 1),
    "log": _by_divisor(lambda x, y: x),
    "log1p": _by_divisor(lambda x, y: x + 1),
    "sin": _by_factor(lambda x, y: cos(x)),
    "cos": _by_factor(lambda x, y: -sin(x)),
    "tan": _by_divisor(lambda x, y: square(cos(x))),
    "arcsin": _by_divisor(lambda x, y: sqrt((1 - x) * (x + 1))),  # 1 - x^2 loses its accuracy near 1
    "arccos": _by_divisor(lambda x, y: -sqrt((1 - x) * (x + 1))),
    "arctan": _by_divisor(lambda x, y: square(x) + 1),
    "sinh": _by_factor(lambda x, y: cosh(x)),
    "cosh": _by_factor(lambda x, y: sinh(x)),
    "tanh": _by_factor(lambda x, y: 1 - square(y)),
    "arcsinh": _by_divisor(lambda x, y: apply("hypot", x, 1)),
    "arccosh": _by_divisor(lambda x, y: sqrt(x - 1) * sqrt(x + 1)),  # no square overflows
    "arctanh": _by_divisor(lambda x, y: (1 - x) * (x + 1)),
    "logistic": _by_factor(lambda x, y: (1 - y) * y),
    "softplus": _by_factor(lambda x, y: logistic(x) if y.kind == "softplus" else -apply("expm1", -y)),
    "erf": _by_factor(lambda x, y: exp(-square(x)) * (2 / math.sqrt(math.pi))),
    "erfc": _by_factor(lambda x, y: exp(-square(x)) * (-2 / math.sqrt(math.pi))),
}
"""By kind. What has none, such as rounding, `sign` and `constant`, passes nothing on."""
