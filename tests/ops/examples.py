"""Examples of inputs for each operator, which the tests share that hold for all operators (`test_every_operator`).

They are the cases of rows, the examples of gradients, and the gradient operators that follow from these.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np

from dagexec import Workspace
from dagexec.core.gradient import gradient
from dagexec.core.proto import OperatorDef
from dagexec.core.registry import create_operator, schema_of
from dagexec.platform.arithmetic import operator_arithmetic
from tests.ops import gradient_examples
from tests.ops.pieces import cut_into
from tests.ops.running import Array, operator_def
from tests.rows.case import Case
from tests.rows.operators import operator_cases

LARGEST = 6000
"""Elements a row: a case with more is left out where its operator has smaller ones."""

FLOATS = (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)


@dataclass(frozen=True)
class Example:
    """An operator on arrays.

    Attributes:
        definition: reads x0, x1, ..., and writes y0, y1, ..., or over an input where the schema has it so.
        constant: the inputs that no run changes.
    """

    definition: OperatorDef
    inputs: Sequence[Array]
    constant: tuple[int, ...] = ()

    @classmethod
    def of(cls, definition: OperatorDef, inputs: Sequence[Array], constant: tuple[int, ...] = ()) -> Example:
        """An operator whose blobs have any names."""
        named = OperatorDef()
        named.CopyFrom(definition)
        named.input[:] = [f"x{index}" for index in range(len(inputs))]
        named.output[:] = [f"y{index}" for index in range(len(definition.output))]
        for i, o in schema_of(definition.type).enforced_inplace:
            if o < len(named.output):
                named.output[o] = named.input[i]
        return cls(named, inputs, constant)

    def __str__(self) -> str:
        shapes = ", ".join(f"{array.dtype}{list(array.shape)}" for array in self.inputs)
        return f"{str(self.definition)[:500]} on {shapes}"

    @property
    def is_of_floats(self) -> bool:
        """True when an input is of floats."""
        return any(array.dtype in FLOATS for array in self.inputs)

    def in_place(self, source: int, target: int) -> Example:
        """Output `target` has the name of input `source`."""
        named = OperatorDef()
        named.CopyFrom(self.definition)
        named.output[target] = named.input[source]
        return replace(self, definition=named)

    def run(self, engine: str = "", pieces: int = 0) -> list[Array]:
        """The outputs, computed in so many pieces if `pieces` is not 0."""
        definition, workspace = OperatorDef(), Workspace()
        definition.CopyFrom(self.definition)
        definition.engine = engine
        for name, array in zip(definition.input, self.inputs, strict=True):
            workspace.feed_blob(name, array)
        for index in self.constant:
            workspace.get_blob(definition.input[index]).tensor().freeze()
        operator = create_operator(definition, workspace)
        with cut_into(pieces):
            step = operator.bind(operator.infer())
        with operator_arithmetic():
            step()
        return [workspace.fetch_blob(name) for name in definition.output]

    def of_type(self, dtype: Any) -> Example:
        """The same with all floats of another type."""
        return replace(self, inputs=[one.astype(dtype) if one.dtype in FLOATS else one for one in self.inputs])


def of_case(case: Case, rows: int) -> Example:
    """A case of rows with so many of them."""
    named = [(f"x{index}", given) for index, given in enumerate(case.inputs)]
    if rows:
        arrays = [given.of_examples([] if given.is_constant else range(rows), name) for name, given in named]
    else:
        arrays = [
            array if given.axis is None else np.take(array, [], given.axis)
            for (name, given) in named
            for array in [given.of_examples([0], name)]
        ]
    constant = tuple(index for index, given in enumerate(case.inputs) if given.is_constant)
    definition = operator_def(case.op_type, [name for name, _ in named], ["y"] * case.outputs, **case.arguments)
    return Example.of(definition, arrays, constant)


def _elements(case: Case) -> int:
    return sum(math.prod(given.shape) for given in case.inputs)


@cache
def cases() -> Mapping[str, Sequence[Case]]:
    """The cases of rows, by type, without those that need the application."""
    found: dict[str, list[Case]] = {}
    for case in sorted(operator_cases(), key=_elements):
        if not schema_of(case.op_type).calls_application:
            several = found.setdefault(case.op_type, [])
            if not several or _elements(case) <= LARGEST:
                several.append(case)
    return found


def _of_gradients() -> Iterator[Example]:
    """The examples of gradients, in float64, and the operators of their gradients on what the former gives."""
    for op_type, several in gradient_examples.examples().items():
        for one in several:
            definition = operator_def(op_type, ["x"] * len(one.inputs), ["y"] * one.outputs, **one.arguments)
            forward = Example.of(definition, one.inputs)
            yield forward
            yield from gradient_operators(forward, one.wanted, one.statistics)


def gradient_operators(
    forward: Example, wanted: Sequence[int] | None = None, statistics: Sequence[int] = ()
) -> Iterator[Example]:
    """The gradient operators of `forward`, on what a run leaves in its blobs."""
    blobs = dict(zip(forward.definition.input, forward.inputs, strict=True))
    blobs |= dict(zip(forward.definition.output, forward.run(), strict=True))
    slopes: list[str | None] = []
    for index, name in enumerate(forward.definition.output):
        y = blobs[name]
        is_weighted = y.dtype in FLOATS and index not in statistics
        slopes.append(f"{name}_grad" if is_weighted else None)
        blobs[f"{name}_grad"] = np.cos(np.arange(y.size)).reshape(y.shape).astype(y.dtype)
    positions = [i for i, array in enumerate(forward.inputs) if array.dtype in FLOATS] if wanted is None else wanted
    for made in gradient(forward.definition, slopes, wanted=positions).operators:
        one = Example.of(made, [np.array(blobs[name]) for name in made.input])
        yield one
        blobs |= dict(zip(made.output, one.run(), strict=True))


@cache
def examples() -> Mapping[str, Sequence[Example]]:
    """All, by operator type: of three rows each where there are rows."""
    found: dict[str, list[Example]] = {}
    for several in cases().values():
        for case in several:
            found.setdefault(case.op_type, []).append(of_case(case, 3))
    for one in _of_gradients():
        found.setdefault(one.definition.type, []).append(one)
    return found
