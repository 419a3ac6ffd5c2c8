"""Expressions as NumPy's calls: each writes into an array that exists, and memory is used again when it is free.

What NumPy has no function for is spelled in what it has (`_spelled`), and selections as what is faster: a sum of two
clipped branches, or an exchange of bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np

from dagexec.core.expressions import (
    ELEMENT,
    NUMBER,
    ONE,
    PRIMITIVES,
    ZERO,
    Expression,
    absolute,
    apply,
    evaluated,
    exp,
    expm1,
    in_order,
    inputs_of,
    log1p,
    maximum,
    minimum,
    rebuilt,
    replaced,
    with_inputs,
)
from dagexec.core.operator import Step
from dagexec.ops.base.blocks import Array, Scratch
from dagexec.ops.base.error_function import LIMIT, log_erfc_coefficients
from dagexec.ops.base.passes import clip_pass
from dagexec.ops.base.pieces import is_same_memory, overlap

EXACT = frozenset(
    ("sqrt", "square", "negative", "absolute", "sign", "floor", "ceil", "rint", "logical_not", "invert", "constant")
)
"""Functions of one operand whose results are the same on any strides: NumPy has no code of its own for packed arrays
that rounds differently."""


def expression_steps(
    results: Sequence[Expression],
    sources: Mapping[int, Array],
    outs: Sequence[Array],
    scratch: Scratch,
    rows: Scratch | None = None,
) -> list[Step]:
    """The calls that compute `results` of `sources`, by position, and leave each in its array of `outs`.

    These have the sources' shape and may be sources. `rows` is scratch for what has one value a row; where members of
    rows are joined, arrays are [rows, members, inner], or [rows, 1, inner].
    """
    return _Steps([spelled(one, outs[0].dtype) for one in results], sources, outs, scratch, rows).steps


@lru_cache(maxsize=1024)
def spelled(expression: Expression, dtype: np.dtype[Any]) -> Expression:
    """The expression in functions that NumPy has, as it computes them fastest."""
    return replaced(expression, partial(_spelled, dtype))


def _spelled(dtype: np.dtype[Any], node: Expression, operands: tuple[Expression, ...]) -> Expression:
    kind, x = node.kind, operands[0] if operands else node
    if kind == "logistic":
        return 1 / (exp(-x) + 1)  # 0 where the power is infinite
    if kind == "softplus" and x.kind == "negative" and x.operands[0].kind == "absolute":
        return log1p(exp(x))
    if kind == "softplus":
        return log1p(exp(-absolute(x))) + maximum(x, 0)
    if kind == "erf":
        return apply("copysign", expm1(_log_erfc(minimum(absolute(x), LIMIT), dtype)), x)
    if kind == "erfc":
        return exp(_log_erfc(x, dtype))
    if kind == "constant":
        return x
    if kind == "multiply":
        for left, right in (operands, operands[::-1]):
            if right.kind == "divide" and right.operands[0] is ONE:
                return left / right.operands[1]
    if kind == "select":
        return _as_sum(*operands) or rebuilt(node, operands)
    return rebuilt(node, operands)


def _log_erfc(m: Expression, dtype: np.dtype[Any]) -> Expression:
    """ln(erfc(m)) for m from 0 to LIMIT, by Horner's rule."""
    highest, second, *rest = log_erfc_coefficients(dtype)
    t = m * (2 / LIMIT) - 1
    value = t * highest + second
    for coefficient in rest:
        value = value * t + coefficient
    return -(value * m)


def _as_sum(condition: Expression, chosen: Expression, other: Expression) -> Expression | None:
    """A selection by the sign of x, of branches that are 0 where x is: they are added, each of its half of the
    numbers."""
    if condition.kind != "less" or ZERO not in condition.operands or ZERO in (chosen, other):
        return None
    x = next(one for one in condition.operands if one is not ZERO)
    positive, negative = (other, chosen) if condition.operands[1] is ZERO else (chosen, other)
    if x.kind != ELEMENT or any(inputs_of(branch) != [x.value] for branch in (chosen, other)):
        return None
    zeros = [np.zeros(1)] * (int(x.value) + 1)
    if any(evaluated([positive, negative], zeros)):
        return None
    return with_inputs(negative, {x: minimum(x, 0)}) + with_inputs(positive, {x: maximum(x, 0)})


