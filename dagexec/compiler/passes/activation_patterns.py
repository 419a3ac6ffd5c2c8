"""activation-patterns: activations that a model spells out become one operator: Swish, HardSwish, Mish, Gelu.

Exporters write x * sigmoid(x), or x / 2 * (1 + erf(x / sqrt(2))), in many ways. Instead of a list of them, the
operators between a product and one blob that all of it depends on are taken as a function of that blob, which is
computed for some 2,000 numbers, by the formulas of the operators' schemas, and compared with the activations. What the
functions are made of has no step or kink that these numbers would miss: limits of clips must lie among them.

Swish: Ramachandran et al. 2017, arXiv:1710.05941. HardSwish: Howard et al. 2019, arXiv:1905.02244. Mish: Misra 2019,
arXiv:1908.08681. Gelu: Hendrycks and Gimpel 2016, arXiv:1606.08415.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

import numpy as np
import numpy.typing as npt

from dagexec.compiler.passes.draft import Draft
from dagexec.compiler.passes.post_operations import FUSED_TYPES, Types
from dagexec.compiler.passes.rewriting import Pass
from dagexec.core.arguments import ArgumentValue
from dagexec.core.node import Node, new_node
from dagexec.core.registry import schema_of
from dagexec.ops.activation.post_ops import as_post_ops

Samples = npt.NDArray[np.float64]
Function = Callable[..., Samples]

_FAR = 1e4
_DENSE = np.linspace(-12.0, 12.0, 1537)
_SPARSE = np.geomspace(12.0, _FAR, 200)
SAMPLES: Samples = np.concatenate([-_SPARSE[::-1], _DENSE, _SPARSE])
_TOLERANCE = 2e-6  # of constants that a model holds in float32
_MAX_OPERATORS = 10
_NO_LIMIT = float(np.finfo(np.float32).max)
_IN_NO_PATTERN_ALONE = ("relu", "sqrt", "abs", "square", "pow")
"""Post-ops of which, with arithmetic, no activation is made."""

_ACTIVATIONS: tuple[tuple[str, str, Mapping[str, ArgumentValue]], ...] = (
    ("Swish", "Swish", {}),
    ("HardSwish", "HardSwish", {}),
    ("Mish", "Mish", {}),
    ("Gelu", "Gelu", {}),
    ("Gelu by tanh", "Gelu", {"fast_gelu": 1}),
)
"""What is recognized: its name, and the operator that it becomes."""


@cache
def _activations() -> tuple[Samples, ...]:
    """Each activation at SAMPLES."""
    functions = (_function(new_node(op_type, (), (), arg=arguments)) for _, op_type, arguments in _ACTIVATIONS)
    return tuple(function(SAMPLES) for function in functions if function is not None)


class _Operators:
    """What is asked about the operators of one model, found out once for each."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Node, bool]] = {}  # the definitions are held, so that no id comes twice
        self._functions: dict[int, tuple[Node, Function | None]] = {}

    def is_known(self, definition: Node) -> bool:
        """True for an operator that computes each element by a formula without steps."""
        found = self._known.get(id(definition))
        if found is None:
            known = definition.type in ("Erf", "Pow") or as_post_ops(definition) is not None
            found = self._known[id(definition)] = (definition, known)
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


def _may_be_part(definition: Node) -> bool:
    """True for a function of one element that makes it worth while to look for patterns."""
    if len(definition.input) > 1:
        return False
    post_ops = as_post_ops(definition) or ()
    return definition.type == "Erf" or any(post_op.kind not in _IN_NO_PATTERN_ALONE for post_op in post_ops)


def edit(draft: Draft) -> None:
    """Look behind each product and quotient, the last ones first, as they have the largest part of a pattern."""
    if not any(map(_may_be_part, draft.nodes())):
        return
    types, operators = draft.types(), _Operators()
    for number in reversed(draft.numbers()):
        if number in draft and draft[number].type in ("Mul", "Div") and draft.is_free(number):
            _rewrite(draft, number, types, operators)


def _rewrite(draft: Draft, root: int, types: Types, operators: _Operators) -> None:
    result = draft[root].output[0]
    for source in _candidates(draft, root, operators):
        kind = types.get(source)
        if kind is None or kind.meta not in FUSED_TYPES or types.get(result) != kind:
            continue
        expression = _Expression(draft, root, source, operators)
        values = expression.values()
        if values is None or not expression.is_private():
            continue
        for (name, op_type, arguments), expected in zip(_ACTIVATIONS, _activations(), strict=True):
            if np.allclose(values, expected, rtol=_TOLERANCE, atol=_TOLERANCE):
                count = len(expression.operators)
                draft.changed(f"{count} operators up to {draft.label(root)} are {name}")
                draft.replace(root, new_node(op_type, [source], [result], name=draft[root].name, arg=arguments))
                for number in expression.operators - {root}:
                    draft.remove(number)
                return


def _candidates(draft: Draft, root: int, operators: _Operators) -> list[str]:
    """Blobs that the operators behind `root` depend on, from the farthest to the nearest."""
    found: dict[str, int] = {}
    frontier, depth = [root], 0
    while frontier and depth < _MAX_OPERATORS:
        depth += 1
        names = [name for number in frontier for name in draft[number].input if draft.constant(name) is None]
        found.update(dict.fromkeys(names, depth))
        writers = {writer for name in names if (writer := draft.producer(name)) is not None}
        frontier = [writer for writer in writers if operators.is_known(draft[writer])]
    return sorted(found, key=lambda name: -found[name])


class _Expression:
    """The operators from blob `source` to the result of operator `root`, as a function of one number."""

    def __init__(self, draft: Draft, root: int, source: str, operators: _Operators) -> None:
        self._draft = draft
        self._operators = operators
        self._root = root
        self._known: dict[str, Samples] = {source: SAMPLES}
        self.operators: set[int] = set()

    def values(self) -> Samples | None:
        """The function at SAMPLES; None when something else than `source` and constants goes into it."""
        if not self._is_closed():
            return None
        with np.errstate(all="ignore"):
            return self._result(self._root)

    def _is_closed(self) -> bool:
        """True when it is made of `source`, constants and not too many known operators, which are then noted."""
        waiting = [self._root]
        while waiting:
            number = waiting.pop()
            definition = self._draft[number]
            if (
                not self._operators.is_known(definition)
                or len(definition.output) != 1
                or len(self.operators) > _MAX_OPERATORS
            ):
                return False
            self.operators.add(number)
            for name in definition.input:
                if name in self._known or self._draft.constant(name) is not None:
                    continue
                writer = self._draft.producer(name)
                if writer is None:
                    return False
                if writer not in self.operators:
                    waiting.append(writer)
        return True

    def is_private(self) -> bool:
        """True when nothing else reads what is between source and result."""
        inner = [name for number in self.operators - {self._root} for name in self._draft[number].output]
        return all(
            self._draft.is_inner(name) and self.operators.issuperset(self._draft.readers(name)) for name in inner
        )

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


PASS = Pass("activation-patterns", "Activations that a model spells out become one operator.", edit)
