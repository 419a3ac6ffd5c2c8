"""root-mean-square: the operators that a root mean square normalization is spelled with become one.

X / sqrt(mean of X^2 + epsilon) * scale over the last axis, of Zhang and Sennrich 2019, arXiv:1910.07467, as LLaMA, T5
and their exporters write it: a square by Pow, Sqr or Mul; the inverse root by Rsqrt, or Sqrt with a quotient.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dagexec.compiler.passes.draft import Draft
from dagexec.compiler.passes.operator_traits import is_product_or_quotient, of_type
from dagexec.compiler.passes.post_operations import Types
from dagexec.compiler.passes.rewriting import Pass
from dagexec.core.dtypes import FLOAT32, FLOAT64
from dagexec.core.node import new_node
from dagexec.platform.records import dataclass

_MEAN = "ReduceMean"


@dataclass(frozen=True)
class _Normalization:
    """What a product or quotient normalizes.

    Attributes:
        source: the blob.
        epsilon: what is added to the mean square.
        members: the operators before the product or quotient, from the last one on.
    """

    source: str
    epsilon: float
    members: Sequence[int]


def edit(draft: Draft) -> None:
    """Look before each product and quotient for the mean of squares by which it normalizes."""
    types = draft.types()
    for number in draft.having(is_product_or_quotient):
        if number in draft and draft[number].type in ("Mul", "Div") and draft.is_free(number):
            found = _normalization(draft, number, types)
            if found is not None:
                _rewrite(draft, number, found, types)


def _rewrite(draft: Draft, number: int, found: _Normalization, types: Types) -> None:
    """Put one operator in the place of all, with the scale that comes behind them, or with ones."""
    meta, size = types[found.source].meta, types[found.source].shapes[0][-1]
    normalized, last, scale = draft[number].output[0], number, np.ones(size, meta.numpy)
    name = ""
    behind = draft.only_reader(normalized)
    if behind is not None and draft[behind].type == "Mul":
        for other in draft[behind].input:
            array = draft.constant(other)
            if array is not None and array.shape[-1:] == (size,) == array.shape and array.dtype == meta.numpy:
                last, name = behind, other
    result = draft[last].output[0]
    members = {number, *found.members, last}
    draft.changed(f"{len(members)} operators up to {draft.label(last)} are RootMeanSquareNorm")
    name = name or draft.add_parameter(f"{result}/ones", scale)
    norm = new_node(
        "RootMeanSquareNorm", [found.source, name], [result], name=draft[last].name, axis=-1, epsilon=found.epsilon
    )
    draft.replace(last, norm)
    for member in members - {last}:
        draft.remove(member)


def _normalization(draft: Draft, number: int, types: Types) -> _Normalization | None:
    """What operator `number` normalizes; None when it does something else."""
    left, right = draft[number].input
    for source, factor in ((left, right), (right, left)) if draft[number].type == "Mul" else ((left, right),):
        kind = types.get(source)
        if kind is None or not kind.rank or kind.shape[-1] is None or kind.meta not in (FLOAT32, FLOAT64):
            continue
        found = _Chain(draft, factor)
        if found.root(is_inverse=draft[number].type == "Mul") and found.epsilon() and found.mean_of(source, kind.rank):
            return _Normalization(source, found.added, found.members)
    return None


class _Chain:
    """Operators from a blob back, each the only reader of the one before; `members` are those passed so far."""

    def __init__(self, draft: Draft, name: str) -> None:
        self._draft = draft
        self._name = name
        self.members: list[int] = []
        self.added = 0.0

    def _type(self) -> str:
        """The type of the operator that writes the blob for one reader alone; '' for none such."""
        number = self._draft.producer(self._name)
        if number is None or self._draft.only_reader(self._name) is None or len(self._draft[number].output) != 1:
            return ""
        return self._draft[number].type

    def _pass(self, place: int = 0) -> None:
        number = self._draft.producer(self._name)
        assert number is not None
        self.members.append(number)
        self._name = self._draft[number].input[place]

    def _inputs(self) -> list[str]:
        number = self._draft.producer(self._name)
        return [] if number is None else list(self._draft[number].input)

    def _exponent(self) -> float | None:
        """That of a Pow, which is an argument or a constant."""
        number = self._draft.producer(self._name)
        if number is None or self._type() != "Pow":
            return None
        inputs = self._inputs()
        return (
            _number(self._draft, inputs[1]) if len(inputs) > 1 else self._draft.arguments(number).float("exponent", 1)
        )

    def root(self, *, is_inverse: bool) -> bool:
        """Passes a square root, or its inverse."""
        if self._exponent() == (-0.5 if is_inverse else 0.5) or self._type() == ("Rsqrt" if is_inverse else "Sqrt"):
            self._pass()
            return True
        if not is_inverse:
            return False
        if self._type() == "Reciprocal":
            self._pass()
        elif self._type() == "Div" and _number(self._draft, self._inputs()[0]) == 1:
            self._pass(1)
        else:
            return False
        return self.root(is_inverse=False)

    def epsilon(self) -> bool:
        """Passes a sum with a number, which is `added`."""
        if self._type() != "Add":
            return False
        for place, name in enumerate(self._inputs()):
            value = _number(self._draft, name)
            if value is not None and value >= 0:
                self.added = value
                self._pass(1 - place)
                return True
        return False

    def mean_of(self, source: str, rank: int) -> bool:
        """Passes the mean over the last axis, which stays, of the squares of `source`."""
        if self._type() != _MEAN:
            return False
        self._pass()
        arguments = self._draft.arguments(self.members[-1])
        axes, keeps = [axis % rank for axis in arguments.ints("axes")], arguments.int("keepdims", 1)
        if axes != [rank - 1] or not keeps:
            return False
        is_square = self._type() == "Sqr" or (self._type() == "Mul" and self._inputs() == [source, source])
        if not is_square and self._exponent() != 2:
            return False
        self._pass()
        return self._name == source


def _number(draft: Draft, name: str) -> float | None:
    """The value of a constant of one element."""
    array = draft.constant(name)
    return float(array.reshape(-1)[0]) if array is not None and array.size == 1 else None


PASS = Pass(
    "root-mean-square",
    "Squares, means and roots that spell a normalization become one operator.",
    edit,
    needs=(is_product_or_quotient, of_type(_MEAN)),
)
