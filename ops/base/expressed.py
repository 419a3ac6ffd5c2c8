"""Operators that are expressions of their inputs' elements: what each engine needs to know of one.

`elementwise_operator` and `row_operator` make them, of a function that says what is computed:

    @elementwise_operator("Celu", {"alpha": "where the exponential begins"}, gradient=("Y", "dY"))
    def celu(x: Expression, *, alpha: float = 1.0) -> Expression:
        '''Y = X where X > 0, else alpha * (exp(X / alpha) - 1).'''
        return select(x > 0, x, alpha * expm1(x / alpha))

Its docstring is the operator's help, its keywords are arguments with their defaults; one called `meta` is the type of
the first input.
"""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np

from dagexec.core.arguments import NOTHING, Arguments
from dagexec.core.derivatives import gradient, times
from dagexec.core.dtypes import FLOAT32, TypeMeta
from dagexec.core.expressions import (
    NUMBER,
    PRIMITIVES,
    Expression,
    apply,
    element,
    evaluated,
    flops_of,
    inputs_of,
    rebuilt,
    replaced,
)
from dagexec.core.operator import Operator, Step
from dagexec.core.schema import OperatorCall
from dagexec.platform.cached import cached_property
from dagexec.platform.records import dataclass

T = TypeVar("T")
Function = Callable[..., Expression]
Slope = Callable[..., Expression | tuple[Expression, ...]]
Check = Callable[[OperatorCall], object]

DY = "dY"


@dataclass(frozen=True)
class Definition:
    """What an operator computes.

    Attributes:
        function: from the inputs' elements, and arguments as keywords, to the result.
    """

    function: Function

    @cached_property
    def defaults(self) -> dict[str, Any]:
        """The arguments, with their defaults."""
        parameters = inspect.signature(self.function).parameters.values()
        return {one.name: one.default for one in parameters if one.kind is one.KEYWORD_ONLY and one.name != "meta"}

    @cached_property
    def arity(self) -> int:
        """How many inputs it has."""
        parameters = inspect.signature(self.function).parameters.values()
        return sum(one.kind is one.POSITIONAL_OR_KEYWORD for one in parameters)

    @cached_property
    def doc(self) -> str:
        """The function's docstring in a line."""
        return " ".join((self.function.__doc__ or "").split())

    def read(self, arguments: Arguments) -> dict[str, Any]:
        """The values of the arguments. Raises ArgumentError."""
        readers: dict[type, Callable[[str, Any], Any]] = {
            bool: arguments.bool,
            int: arguments.int,
            float: arguments.float,
        }
        return {name: readers[type(default)](name, default) for name, default in self.defaults.items()}

    def applied(
        self, function: Callable[..., T], inputs: Sequence[Expression], values: Mapping[str, Any], meta: TypeMeta
    ) -> T:
        """`function`, or another of the same arguments, of these."""
        typed = {"meta": meta} if "meta" in inspect.signature(function).parameters else {}
        return function(*inputs, **values, **typed)

    def result(self, values: Mapping[str, Any], meta: TypeMeta) -> Expression:
        """The result from elements 0, 1, ..."""
        return self.applied(self.function, [element(position) for position in range(self.arity)], values, meta)

    def expression(self, arguments: Arguments, meta: TypeMeta) -> Expression:
        """The result with an operator's arguments. Raises ArgumentError."""
        return self.result(self.read(arguments), meta)

    def expressions(self, arguments: Arguments, meta: TypeMeta) -> tuple[Expression, ...]:
        """The one result, as of a gradient that has several."""
        return (self.expression(arguments, meta),)

    def formula(self) -> Callable[..., Any]:
        """It as a function of arrays of float64, and of the arguments as keywords."""

        def formula(*arrays: Any, **values: Any) -> Any:
            given = {name: type(default)(values.get(name, default)) for name, default in self.defaults.items()}
            return evaluated([self.result(given, FLOAT32)], arrays)[0]

        parameters = [
            inspect.Parameter(f"x{position}", inspect.Parameter.POSITIONAL_ONLY) for position in range(self.arity)
        ]
        parameters += [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=0 if default is False else default)
            for name, default in self.defaults.items()
        ]
        formula.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return formula


