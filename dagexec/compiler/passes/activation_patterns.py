"""activation-patterns: activations that a model spells out become one operator: Swish, HardSwish, Mish, Gelu.

Exporters write x * sigmoid(x), or x / 2 * (1 + erf(x / sqrt(2))), in many ways. Instead of a list of them, the
operators between a product and one blob that all of it depends on are taken as a function of that blob, which is
computed for some 2,000 numbers, by the formulas of the operators' schemas, and compared with the activations. What the
functions are made of has no step or kink that these numbers would miss: limits of clips must lie among them.

Swish: Ramachandran et al. 2017, arXiv:1710.05941. HardSwish: Howard et al. 2019, arXiv:1905.02244. Mish: Misra 2019,
arXiv:1908.08681. Gelu: Hendrycks and Gimpel 2016, arXiv:1606.08415.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from functools import cache

import numpy as np
import numpy.typing as npt

from dagexec.compiler.passes.draft import Draft
from dagexec.compiler.passes.operator_traits import is_product_or_quotient
from dagexec.compiler.passes.post_operations import FUSED_TYPES, Types
from dagexec.compiler.passes.rewriting import Pass
from dagexec.core.arguments import ArgumentValue
from dagexec.core.node import Node, new_node
from dagexec.core.registry import schema_of
from dagexec.core.schema import OpSchema
from dagexec.ops.families.activation.post_ops import as_post_ops

Samples = npt.NDArray[np.float64]
Function = Callable[..., Samples]

_FAR = 1e4
_DENSE = np.linspace(-12.0, 12.0, 1537)
_SPARSE = np.geomspace(12.0, _FAR, 200)
SAMPLES: Samples = np.concatenate([-_SPARSE[::-1], _DENSE, _SPARSE])
_TOLERANCE = 2e-6  # of constants that a model holds in float32
_MAX_OPERATORS = 10
_NO_LIMIT = float(np.finfo(np.float32).max)
_IN_NO_PATTERN_ALONE = ("relu", "sqrt", "abs", "square", "pow", "linear", "add", "sub", "mul", "div")
"""Post-ops of which alone no activation is made."""

_ACTIVATIONS: tuple[tuple[str, str, Mapping[str, ArgumentValue]], ...] = (
    ("Swish", "Swish", {}),
    ("HardSwish", "HardSwish", {}),
    ("Mish", "Mish", {}),
    ("Gelu", "Gelu", {}),
    ("Gelu by tanh", "Gelu", {"fast_gelu": 1}),
)
"""What is recognized: its name, and the operator that it becomes."""


@cache
def _activations() -> tuple[Samples, Samples]:
    """Each activation at SAMPLES, a row, and by how much constants in float32 may miss it."""
    functions = (_function(new_node(op_type, (), (), arg=arguments)) for _, op_type, arguments in _ACTIVATIONS)
    expected = np.stack([function(SAMPLES) for function in functions if function is not None])
    return expected, _TOLERANCE + _TOLERANCE * np.abs(expected)


class _Operators:
    """What is asked about the operators of one model, found out once for each."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Node, bool]] = {}  # the definitions are held, so that no id comes twice
        self._functions: dict[int, tuple[Node, Function | None]] = {}

    def is_known(self, definition: Node) -> bool:
        """True for an operator that computes each element of its one output by a formula without steps."""
        found = self._known.get(id(definition))
        if found is None:
            known = definition.type in ("Erf", "Pow") or as_post_ops(definition) is not None
            found = self._known[id(definition)] = (definition, known and len(definition.output) == 1)
        return found[1]

    def function(self, definition: Node) -> Function | None:
        """See `_function`."""
        found = self._functions.get(id(definition))
        if found is None:
            found = self._functions[id(definition)] = (definition, _function(definition))
        return found[1]


def _function(definition: Node) -> Function | None:
    """What a known operator computes of each element; None where a kink may be beyond the samples."""
    clips = [post_op for post_op in as_post_ops(definition) or () if post_op.kind == "clip"]
    if any(_FAR / 2 < abs(limit) < _NO_LIMIT for clip in clips for limit in (clip.a, clip.b)):
        return None
    return schema_of(definition.type).function(definition.arguments())


def _may_tell(schema: OpSchema) -> bool:
    return schema.post_ops is not None or schema.type == "Erf"


def _is_telling(definition: Node) -> bool:
    """True for a function without which no activation is spelled out."""
    post_ops = as_post_ops(definition) or ()
    return definition.type == "Erf" or any(post_op.kind not in _IN_NO_PATTERN_ALONE for post_op in post_ops)


