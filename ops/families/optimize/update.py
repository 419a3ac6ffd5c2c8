"""Update operators: a parameter and the state an optimizer keeps for it, changed in place by a gradient.

A `Rule` says as expressions what becomes of an element; each engine reads them in its own way. Here `DenseUpdate` goes
through pieces, each small enough to stay in the cache, so that memory is read and written once. `sparse` has the
operators that change some rows only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from dagexec.core.arguments import Arguments
from dagexec.core.dtypes import FLOAT32, FLOAT64
from dagexec.core.expressions import Expression, element
from dagexec.core.gradient import not_differentiable
from dagexec.core.operator import Operator, Step
from dagexec.core.registry import operator
from dagexec.core.schema import Cost, OperatorCall, OpSchema, TensorType, memory_cost
from dagexec.errors import ArgumentError
from dagexec.ops.base.blocks import Scratch
from dagexec.ops.base.expression_steps import expression_steps
from dagexec.ops.families.optimize.scalars import read_iteration, require_iteration, require_rate
from dagexec.platform.records import dataclass

Array = npt.NDArray[Any]
Shape = tuple[int, ...]

PIECE = 1 << 15  # elements of a piece: with state and scratch some six arrays of 128 KiB of float32, for the L2 cache


class Changed(NamedTuple):
    """What becomes of an element.

    Attributes:
        param: the parameter; it is left out where an operator leaves its use to others.
        state: the state.
        extras: the extra outputs.
    """

    param: Expression
    state: tuple[Expression, ...] = ()
    extras: tuple[Expression, ...] = ()


class Piece(NamedTuple):
    """Views of one piece, all writable but the gradient.

    Attributes:
        param: the parameter, None for an operator that leaves its use to others.
        state: the state, in the order of the rule.
        grad: the gradient; it may be the first of `extras`.
        extras: outputs of the gradient's shape, None for each that the operator does not have.
    """

    param: Array | None
    state: tuple[Array, ...]
    grad: Array
    extras: tuple[Array | None, ...]


PARAM, GRAD, FIRST = 0, 1, 2
"""Positions of elements: the parameter, the gradient; then the numbers of a run, then the state."""


class PieceRule(ABC):
    """How an optimizer changes a piece of a parameter and of its state.

    Attributes:
        default_rate: the learning rate of an operator that is given none.
        of_run: numbers that `begin` sets, by name, as arrays of no axes in the type of the parameter.
        rate: the learning rate, the first of them.
    """

    def __init__(self, arguments: Arguments, dtype: npt.DTypeLike, label: str) -> None:
        """Reads the arguments. Raises ArgumentError, with `label`, for one that makes no sense."""
        self.arguments = arguments
        self.label = label
        self.dtype = np.dtype(dtype)
        self.default_rate = 0.0
        self.of_run: dict[str, Array] = {}
        self.rate = self.number("rate")

    def number(self, name: str) -> Expression:
        """A number that is another in each run."""
        self.of_run[name] = np.ones((), self.dtype)
        return element(FIRST + len(self.of_run) - 1)

    def argument(self, name: str, default: float, low: float, high: float, *, open_ends: str = "") -> float:
        """Float argument `name`, within [low, high], without the ends named in `open_ends`. Raises ArgumentError."""
        value = self.arguments.float(name, default)
        below = value < low or ("low" in open_ends and value == low)
        above = value > high or ("high" in open_ends and value == high)
        if below or above:
            left, right = "(" if "low" in open_ends else "[", ")" if "high" in open_ends else "]"
            expected = f"in {left}{low:g}, {high:g}{right}"
            raise ArgumentError(f"{self.label}: argument {name!r} must be {expected}, found {value:g}")
        return value

    def begin(self, rate: float, iteration: int) -> None:
        """Called once a run, before the steps: the learning rate, and the iteration (0 for a rule that has none)."""
        self.of_run["rate"][...] = rate

    @abstractmethod
    def steps(self, piece: Piece, scratch: Scratch) -> list[Step]:
        """The calls that change the piece; arrays to work in have at most the gradient's size."""