class _Steps:
    """The calls of an expression, as they are put together."""

    def __init__(
        self,
        results: Sequence[Expression],
        sources: Mapping[int, Array],
        outs: Sequence[Array],
        scratch: Scratch,
        rows: Scratch | None,
    ) -> None:
        self.steps: list[Step] = []
        self._outs, self._sources, self._scratch, self._rows = outs, sources, scratch, rows
        shape = outs[0].shape
        if rows is not None:
            shape = np.broadcast_shapes(*(one.shape for one in (*outs, *sources.values())))
        leaves_of_row = [one for one in in_order(*results) if one.kind == ELEMENT and one.is_of_row]
        row = np.broadcast_shapes(*(sources[int(one.value)].shape for one in leaves_of_row))
        self._shapes = {False: shape, True: row if leaves_of_row else (*shape[:1], 1, *shape[2:])}
        self._has_dots = shape[2:] == (1,) and any(one.shape != shape for one in (*outs, *sources.values()))
        self._dtype = outs[0].dtype
        self._memory: dict[Expression, tuple[int, bool]] = {}
        self._free: dict[bool, list[int]] = {True: [], False: []}
        self._count = {True: 0, False: 0}
        self._targets: dict[Expression, list[int]] = {}
        for k, result in enumerate(results):
            self._targets.setdefault(result, []).append(k)
        order = self._without_inner([node for node in in_order(*results) if node.operands], results)
        self._last = {operand: place for place, node in enumerate(order) for operand in self._read(node)}
        reads = [(place, one) for one, place in self._last.items() if one.kind == ELEMENT]
        self._free_from = [
            max((place for place, one in reads if overlap(sources[int(one.value)], out)), default=0) for out in outs
        ]
        leaves = {result: self._kept(result) for result in self._targets if not result.operands}
        for place, node in enumerate(order):
            self._compute(node, place)
        for result, numbers in self._targets.items():
            array = self._array(result) if result.operands else leaves[result]
            self.steps += [partial(np.copyto, outs[k], array) for k in numbers if not is_same_memory(array, outs[k])]

    def _kept(self, leaf: Expression) -> Array:
        """A result that is an element or a number, away from what is written before it is copied."""
        array = self._operand(leaf)
        if len(self._outs) == 1 or not any(overlap(array, out) for out in self._outs):
            return array
        kept = self._work(self._taken(False), False)
        self.steps.append(partial(np.copyto, kept, array))
        return kept

    # Memory: -1 - k is output number k's, others are scratch; of one value a row there is scratch of its own

    def _array(self, node: Expression) -> Array:
        memory, is_of_row = self._memory[node]
        if memory < 0:
            return self._outs[-1 - memory]
        array = self._work(memory, is_of_row)
        return _booleans(array) if PRIMITIVES[node.kind].is_condition else array

    def _work(self, memory: int, is_of_row: bool) -> Array:
        scratch = self._rows if is_of_row else self._scratch
        assert scratch is not None
        return scratch(memory, self._shapes[is_of_row])

    def _usable(
        self, numbers: Iterable[int], place: int, dying: Sequence[Expression], shape: tuple[int, ...] | None
    ) -> list[int]:
        """Outputs, of a shape, whose memory nothing needs after a place, what is read last of all first."""
        held = {memory for one, (memory, _) in self._memory.items() if one not in dying}
        usable = [
            k
            for k in numbers
            if self._free_from[k] <= place
            and -1 - k not in held
            and (self._rows is None or shape in (None, self._outs[k].shape))
        ]
        return sorted(usable, key=lambda k: -self._free_from[k])

    def _taken(self, is_of_row: bool) -> int:
        free = self._free[is_of_row]
        if free:
            return free.pop()
        self._count[is_of_row] += 1
        return self._count[is_of_row] - 1

    def _operand(self, node: Expression) -> Array:
        if node.kind == NUMBER:
            return np.asarray(node.value).astype(self._dtype)
        return self._sources[int(node.value)] if node.kind == ELEMENT else self._array(node)

    def _compute(self, node: Expression, place: int) -> None:
        primitive, is_of_row, targets = PRIMITIVES[node.kind], node.is_of_row, self._targets.get(node, [])
        dying = [one for one in dict.fromkeys(self._read(node)) if one in self._memory and self._last[one] == place]
        dying = [one for one in dying if one not in self._targets]
        same = [one for one in dying if self._memory[one][1] == is_of_row and _kind(one) == _kind(node)]
        if targets:  # it stays: where it belongs, or in scratch
            same = [one for one in same if self._memory[one][0] >= 0]
        may_use = bool(targets) or not primitive.is_condition
        free = [] if primitive.is_reduction else dying  # a sum is not written over what it is of
        own = self._shapes[is_of_row]
        may_stretch = bool(targets) and node not in self._last and not primitive.is_reduction and math.prod(own) > 1
        usable = self._usable(targets or self._pending(), place, free, None if may_stretch else own) if may_use else []
        if targets and usable:
            self._memory[node] = (-1 - usable[0], is_of_row)
        elif same and not primitive.is_reduction and node.kind != "select":
            self._memory[node] = self._memory[same[0]]
        elif usable:
            self._memory[node] = (-1 - usable[0], is_of_row)
        else:
            self._memory[node] = (self._taken(is_of_row), is_of_row)
        if node.kind == "select":
            self._select(node)
        else:
            self.steps.append(self._call(node))
        for one in dying:
            memory, of_row = self._memory.pop(one)
            if memory >= 0 and (memory, of_row) != self._memory[node]:
                self._free[of_row].append(memory)

    def _pending(self) -> list[int]:
        """Outputs whose results are not there yet."""
        return [k for result, numbers in self._targets.items() if result not in self._memory for k in numbers]

    def _call(self, node: Expression) -> Step:
        out = self._array(node)
        limits = _clip_of(node)
        if limits is not None and self._dtype.kind != "b":
            x, low, high = limits
            return clip_pass(self._operand(x), _bounded(low, out.dtype), _bounded(high, out.dtype), out)
        factors = self._factors(node)
        if factors is not None:
            left, right = (self._operand(one)[..., 0] for one in factors)
            return partial(np.vecdot, left, right, out=out[:, 0, 0])
        primitive, operands = PRIMITIVES[node.kind], [self._operand(one) for one in node.operands]
        if primitive.is_reduction:
            return partial(primitive.function, self._packed(operands[0]), axis=1, keepdims=True, out=out)
        return partial(primitive.function, *operands, out=out)

    def _packed(self, array: Array) -> Array:
        """What a reduction joins: rows that lie on one another would be summed in another order."""
        if array.shape == self._shapes[False] and array.flags.c_contiguous:
            return array
        memory = self._taken(False)
        members = self._work(memory, False)
        self.steps.append(partial(np.copyto, members, array))
        self._free[False].append(memory)
        return members

    def _factors(self, node: Expression) -> tuple[Expression, Expression] | None:
        """What a sum of products of elements is the inner product of, for rows that losses give a number, or take one.

        For others, sums are native calls.
        """
        product = node.operands[0]
        if not self._has_dots or node.kind != "row_sum" or product.kind not in ("multiply", "square"):
            return None
        left, right = product.operands if product.kind == "multiply" else product.operands * 2
        return None if left.is_of_row or right.is_of_row else (left, right)

    def _read(self, node: Expression) -> tuple[Expression, ...]:
        """What a node's calls read."""
        limits = _clip_of(node)
        return (self._factors(node) or node.operands) if limits is None else (limits[0],)

    def _without_inner(self, order: list[Expression], results: Sequence[Expression]) -> list[Expression]:
        """The nodes without lower limits and products that are computed with what reads them."""
        needed = set(results)
        for node in reversed(order):
            if node in needed:
                needed.update(self._read(node))
        return [node for node in order if node in needed]

    def _select(self, node: Expression) -> None:
        """A copy of what is missing where it is, a product of bits with 0 or 1, or an exchange of bits.

        All take less time than a copy with a mask of many elements.
        """
        condition, chosen, other = node.operands
        out, mask = self._array(node), self._operand(condition)
        if condition.kind == "isnan" and chosen.kind == NUMBER and other.kind == ELEMENT:
            source = self._operand(other)
            copy: list[Step] = [] if np.may_share_memory(source, out) else [partial(np.copyto, out, source)]
            self.steps += [*copy, partial(np.copyto, out, self._operand(chosen), where=mask)]
            return
        kind: type[np.integer[Any]] = _INTEGERS[out.dtype.itemsize]
        memory = self._taken(is_of_row := node.is_of_row)
        factor = self._work(memory, is_of_row).view(kind)
        if chosen is ZERO or other is ZERO:
            source = self._bits(other if chosen is ZERO else chosen, kind)
            self.steps.append(partial(np.copyto, factor, mask))
            if chosen is ZERO:
                self.steps.append(partial(np.bitwise_xor, factor, kind(1), out=factor))
            self.steps.append(partial(np.multiply, source, factor, out=out.view(kind)))
        else:
            ours, theirs = self._bits(chosen, kind), self._bits(other, kind)
            spare = self._taken(is_of_row)
            exchanged = self._work(spare, is_of_row).view(kind)
            self.steps += [
                partial(np.copyto, factor, mask),
                partial(np.negative, factor, out=factor),
                partial(np.bitwise_xor, ours, theirs, out=exchanged),
                partial(np.bitwise_and, exchanged, factor, out=exchanged),
                partial(np.bitwise_xor, exchanged, theirs, out=out.view(kind)),
            ]
            self._free[is_of_row].append(spare)
        self._free[is_of_row].append(memory)

    def _bits(self, node: Expression, kind: type[np.integer[Any]]) -> Array:
        return self._operand(node).view(kind)


_INTEGERS: Mapping[int, type[np.integer[Any]]] = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}
"""By bytes."""


def _kind(node: Expression) -> bool:
    return PRIMITIVES[node.kind].is_condition


def _booleans(array: Array) -> Array:
    flat = array.reshape(-1)
    return flat.view(np.bool_)[: flat.size].reshape(array.shape)


def _clip_of(node: Expression) -> tuple[Expression, float, float] | None:
    """The operand and the limits of a node that is one clip, or the second half of one."""
    if node.kind == "maximum" and node.operands[1].kind == NUMBER:
        return node.operands[0], node.operands[1].value, math.inf
    if node.kind == "minimum" and node.operands[1].kind == NUMBER:
        inner = _clip_of(node.operands[0]) if node.operands[0].kind == "maximum" else None
        high = node.operands[1].value
        return (node.operands[0], -math.inf, high) if inner is None else (inner[0], inner[1], high)
    return None


def _bounded(limit: float, dtype: np.dtype[Any]) -> float:
    """A limit as one of the type, of integers too."""
    if dtype.kind not in "iu":
        return limit
    info = np.iinfo(dtype)
    return int(min(max(limit, info.min), info.max))
