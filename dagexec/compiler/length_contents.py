"""Contents of blobs that follow from the length of a decoder's caches, as far as they are told before a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.core.dtypes import INT64
from dagexec.core.evaluation import evaluated
from dagexec.core.node import Node
from dagexec.core.registry import schema_of
from dagexec.core.schema import OperatorCall, TensorType
from dagexec.platform.records import dataclass

Array = npt.NDArray[Any]

MOST_ELEMENTS = 1 << 17
"""Of contents that are followed."""

_LINEAR = frozenset(("Add", "Sub", "Concat", "ExpandDims", "Squeeze", "Transpose", "Copy"))
"""Operators of which outputs are sums as inputs are."""

_LINEAR_IN_FIRST = frozenset(("Gather", "Slice", "Reshape", "Cast"))
"""The same of input 0."""


@dataclass(frozen=True)
class Sum:
    """Numbers that follow from the length: base + slope * length."""

    base: Array
    slope: Array

    @property
    def is_constant(self) -> bool:
        """They do not."""
        return not self.slope.any()

    def at(self, length: int) -> Array:
        """Them for a length."""
        result: Array = self.base + self.slope * length
        return result


def constant(array: Array) -> Sum:
    """Numbers that are the same at every length."""
    return Sum(array, np.zeros(array.shape, np.int64))


def contents_after(
    node: Node, inputs: Sequence[tuple[TensorType, Sum | None]], types: Sequence[TensorType]
) -> Sequence[Sum | None]:
    """The outputs' elements, where they follow from the length alone, for those of the inputs; `types` are theirs."""
    schema, nothing = schema_of(node.type), [None] * len(types)
    if any(kind.elements > MOST_ELEMENTS or kind.meta.numpy.kind not in "iub" for kind in types):
        return nothing
    if schema.from_types is not None:
        call = OperatorCall(node, node.arguments(node.type), (inputs[0][0],), (None,), node.type)
        return [constant(np.asarray(array)) for array in schema.from_types(call)]
    known = [content for _, content in inputs if content is not None]
    if len(known) < len(inputs) or schema.effects:
        return nothing
    varying = [one for one in known if not one.is_constant]
    bases = [one.base for one in known]
    if not varying:
        return [constant(base) for base in _evaluated(node, bases)] or nothing
    if node.type == "EQ":
        return [_are_equal(*known)]
    if node.type == "Where" and known[0].is_constant:
        _, one, other = known
        return [Sum(np.where(bases[0], one.base, other.base), np.where(bases[0], one.slope, other.slope))]
    if node.type in _LINEAR:
        slopes = [one.slope for one in known]
    elif len(varying) == 1 and (node.type == "Mul" or (node.type in _LINEAR_IN_FIRST and varying[0] is known[0])):
        slopes = [one.base if one.is_constant else one.slope for one in known]
    else:
        return nothing
    if types[0].meta is not INT64:
        return nothing
    return [Sum(*pair) for pair in zip(_evaluated(node, bases), _evaluated(node, slopes), strict=True)] or nothing


def _are_equal(one: Sum, other: Sum) -> Sum | None:
    """Whether sums are the same number; None where that is so at some lengths alone."""
    base, slope = np.broadcast_arrays(one.base - other.base, one.slope - other.slope)
    never = (base * slope >= 0) & (base != 0)
    if not (never | ((base == 0) & (slope == 0))).all():
        return None
    return constant(~never)


@dataclass(frozen=True)
class Domain:
    """What elements may be, each of which is a function of the element of a sum in its place.

    Attributes:
        of: the sum.
        values: the function, of each number from the least to the greatest that the sum may have.
    """

    of: Sum
    values: Array

    @classmethod
    def all(cls, of: Sum, length: int) -> Domain | None:
        """The numbers of a sum themselves, for lengths up to `length`; None for too many."""
        ends = np.stack((of.base, of.at(length)))
        low, high = (int(ends.min()), int(ends.max())) if ends.size else (0, 0)
        return cls(of, np.arange(low, high + 1)) if high - low < MOST_ELEMENTS else None

    @classmethod
    def after(cls, node: Node, inputs: Sequence[Domain | Array]) -> Domain | None:
        """Those of an element-wise operator over domains of one sum, and numbers that are the same everywhere."""
        domains = [one for one in inputs if isinstance(one, Domain)]
        if not domains or any(one.of is not domains[0].of for one in domains):
            return None
        arrays = [one.values if isinstance(one, Domain) else one.reshape(-1)[:1] for one in inputs]
        values = _evaluated(node, arrays)
        return cls(domains[0].of, values[0]) if values else None


def _evaluated(node: Node, arrays: Sequence[Array]) -> list[Array]:
    """The outputs of an operator; none where it fails."""
    inputs = [f"in{index}" for index in range(len(node.input))]
    outputs = [f"out{index}" for index in range(len(node.output))]
    one = Node(node.type, inputs, outputs, node.values, engine=node.engine)
    try:
        return evaluated(one, dict(zip(inputs, arrays, strict=True)))
    except Exception:  # whatever an operator raises
        return []