class Rule(PieceRule):
    """A rule that changes each element by itself."""

    @abstractmethod
    def formula(self, param: Expression, grad: Expression, *state: Expression) -> Changed:
        """What becomes of an element. State of several numbers an element, in a last axis, is as many expressions."""

    def changed(self, states: int) -> Changed:
        """What becomes of an element with this many numbers of state."""
        first = FIRST + len(self.of_run)
        return self.formula(element(PARAM), element(GRAD), *map(element, range(first, first + states)))

    def bound(self, piece: Piece) -> tuple[list[Expression], dict[int, Array], list[Array]]:
        """The results, the arrays that have the elements, by position, and those that the results go to."""
        shape = piece.grad.shape
        state: list[Array] = []
        for array in piece.state:
            state += [array] if array.shape == shape else list(np.moveaxis(array.reshape(*shape, -1), -1, 0))
        changed = self.changed(len(state))
        pairs = [*zip(changed.state, state, strict=True), *zip(changed.extras, piece.extras, strict=False)]
        pairs.append((changed.param, piece.param))
        places = {GRAD: piece.grad, **dict(enumerate((*self.of_run.values(), *state), FIRST))}
        if piece.param is not None:
            places[PARAM] = piece.param
        written = [(result, out) for result, out in pairs if out is not None]
        return [result for result, _ in written], places, [out for _, out in written]

    def steps(self, piece: Piece, scratch: Scratch) -> list[Step]:
        return expression_steps(*self.bound(piece), scratch)


@dataclass(frozen=True)
class Parts:
    """Which inputs and outputs of an update operator are what, by index.

    Attributes:
        grad: the gradient.
        param: the parameter; None when there is none.
        state: the state, in the order of the rule.
        rate: the learning rate, which an operator may be given or not; None when there is none.
        iteration: the iteration counter; None when there is none.
        indices: the rows that the gradient is of; None for a dense gradient.
        updated: for each output that is an input changed, that input.
        extras: outputs of the gradient's shape, in the order of the rule.
        overwrites_grad: the first of `extras` may overwrite the gradient.
    """

    grad: int
    param: int | None
    state: tuple[int, ...]
    rate: int | None = None
    iteration: int | None = None
    indices: int | None = None
    updated: Mapping[int, int] = field(default_factory=dict)
    extras: tuple[int, ...] = ()
    overwrites_grad: bool = False

    @property
    def reference(self) -> int:
        """The input whose shape and type the others have."""
        return self.grad if self.param is None else self.param

    def output_of(self, source: int) -> int:
        """The output that holds input `source` afterwards."""
        return next(target for target, updated in self.updated.items() if updated == source)

    def may_share(self, source: int, target: int) -> bool:
        """The in-place rule: an input and what it becomes, or the gradient and the first extra output."""
        over_grad = self.overwrites_grad and (source, target) == (self.grad, self.extras[0])
        return over_grad or self.updated.get(target) == source


class Update(Operator):
    """Base of the update operators.

    Attributes:
        parts: which of its inputs and outputs are what.
        rule: its rule.
    """

    parts: ClassVar[Parts]
    rule: ClassVar[type[PieceRule]]

    @classmethod
    def state_shapes(cls, param: Shape) -> Sequence[Shape]:
        """The shapes of the state of a parameter of shape `param`: by default all are the same."""
        return [param] * len(cls.parts.state)

    @classmethod
    def gradient_shape(cls, call: OperatorCall) -> Shape:
        """The shape that the gradient must have."""
        return call.inputs[cls.parts.reference].shape

    @classmethod
    def output_types(cls, call: OperatorCall) -> list[TensorType]:
        """The types of the outputs: those of the inputs they are, and the gradient's for the extra ones."""
        parts = cls.parts
        reference = call.inputs[parts.reference]
        call.require_types(parts.reference, FLOAT32, FLOAT64)
        call.require_same_type(*dict.fromkeys([parts.reference, parts.grad, *parts.state]))
        call.require_shape(parts.grad, cls.gradient_shape(call), "that of what the gradient is for")
        for index, shape in zip(parts.state, cls.state_shapes(reference.shape), strict=True):
            call.require_shape(index, shape, "that of the state of such a parameter")
        if parts.rate is not None and parts.rate < len(call.inputs):
            require_rate(call, parts.rate)
        if parts.iteration is not None:
            require_iteration(call, parts.iteration)
        cls.rule(call.arguments, reference.meta.numpy, call.label)
        return [call.inputs[parts.updated.get(index, parts.grad)] for index in range(len(call.definition.output))]

    def make_rule(self) -> PieceRule:
        """The rule, for the type of the parameter."""
        return type(self).rule(self.arguments, self.x(self.parts.reference).dtype, self.label)

    def beginning(self, rule: PieceRule) -> Step:
        """A step that hands the rule this run's learning rate and iteration."""
        parts, label = self.parts, self.label
        has_rate = parts.rate is not None and parts.rate < len(self.input_blobs)
        rate = self.x(parts.rate).reshape(-1) if has_rate and parts.rate is not None else np.full(1, rule.default_rate)
        counter = np.zeros(1, np.int64) if parts.iteration is None else self.x(parts.iteration).reshape(-1)
        return lambda: rule.begin(rate.item(), read_iteration(counter, label))

    def target(self, source: int) -> Array:
        """The array that holds input `source` after the update."""
        return self.y(self.parts.output_of(source))

    def moved(self) -> list[tuple[Array, Array]]:
        """(output, input) for each part that is not updated in place: it is copied first."""
        names = self.definition
        pairs = [(o, i) for o, i in self.parts.updated.items() if names.output[o] != names.input[i]]
        return [(self.y(target), self.x(source)) for target, source in pairs]


