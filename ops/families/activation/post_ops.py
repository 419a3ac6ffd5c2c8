"""Post-ops: what a fused operator still does to its result before it is written, as argument `post_ops` says it.

An entry of the argument is `kind` with up to two numbers, `kind:a:b`, or `kind:I` with the number I of an input of the
operator: another operand, in the result's physical order, that broadcasts to it. `sum:I` adds what input I holds, which
must be the blob of output 0: the operator works in place there. Entries apply in order. The names are oneDNN's, where
it has one; `ops.engines.onednn.post_ops` gives them to its primitives, `result_passes` computes them with NumPy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial

import numpy as np

from dagexec.core.dtypes import FLOAT32, TypeMeta
from dagexec.core.expressions import (
    Expression,
    absolute,
    clip,
    element,
    exp,
    flops_of,
    log,
    logistic,
    power,
    softplus,
    sqrt,
    square,
    tanh,
)
from dagexec.core.node import Node
from dagexec.core.operator import Operator, Step, nothing_to_do
from dagexec.core.registry import schema_of
from dagexec.core.schema import OperatorCall, TensorType
from dagexec.core.traits import PostOpsRule
from dagexec.errors import ArgumentError
from dagexec.ops.base.blocks import Array, Index, Scratch, blockwise
from dagexec.ops.base.expression_steps import expression_steps
from dagexec.ops.families.activation import functions
from dagexec.platform.cached import cached_property
from dagexec.platform.records import dataclass

POST_OPS_HELP = (
    "what is done to the result, in order: strings out of relu, leaky_relu:alpha, clip:low:high, sigmoid, tanh, "
    "elu:alpha, swish:alpha, hardswish, hardsigmoid:alpha:beta, gelu_erf, gelu_tanh, abs, sqrt, square, exp, log, "
    "linear:a:b (a*y + b), pow:a:b (a*y^b), softplus, mish; add:I, mul:I, sub:I, div:I, max:I, min:I with the "
    "operator's input number I; sum:I for input I that is output 0, in place (default: nothing)"
)


@dataclass(frozen=True)
class Function:
    """A post-op without another operand.

    Attributes:
        numbers: how many it takes.
        expression: what it computes, of an element and the two numbers.
        positive: no result is below zero.
        finite_at_zero: it makes something finite of zeros.
    """

    numbers: int
    expression: Callable[[Expression, float, float], Expression]
    positive: bool = False
    finite_at_zero: bool = True

    @cached_property
    def flops(self) -> float:
        """Operations an element."""
        return max(1, flops_of(self.expression(element(0), 0.5, 0.75)))


def _linear(x: Expression, a: float, b: float) -> Expression:
    return x * a + b if b else x * a


FUNCTIONS: Mapping[str, Function] = {
    "relu": Function(0, lambda x, a, b: functions.relu(x), positive=True),
    "leaky_relu": Function(1, lambda x, a, b: functions.leaky_relu(x, alpha=a)),
    "clip": Function(2, lambda x, a, b: clip(x, a, b)),
    "sigmoid": Function(0, lambda x, a, b: logistic(x), positive=True),
    "tanh": Function(0, lambda x, a, b: tanh(x)),
    "elu": Function(1, lambda x, a, b: functions.elu(x, alpha=a)),
    "swish": Function(1, lambda x, a, b: functions.swish(x, alpha=a)),
    "hardswish": Function(0, lambda x, a, b: functions.hard_swish(x)),
    "hardsigmoid": Function(2, lambda x, a, b: functions.hard_sigmoid(x, alpha=a, beta=b), positive=True),
    "gelu_erf": Function(0, lambda x, a, b: functions.exact_gelu(x)),
    "gelu_tanh": Function(0, lambda x, a, b: functions.tanh_gelu(x)),
    "abs": Function(0, lambda x, a, b: absolute(x), positive=True),
    "sqrt": Function(0, lambda x, a, b: sqrt(x), positive=True),
    "square": Function(0, lambda x, a, b: square(x), positive=True),
    "exp": Function(0, lambda x, a, b: exp(x), positive=True),
    "log": Function(0, lambda x, a, b: log(x), finite_at_zero=False),
    "linear": Function(2, _linear),
    "pow": Function(2, lambda x, a, b: power(x, b) * a, finite_at_zero=False),
    "softplus": Function(0, lambda x, a, b: softplus(x), positive=True),
    "mish": Function(0, lambda x, a, b: functions.mish(x)),
}
"""Post-ops of the result alone."""

BINARY: Mapping[str, np.ufunc] = {
    "add": np.add,
    "mul": np.multiply,
    "sub": np.subtract,
    "div": np.divide,
    "max": np.maximum,
    "min": np.minimum,
}
"""Post-ops of the result and an input of the operator."""

COMMUTATIVE = frozenset({"add", "mul", "max", "min"})
"""Those of BINARY whose operands may change places."""

SUM = "sum"


@dataclass(frozen=True)
class PostOp:
    """One entry of `post_ops`.

    Attributes:
        kind: a name of FUNCTIONS or BINARY, or SUM.
        a, b: the numbers of a function, 0 where it has none.
        input: the number of the input that a binary one or SUM reads; -1 for a function.
    """

    kind: str
    a: float = 0.0
    b: float = 0.0
    input: int = -1

    @property
    def is_positive(self) -> bool:
        """True when no result is below zero, whatever it is computed from."""
        return self.a >= 0 if self.kind == "clip" else self.kind in FUNCTIONS and FUNCTIONS[self.kind].positive

    @property
    def is_finite_at_zero(self) -> bool:
        """True when it makes something finite of zeros."""
        return FUNCTIONS[self.kind].finite_at_zero if self.kind in FUNCTIONS else self.kind != "div"

    def expression(self, x: Expression) -> Expression:
        """What a function makes of an element."""
        return FUNCTIONS[self.kind].expression(x, self.a, self.b)

    def __str__(self) -> str:
        """The entry of the argument."""
        if self.input >= 0:
            return f"{self.kind}:{self.input}"
        return ":".join([self.kind, *(repr(float(x)) for x in (self.a, self.b)[: FUNCTIONS[self.kind].numbers])])


@lru_cache(maxsize=1024)
def parse_post_op(text: str, label: str) -> PostOp:
    """An entry of `post_ops`. Raises ArgumentError, naming the operator `label`, for what is none."""
    kind, *given = text.split(":")
    if kind not in FUNCTIONS and kind not in BINARY and kind != SUM:
        known = ", ".join([*FUNCTIONS, *BINARY, SUM])
        raise ArgumentError(f"{label}: post_ops: {kind!r} is unknown; expected one of {known}")
    function = FUNCTIONS.get(kind)
    expected = 1 if function is None else function.numbers
    if len(given) != expected:
        what = "number(s)" if function is not None else "input number"
        raise ArgumentError(f"{label}: post_ops: {kind!r} takes {expected} {what}, found {text!r}")
    if function is None:
        if not given[0].isdecimal():
            raise ArgumentError(f"{label}: post_ops: {kind!r} takes the number of an input, found {text!r}")
        return PostOp(kind, input=int(given[0]))
    try:
        numbers = [float(number) for number in given]
    except ValueError:
        raise ArgumentError(f"{label}: post_ops: {kind!r} takes {expected} number(s), found {text!r}") from None
    if any(math.isnan(number) for number in numbers) or (kind == "clip" and numbers[0] > numbers[1]):
        raise ArgumentError(f"{label}: post_ops: the numbers of {text!r} are invalid")
    a, b = [*numbers, 0.0, 0.0][:2]
    return PostOp(kind, a, b)


def as_post_ops(definition: Node, meta: TypeMeta = FLOAT32) -> tuple[PostOp, ...] | None:
    """What an operator on `meta` is as post-ops, by its schema; () for one that gives its input back.

    None for one that is none, or whose arguments make no sense, which it will say itself. Passes ask often, so it is
    read once for operators of equal arguments.
    """
    rule, count = schema_of(definition.type).post_ops, len(definition.input)
    if rule is None:
        return None
    return definition.values.once((rule, meta, count), partial(_by_rule, rule, definition, meta, count))


def _by_rule(rule: PostOpsRule, definition: Node, meta: TypeMeta, count: int) -> tuple[PostOp, ...] | None:
    try:
        entries = rule(definition.arguments(), meta, count)
        return None if entries is None else tuple([parse_post_op(entry, definition.type) for entry in entries])
    except ArgumentError:
        return None


def read_post_ops(call: OperatorCall) -> tuple[PostOp, ...]:
    """Argument `post_ops`. Raises ArgumentError."""
    arguments = call.arguments
    return arguments.once(
        read_post_ops, lambda: tuple(parse_post_op(text, call.label) for text in arguments.strings("post_ops"))
    )


def infer_post_ops(call: OperatorCall, output: TensorType, own: int) -> tuple[PostOp, ...]:
    """Argument `post_ops` of an operator with result `output`, whose inputs from number `own` on are operands.

    Raises ArgumentError for an input that is none or that no entry names, and for one in place that is not a `sum`,
    ShapeError for an operand of another type than the result, or of a shape that does not broadcast to it.
    """
    post_ops = read_post_ops(call)
    names, result = call.definition.input, call.definition.output[0]
    for post_op in post_ops:
        index = post_op.input
        if index < 0:
            continue
        if not own <= index < len(names):
            raise ArgumentError(
                f"{call.label}: post_ops: {str(post_op)!r} needs an operand: expected input {own} to {len(names) - 1}"
            )
        if post_op.kind == SUM:
            if names[index] != result:
                raise ArgumentError(
                    f"{call.label}: post_ops: {str(post_op)!r} adds to the result in place, so input {index} must be "
                    f"output blob {result!r}, found {names[index]!r}"
                )
            call.require_shape(index, output.shape, "the shape of the result")
            call.require_types(index, output.meta)
        else:
            _require_operand(call, index, output)
    for index in range(own, len(names)):
        kinds = [post_op.kind for post_op in post_ops if post_op.input == index]
        if not kinds:
            raise ArgumentError(f"{call.label}: input {names[index]!r} (number {index}) is not named in post_ops")
        if names[index] == result and kinds != [SUM]:
            raise ArgumentError(
                f"{call.label}: post_ops: input {index} is the output blob {result!r}: only 'sum:{index}' may read it"
            )
    return post_ops


def _require_operand(call: OperatorCall, index: int, output: TensorType) -> None:
    call.require_types(index, output.meta)
    shape = call.inputs[index].shape
    padded = (*(1,) * (len(output.shape) - len(shape)), *shape)
    if len(padded) != len(output.shape) or any(
        size not in (1, full) for size, full in zip(padded, output.shape, strict=True)
    ):
        name = call.definition.input[index]
        raise call.fail(f"operand {name!r} of post_ops must broadcast to the result {output.shape}, found {shape}")


def post_op_flops(post_ops: Sequence[PostOp], elements: int) -> int:
    """Operations on a result of so many elements."""
    return round(elements * sum(FUNCTIONS[post_op.kind].flops if post_op.input < 0 else 1 for post_op in post_ops))


def post_op_operands(owner: Operator, post_ops: Sequence[PostOp], y: Array) -> tuple[dict[int, Array], list[Step]]:
    """The operands by input number, and the steps that come first: they copy what `y` holds where a `sum` adds it."""
    operands = {post_op.input: owner.x(post_op.input) for post_op in post_ops if post_op.input >= 0}
    before: list[Step] = []
    for post_op in post_ops:
        if post_op.kind == SUM:
            held = operands[post_op.input] = owner.scratch(y.shape, y.dtype)
            before.append(partial(np.copyto, held, y))
    return operands, before


def post_op_passes(
    owner: Operator, post_ops: Sequence[PostOp], x: Array, y: Array, operands: Mapping[int, Array]
) -> Step:
    """The step that applies `post_ops` to `x` and leaves the result in `y`, which may be `x`, piece by piece.

    `operands` are by input number; that of a `sum` is a copy of what `y` held. 16-bit floats are computed in float32
    and rounded at the end.
    """
    in_place = x is y
    if not y.size or (in_place and not post_ops):
        return nothing_to_do
    views = {index: np.broadcast_to(operand, y.shape) for index, operand in operands.items()}
    if x.flags.c_contiguous and y.flags.c_contiguous and not views:
        x, y = x.reshape(-1), y.reshape(-1)

    def passes(index: Index, source: Array, target: Array, scratch: Scratch) -> list[Step]:
        same = in_place and target.dtype == y.dtype
        steps: list[Step] = [] if same else [partial(np.copyto, target, source)]
        for post_op in post_ops:
            if post_op.input < 0:
                steps += expression_steps([post_op.expression(element(0))], {0: target}, [target], scratch)
            else:
                ufunc = BINARY["add" if post_op.kind == SUM else post_op.kind]
                steps.append(partial(ufunc, target, views[post_op.input][index], out=target))
        return steps

    return blockwise(owner, x, y, passes)
