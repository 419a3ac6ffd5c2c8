"""activation-patterns: activations that a model spells out become one operator: Swish, HardSwish, Mish, Gelu.

Exporters write x * sigmoid(x), or x / 2 * (1 + erf(x / sqrt(2))), in many ways. Instead of a list of them, the
operators between a product and one blob that all of it depends on are taken as a function of that blob, which is
computed for some 2,000 numbers and compared with the activations. What the functions are made of has no step or kink
that these numbers would miss: limits of clips must lie among them.

Swish: Ramachandran et al. 2017, arXiv:1710.05941. HardSwish: Howard et al. 2019, arXiv:1905.02244. Mish: Misra 2019,
arXiv:1908.08681. Gelu: Hendrycks and Gimpel 2016, arXiv:1606.08415.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from dagexec.compiler.passes.draft import Draft
from dagexec.compiler.passes.post_operations import FUSED_TYPES, Types
from dagexec.compiler.passes.rewriting import Pass, Rewritten
from dagexec.compiler.passes.types import infer_types
from dagexec.core.arguments import Arguments, ArgumentValue
from dagexec.core.model import Model
from dagexec.core.operator_def import op
from dagexec.core.proto import OperatorDef

Samples = npt.NDArray[np.float64]
Function = Callable[[Arguments, Samples], Samples]

_FAR = 1e4
_DENSE = np.linspace(-12.0, 12.0, 1537)
_SPARSE = np.geomspace(12.0, _FAR, 200)
SAMPLES: Samples = np.concatenate([-_SPARSE[::-1], _DENSE, _SPARSE])
_TOLERANCE = 2e-6  # of constants that a model holds in float32
_MAX_OPERATORS = 10


def _sigmoid(x: Samples) -> Samples:
    return np.exp(-np.logaddexp(0.0, -x))


def _erf(x: Samples) -> Samples:
    return np.array([math.erf(value) for value in x])


_ACTIVATIONS: tuple[tuple[str, str, Mapping[str, ArgumentValue], Samples], ...] = (
    ("Swish", "Swish", {}, SAMPLES * _sigmoid(SAMPLES)),
    ("HardSwish", "HardSwish", {}, SAMPLES * np.clip(SAMPLES / 6 + 0.5, 0, 1)),
    ("Mish", "FusedElementwise", {"post_ops": ["mish"]}, SAMPLES * np.tanh(np.logaddexp(0.0, SAMPLES))),
    ("Gelu", "Gelu", {}, 0.5 * SAMPLES * (1 + _erf(SAMPLES * math.sqrt(0.5)))),
    (
        "Gelu by tanh",
        "Gelu",
        {"fast_gelu": 1},
        0.5 * SAMPLES * (1 + np.tanh(math.sqrt(2 / math.pi) * (SAMPLES + 0.044715 * SAMPLES**3))),
    ),
)


def _clip(arguments: Arguments, x: Samples) -> Samples:
    limits = arguments.float("min", -math.inf), arguments.float("max", math.inf)
    if any(math.isfinite(limit) and abs(limit) > _FAR / 2 for limit in limits):
        return np.full_like(x, np.nan)
    return np.clip(x, *limits)


_UNARY: Mapping[str, Function] = {
    "Sigmoid": lambda arguments, x: _sigmoid(x),
    "HardSigmoid": lambda arguments, x: np.clip(
        arguments.float("alpha", 0.2) * x + arguments.float("beta", 0.5), 0.0, 1.0
    ),
    "Tanh": lambda arguments, x: np.tanh(x),
    "Softplus": lambda arguments, x: np.logaddexp(0.0, x),
    "Erf": lambda arguments, x: _erf(x),
    "Exp": lambda arguments, x: np.exp(x),
    "Log": lambda arguments, x: np.log(x),
    "Negative": lambda arguments, x: -x,
    "Reciprocal": lambda arguments, x: 1 / x,
    "Sqr": lambda arguments, x: x * x,
    "Cube": lambda arguments, x: x**3,
    "Relu": lambda arguments, x: np.maximum(x, 0.0),
    "ReluN": lambda arguments, x: np.clip(x, 0.0, arguments.float("n", 6.0)),
    "Clip": _clip,
}
_BINARY: Mapping[str, Callable[[Samples, Samples], Samples]] = {
    "Add": np.add,
    "Sum": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "Div": np.divide,
    "Pow": np.power,
}


def apply(model: Model) -> Rewritten:
    """Look behind each product and quotient, the last ones first, as they have the largest part of a pattern."""
    draft = Draft(model)
    if not any(definition.type in _UNARY and definition.type != "Relu" for definition in model.net.op):
        return draft.finish()
    types = infer_types(model)
    for number in reversed(draft.numbers()):
        if number in draft and draft[number].type in ("Mul", "Div") and draft.is_free(number):
            _rewrite(draft, number, types)
    return draft.finish()


def _rewrite(draft: Draft, root: int, types: Types) -> None:
    result = draft[root].output[0]
    for source in _candidates(draft, root):
        kind = types.get(source)
        if kind is None or kind.meta not in FUSED_TYPES or types.get(result) != kind:
            continue
        expression = _Expression(draft, root, source)
        values = expression.values()
        if values is None or not expression.is_private():
            continue
        for name, op_type, arguments, expected in _ACTIVATIONS:
            if np.allclose(values, expected, rtol=_TOLERANCE, atol=_TOLERANCE):
                count = len(expression.operators)
                draft.changed(f"{count} operators up to {draft.label(root)} are {name}")
                draft.replace(root, op(op_type, [source], [result], name=draft[root].name, arg=arguments))
                for number in expression.operators - {root}:
                    draft.remove(number)
                return


def _candidates(draft: Draft, root: int) -> list[str]:
    """Blobs that the operators behind `root` depend on, from the farthest to the nearest."""
    found: dict[str, int] = {}
    frontier, depth = [root], 0
    while frontier and depth < _MAX_OPERATORS:
        depth += 1
        names = [name for number in frontier for name in draft[number].input if draft.constant(name) is None]
        found.update(dict.fromkeys(names, depth))
        writers = {writer for name in names if (writer := draft.producer(name)) is not None}
        frontier = [writer for writer in writers if _is_known(draft[writer])]
    return sorted(found, key=lambda name: -found[name])


def _is_known(definition: OperatorDef) -> bool:
    return definition.type in _UNARY or definition.type in _BINARY


class _Expression:
    """The operators from blob `source` to the result of operator `root`, as a function of one number."""

    def __init__(self, draft: Draft, root: int, source: str) -> None:
        self._draft = draft
        self._root = root
        self._known: dict[str, Samples] = {source: SAMPLES}
        self.operators: set[int] = set()

    def values(self) -> Samples | None:
        """The function at SAMPLES; None when something else than `source` and constants goes into it."""
        with np.errstate(all="ignore"):
            return self._result(self._root)

    def is_private(self) -> bool:
        """True when nobody else reads what is between source and result."""
        inner = [name for number in self.operators - {self._root} for name in self._draft[number].output]
        return all(
            self._draft.is_inner(name) and self.operators.issuperset(self._draft.readers(name)) for name in inner
        )

    def _result(self, number: int) -> Samples | None:
        definition = self._draft[number]
        if not _is_known(definition) or len(definition.output) != 1 or len(self.operators) > _MAX_OPERATORS:
            return None
        self.operators.add(number)
        operands = []
        for name in definition.input:
            value = self._value(name)
            if value is None:
                return None
            operands.append(value)
        arguments = self._draft.arguments(number)
        if definition.type == "Pow" and len(operands) == 1:
            operands.append(np.full_like(SAMPLES, arguments.float("exponent", 1.0)))
        if definition.type in _UNARY and len(operands) == 1:
            return _UNARY[definition.type](arguments, operands[0])
        if definition.type in _BINARY and len(operands) == 2:
            return _BINARY[definition.type](*operands)
        return None

    def _value(self, name: str) -> Samples | None:
        if name not in self._known:
            array = self._draft.constant(name)
            writer = self._draft.producer(name)
            if array is not None:
                if array.size != 1 or array.dtype.kind != "f":
                    return None
                self._known[name] = np.full_like(SAMPLES, float(array.reshape(-1)[0]))
            elif writer is None or (value := self._result(writer)) is None:
                return None
            else:
                self._known[name] = value
        return self._known[name]


PASS = Pass("activation-patterns", "Activations that a model spells out become one operator.", apply)