class DenseUpdate(Update):
    """An update by a gradient of the parameter's shape."""

    def prepare(self) -> Step:
        """The rule, piece by piece."""
        rule, (param, state, grad, extras) = self.make_rule(), self.whole()
        begin, copies = self.beginning(rule), self.moved()
        scratch = Scratch(self, min(grad.size, PIECE), grad.dtype)
        steps: list[Step] = []
        for start in range(0, grad.size, PIECE):
            cut = slice(start, start + PIECE)
            piece = Piece(
                None if param is None else param[cut],
                tuple(array[cut] for array in state),
                grad[cut],
                tuple(None if array is None else array[cut] for array in extras),
            )
            steps += rule.steps(piece, scratch)

        def update() -> None:
            begin()
            for target, source in copies:
                np.copyto(target, source)
            for step in steps:
                step()

        return update

    def whole(self) -> Piece:
        """All of it, where it is changed; the first axis has the elements."""
        parts = self.parts
        grad = self.x(parts.grad).reshape(-1)
        state = [self.target(source) for source in parts.state]
        return Piece(
            None if parts.param is None else self.target(parts.param).reshape(-1),
            tuple(array.reshape(-1) if array.size == grad.size else array.reshape(grad.size, -1) for array in state),
            grad,
            tuple(self.y(index).reshape(-1) if index < len(self.output_blobs) else None for index in parts.extras),
        )


UpdateClass = TypeVar("UpdateClass", bound=type[Update])


def update_operator(
    name: str,
    doc: str,
    *,
    inputs: Sequence[str],
    outputs: Sequence[str],
    args: Mapping[str, str],
    least_inputs: int | None = None,
    least_outputs: int | None = None,
    enforced: Sequence[int] = (),
    flops: float = 4.0,
) -> Callable[[UpdateClass], UpdateClass]:
    """Class decorator: register an Update class as operator `name`, one that passes on no gradient.

    `inputs` and `outputs` name what the operator takes and gives, of which the last ones may be missing down to the
    least counts; `enforced` are the outputs that must be in place, `flops` the work of an element of an output.
    """

    def register(cls: UpdateClass) -> UpdateClass:
        parts = cls.parts

        def cost(call: OperatorCall, types: Sequence[TensorType]) -> Cost:
            return memory_cost(call, types, flops)

        schema = OpSchema(
            name,
            inputs=(least_inputs or len(inputs), len(inputs)),
            outputs=(least_outputs or len(outputs), len(outputs)),
            infer=cls.output_types,
            doc=doc,
            input_names=tuple(inputs),
            output_names=tuple(outputs),
            args=args,
            inplace=parts.may_share,
            enforced_inplace=tuple((parts.updated[output], output) for output in enforced),
            cost=cost,
        )
        operator(schema)(cls)
        not_differentiable("it changes parameters after the gradients are known", name)
        return cls

    return register