@dataclass(frozen=True)
class GradientDefinition:
    """The gradients of an operator by some of its inputs.

    Attributes:
        forward: what the operator computes.
        reads: what the inputs are, in order: inputs of the operator (X, or X0, X1, ...), its result (Y) and dY; an X is
            not computed from Y.
        slope: the derivative from the first of X and Y that is read, where it is not to be derived.
        of_rows: `slope` is given all that is read but dY, then dY, and is the gradients: a derivative is not a factor
            where members meet.
        of_inputs: the inputs of the operator that it gives the gradients of.
    """

    forward: Definition
    reads: tuple[str, ...]
    slope: Slope | None = None
    of_rows: bool = False
    of_inputs: tuple[int, ...] = (0,)

    def expression(self, arguments: Arguments, meta: TypeMeta) -> Expression:
        """The first gradient with an operator's arguments. Raises ArgumentError."""
        return self.expressions(arguments, meta)[0]

    def expressions(self, arguments: Arguments, meta: TypeMeta) -> tuple[Expression, ...]:
        """The gradients with an operator's arguments, from elements in the order of `reads`.

        Raises ArgumentError, or ValueError where one depends on an input that is not read.
        """
        forward, values = self.forward, self.forward.read(arguments)
        of_row = forward.result(values, meta).is_of_row
        given = [element(place, of_row=of_row and name in ("Y", DY)) for place, name in enumerate(self.reads)]
        dy, others = given[self.reads.index(DY)], [one for one in given if one is not given[self.reads.index(DY)]]
        from_result = None if any(name.startswith("X") for name in self.reads) else others[0]
        if self.slope is not None:
            found = forward.applied(self.slope, [*others, dy] if self.of_rows else others[:1], values, meta)
            several = found if isinstance(found, tuple) else (found,)
            slopes = list(several) if self.of_rows else [times(dy, several[0])]
        else:
            inputs = [element(len(given) + position) for position in range(forward.arity)]
            for one, name in zip(given, self.reads, strict=True):
                if name.startswith("X"):
                    inputs[int(name[1:] or 0)] = one
            result = forward.applied(forward.function, inputs, values, meta)
            slopes = gradient(result, [inputs[position] for position in self.of_inputs], dy, from_result)
        if max(inputs_of(*slopes), default=0) >= len(given):
            raise ValueError(f"the gradient of {forward.function.__name__} follows from X, not from Y alone")
        return tuple(slopes if from_result is None else [with_rounded_limits(one, from_result, meta) for one in slopes])


def with_rounded_limits(expression: Expression, y: Expression, meta: TypeMeta) -> Expression:
    """Numbers that Y is compared with are rounded as Y was, so that one at a limit still is."""

    def change(node: Expression, operands: tuple[Expression, ...]) -> Expression:
        if node.kind not in PRIMITIVES or not PRIMITIVES[node.kind].is_condition or y not in operands:
            return rebuilt(node, operands)
        with np.errstate(over="ignore"):
            rounded = [
                float(np.float64(one.value).astype(meta.numpy)) if one.kind == NUMBER else one for one in operands
            ]
        return apply(node.kind, *rounded)

    return replaced(expression, change)


class Formula(Protocol):
    """What an operator computes: a Definition, a GradientDefinition, or what its arguments alone say."""

    def expression(self, arguments: Arguments, meta: TypeMeta) -> Expression:
        """The result from elements of the inputs, the first of which are of type `meta`."""


class Expressed(Operator):
    """Base of the operators that are an expression.

    Attributes:
        formula: what they compute.
    """

    formula: ClassVar[Formula]

    def expression(self) -> Expression:
        """The result from elements of the inputs, with the operator's arguments as numbers."""
        return expression_of(type(self).formula, self.arguments, self.input(0).meta)

    @abstractmethod
    def prepare(self) -> Step:
        """The calls of NumPy."""


def expression_of(formula: Formula, arguments: Arguments, meta: TypeMeta) -> Expression:
    """What is computed, with these arguments, on tensors of a type; made once for all of equal arguments."""
    return arguments.once((formula, meta), lambda: formula.expression(arguments, meta))


def flops_by_default(formula: Definition | GradientDefinition) -> float:
    """Operations an element, with default arguments."""
    return max(1.0, flops_of(*formula.expressions(Arguments(NOTHING, ""), FLOAT32)))