def edit(draft: Draft) -> None:
    """Look behind each product and quotient, the last ones first, as they have the largest part of a pattern."""
    if not any(_is_telling(draft[number]) for number in draft.having(_may_tell)):
        return
    types, operators = draft.types(), _Operators()
    for number in reversed(draft.having(is_product_or_quotient)):
        if number in draft and draft[number].type in ("Mul", "Div") and draft.is_free(number):
            _rewrite(draft, number, types, operators)


def _rewrite(draft: Draft, root: int, types: Types, operators: _Operators) -> None:
    result = draft[root].output[0]
    kind = types.get(result)
    if kind is None or kind.meta not in FUSED_TYPES or not operators.is_known(draft[root]):
        return
    for source, numbers in reversed(_sources(draft, root, operators)):
        if types.get(source) != kind or not any(_is_telling(draft[number]) for number in numbers):
            continue
        values = _Expression(draft, root, source, operators).values() if _is_private(draft, root, numbers) else None
        if values is None:
            continue
        expected, allowed = _activations()
        for place in np.flatnonzero((np.abs(values - expected) <= allowed).all(axis=1))[:1]:
            name, op_type, arguments = _ACTIVATIONS[place]
            draft.changed(f"{len(numbers)} operators up to {draft.label(root)} are {name}")
            draft.replace(root, new_node(op_type, [source], [result], name=draft[root].name, arg=arguments))
            for number in numbers - {root}:
                draft.remove(number)
            return


def _sources(draft: Draft, root: int, operators: _Operators) -> list[tuple[str, Set[int]]]:
    """Blobs of which alone, beside constants, known operators compute the result of `root`, the nearest first.

    Each comes with those operators. The walk takes what is listed last of what it has found, so that all between
    `root` and a blob is behind it when it comes to that blob.
    """
    found: list[tuple[str, Set[int]]] = []
    taken: list[int] = []
    frontier: dict[str, int] = {}  # blobs, by the known operators that write them; -1 for other blobs
    number = root
    while number >= 0 and len(taken) <= _MAX_OPERATORS:
        taken.append(number)
        for name in draft[number].input:
            if name not in frontier and draft.constant(name) is None:
                writer = draft.producer(name)
                frontier[name] = writer if writer is not None and operators.is_known(draft[writer]) else -1
        if not frontier:
            break
        if len(frontier) == 1:
            found.append((next(iter(frontier)), set(taken)))
        number = frontier.pop(max(frontier, key=frontier.__getitem__))
    return found


def _is_private(draft: Draft, root: int, numbers: Set[int]) -> bool:
    """True when nothing else reads what is between a source and the result of `root`."""
    inner = [name for number in numbers - {root} for name in draft[number].output]
    return all(draft.is_inner(name) and numbers >= set(draft.readers(name)) for name in inner)


class _Expression:
    """The operators from blob `source` to the result of operator `root`, as a function of one number."""

    def __init__(self, draft: Draft, root: int, source: str, operators: _Operators) -> None:
        self._draft = draft
        self._operators = operators
        self._root = root
        self._known: dict[str, Samples] = {source: SAMPLES}

    def values(self) -> Samples | None:
        """The function at SAMPLES; None when it is none of one number."""
        with np.errstate(all="ignore"):
            return self._result(self._root)

    def _result(self, number: int) -> Samples | None:
        definition = self._draft[number]
        function = self._operators.function(definition)
        if function is None:
            return None
        operands = []
        for name in definition.input:
            value = self._value(name)
            if value is None:
                return None
            operands.append(value)
        if definition.type == "Pow" and len(operands) == 1:
            operands.append(np.full_like(SAMPLES, self._draft.arguments(number).float("exponent", 1.0)))
        return function(*operands)

    def _value(self, name: str) -> Samples | None:
        if name not in self._known:
            array, writer = self._draft.constant(name), self._draft.producer(name)
            value = None
            if array is None and writer is not None:
                value = self._result(writer)
            elif array is not None and array.size == 1 and array.dtype.kind == "f":
                value = np.full_like(SAMPLES, float(array.reshape(-1)[0]))
            if value is None:
                return None
            self._known[name] = value
        return self._known[name]


PASS = Pass(
    "activation-patterns",
    "Activations that a model spells out become one operator.",
    edit,
    needs=(is_product_or_quotient, _may_tell),
)
