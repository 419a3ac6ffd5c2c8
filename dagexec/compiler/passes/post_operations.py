"""Which operators are post-ops of another operator's result, for the fusions.

A link is what one element-wise operator does to one of its inputs, as entries of argument `post_ops` (see
`dagexec.ops.activation.post_ops`), whose operands are still blob names here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import ml_dtypes

from dagexec.compiler.passes.draft import Draft
from dagexec.compiler.passes.types import BlobType
from dagexec.core.arguments import Arguments
from dagexec.core.dtypes import BFLOAT16, FLOAT16, FLOAT32, FLOAT64, TypeMeta
from dagexec.core.proto import OperatorDef
from dagexec.ops.activation.post_ops import PostOp, parse_post_op

MOST_POST_OPS = 32
"""As many as oneDNN's primitives take (`DNNL_POST_OPS_LIMIT`, 32 in all versions)."""

FUSED_TYPES = (FLOAT32, FLOAT64, BFLOAT16, FLOAT16)


@dataclass(frozen=True)
class Link:
    """One post-op, and the blob that its operand is, if it has one."""

    post_op: PostOp
    operand: str = ""


Types = Mapping[str, BlobType]
Unary = Callable[[Arguments, TypeMeta], Sequence[PostOp]]


def _plain(*kinds: str) -> Unary:
    return lambda arguments, meta: [parse_post_op(kind, "") for kind in kinds]


def _clip(arguments: Arguments, meta: TypeMeta) -> Sequence[PostOp]:
    """`Clip` within the limits of the type, as the operator has it."""
    limits = ml_dtypes.finfo(meta.numpy)  # type: ignore[no-untyped-call]
    lowest, highest = float(limits.min), float(limits.max)
    low, high = arguments.float("min", -math.inf), arguments.float("max", math.inf)
    return [PostOp("clip", min(max(low, lowest), highest), max(min(high, highest), lowest))] if low <= high else []


def _selu(arguments: Arguments, meta: TypeMeta) -> Sequence[PostOp]:
    alpha, scale = arguments.float("alpha", 1.6732632423543772), arguments.float("scale", 1.0507009873554805)
    return [PostOp("elu", alpha), PostOp("linear", scale, 0.0)]


def _power(arguments: Arguments, meta: TypeMeta) -> Sequence[PostOp]:
    exponent = arguments.float("exponent", 1.0)
    special = {2.0: "square", 0.5: "sqrt"}.get(exponent)
    return [PostOp(special) if special else PostOp("pow", 1.0, exponent)]


UNARY: Mapping[str, Unary] = {
    "Relu": _plain("relu"),
    "ReluN": lambda arguments, meta: [PostOp("clip", 0.0, arguments.float("n", 6.0))],
    "LeakyRelu": lambda arguments, meta: [PostOp("leaky_relu", arguments.float("alpha", 0.01))],
    "Clip": _clip,
    "Sigmoid": _plain("sigmoid"),
    "Tanh": _plain("tanh"),
    "Elu": lambda arguments, meta: [PostOp("elu", arguments.float("alpha", 1.0))],
    "Selu": _selu,
    "Swish": _plain("swish:1.0"),
    "HardSwish": _plain("hardswish"),
    "HardSigmoid": lambda arguments, meta: [
        PostOp("hardsigmoid", arguments.float("alpha", 0.2), arguments.float("beta", 0.5))
    ],
    "Gelu": lambda arguments, meta: [PostOp("gelu_tanh" if arguments.int("fast_gelu", 0) else "gelu_erf")],
    "Softplus": _plain("softplus"),
    "Abs": _plain("abs"),
    "Sqrt": _plain("sqrt"),
    "Sqr": _plain("square"),
    "Exp": _plain("exp"),
    "Log": _plain("log"),
    "Negative": _plain("linear:-1.0:0.0"),
    "Reciprocal": _plain("pow:1.0:-1.0"),
    "Rsqrt": _plain("sqrt", "pow:1.0:-1.0"),
    "Cube": _plain("pow:1.0:3.0"),
}

_COMMUTATIVE = {"Add": "add", "Sum": "add", "Mean": "add", "Mul": "mul", "Max": "max", "Min": "min"}
_OF_TWO = frozenset({"Add", "Sub", "Mul", "Div"})
OF_SEVERAL = _OF_TWO | _COMMUTATIVE.keys()


def unary_links(definition: OperatorDef, meta: TypeMeta) -> tuple[Link, ...]:
    """The links of an operator of one input and the type `meta`; none when it is not known as a post-op."""
    arguments = Arguments(definition, definition.type)
    if definition.type == "FusedElementwise" and len(definition.input) == 1:
        return tuple(Link(parse_post_op(text, definition.type)) for text in arguments.strings("post_ops"))
    if len(definition.input) != 1 or len(definition.output) != 1 or meta not in FUSED_TYPES:
        return ()
    if definition.type == "Pow":
        return tuple(map(Link, _power(arguments, meta)))
    rule = UNARY.get(definition.type)
    return () if rule is None else tuple(map(Link, rule(arguments, meta)))


def operand_links(draft: Draft, number: int, source: str, types: Types) -> tuple[Link, ...]:
    """The links of an operator of several inputs to `source`, whose shape its result has; none when it is no post-op.

    A constant of one element is part of the link where there is one for it; other operands must broadcast to `source`.
    """
    definition, kind = draft[number], types.get(source)
    if kind is None or kind.meta not in FUSED_TYPES or len(definition.output) != 1 or len(definition.input) < 2:
        return ()
    if definition.type not in OF_SEVERAL or len(definition.input) > MOST_POST_OPS + 1:  # asked for each of its inputs
        return ()
    position = list(definition.input).index(source)
    others = [name for place, name in enumerate(definition.input) if place != position]
    if not _operands_fit(definition, [types.get(name) for name in others], kind):
        return ()
    if definition.type in _OF_TWO:
        scalar = _scalar(draft, others[0])
        exact = _with_number(definition.type, position, scalar) if scalar is not None else ()
        return exact or _with_operand(definition.type, position, others[0])
    links = [Link(PostOp(_COMMUTATIVE[definition.type]), name) for name in others]
    if definition.type == "Mean":
        links.append(Link(PostOp("linear", 1.0 / len(definition.input), 0.0)))
    return tuple(links)


def _operands_fit(definition: OperatorDef, operands: Sequence[BlobType | None], kind: BlobType) -> bool:
    """True when all operands have the type of `kind` and broadcast to it by NumPy's rule.

    Caffe2's older rule says the same where shapes are equal or B has one element.
    """
    arguments = Arguments(definition, definition.type)
    old_rule = definition.type in _OF_TWO and arguments.int("broadcast", 0)
    for operand in operands:
        if operand is None or operand.meta is not kind.meta or not operand.broadcasts_to(kind):
            return False
        if old_rule and operand.shapes != kind.shapes and any(math.prod(shape) != 1 for shape in operand.shapes):
            return False
    return True


def _scalar(draft: Draft, name: str) -> float | None:
    """The finite value of a constant of one element; else None."""
    array = draft.constant(name)
    if array is None or array.size != 1:
        return None
    value = float(array.reshape(-1)[0])
    return value if math.isfinite(value) else None


def _with_number(op_type: str, position: int, value: float) -> tuple[Link, ...]:
    """`op_type` of the result at `position` and a number at the other place."""
    if op_type == "Add":
        return (Link(PostOp("linear", 1.0, value)),)
    if op_type == "Sub":
        return (Link(PostOp("linear", 1.0, -value) if position == 0 else PostOp("linear", -1.0, value)),)
    if op_type == "Mul":
        return (Link(PostOp("linear", value, 0.0)),)
    if position == 1:
        return (Link(PostOp("pow", value, -1.0)),)
    return (Link(PostOp("linear", 1.0 / value, 0.0)),) if value and math.isfinite(1.0 / value) else ()


def _with_operand(op_type: str, position: int, name: str) -> tuple[Link, ...]:
    if op_type in ("Add", "Mul") or position == 0:
        return (Link(PostOp(op_type.lower()), name),)
    if op_type == "Sub":
        return Link(PostOp("linear", -1.0, 0.0)), Link(PostOp("add"), name)
    return Link(PostOp("pow", 1.0, -1.0)), Link(PostOp("mul"), name)
