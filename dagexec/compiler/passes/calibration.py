"""Calibration: in which range each value of a model lies over sample inputs, and what 8 bits lose there.

A range, from the least to the largest value, gives the scale and zero point of a value (`ValueRange.parameters`).
Weights have a scale for each output channel, symmetric about 0.

The model is run operator by operator on the host, in list order; `dagexec.compiler.passes.low_precision` uses what is
found here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.core.feeds import Feeds, check_feeds
from dagexec.core.model import Model
from dagexec.core.node import Node
from dagexec.core.operator import Step
from dagexec.core.registry import create_operator, registered_engines
from dagexec.core.tensor import Tensor
from dagexec.core.workspace import Workspace
from dagexec.errors import FeedError
from dagexec.platform.records import dataclass

Array = npt.NDArray[Any]
Visit = Callable[[int, Node, Sequence[Array], Sequence[Array]], object]
"""Is told the index of an operator, its definition, its inputs and its outputs; it must not keep the arrays."""

LEVELS = 255
"""Steps between the least and the largest 8-bit integer."""


@dataclass(frozen=True, slots=True)
class ValueRange:
    """The least and the largest value that are represented; 0 lies between them."""

    low: float
    high: float

    def union(self, other: ValueRange) -> ValueRange:
        """The range that holds both."""
        return ValueRange(min(self.low, other.low), max(self.high, other.high))

    def parameters(self) -> tuple[np.float32, np.uint8]:
        """Scale and zero point for uint8: 0 is exact, and the ends of the range are within half a step.

        Jacob et al. 2018, arXiv:1712.05877, section 3. A range of nothing but 0 has scale 1.
        """
        low, high = min(self.low, 0.0), max(self.high, 0.0)
        scale = np.float32((high - low) / LEVELS)
        if not scale >= np.finfo(np.float32).tiny:
            return np.float32(1), np.uint8(0)
        return scale, np.uint8(round(-low / float(scale)))


def calibrate(model: Model, feeds: Sequence[Feeds], names: Collection[str]) -> dict[str, ValueRange]:
    """The ranges of the float blobs `names` of `model` over `feeds`, each the inputs of one run.

    Parameters must be arrays already (no init net). Raises FeedError without feeds, for values that are not finite,
    and for a blob that no run has, and what running the model raises.
    """
    if not feeds:
        raise FeedError(f"model {model.name!r}: int8 needs sample inputs for calibration; found none")
    wanted = frozenset(names)
    ranges = _extremes(model, feeds, wanted)
    missing = sorted(wanted - ranges.keys())
    if missing:
        raise FeedError(f"model {model.name!r}: no calibration run produced {', '.join(map(repr, missing))}")
    return ranges


def run_each(model: Model, feeds: Sequence[Feeds], visit: Visit) -> None:
    """Run the operators of `model` one by one on each of `feeds`, telling `visit` of each operator after it ran.

    Operators that oneDNN can compute are computed by it, where it is there. Raises FeedError for inputs that do not
    fit the model, and what preparing and running the operators raises.
    """
    prepared: list[_Prepared] = []
    held: dict[str, Array] = {}
    for sample in feeds:
        inputs = check_feeds(model, sample, model.needed_inputs())
        if {name: (array.shape, array.dtype) for name, array in held.items()} != {
            name: (array.shape, array.dtype) for name, array in inputs.items()
        }:
            held = {name: array.copy() for name, array in inputs.items()}
            prepared = _run_first(model, held, visit)
            continue
        for name, array in inputs.items():
            np.copyto(held[name], array)
        for index, one in enumerate(prepared):
            one.run(index, visit)


@dataclass(frozen=True)
class _Prepared:
    """An operator that is ready to run on arrays that stay."""

    definition: Node
    step: Step
    inputs: tuple[Array, ...]
    outputs: tuple[Array, ...]

    def run(self, index: int, visit: Visit) -> None:
        """Run, and tell; inputs that are written to are told as they were before."""
        written = set(self.definition.output)
        before = [
            array.copy() if name in written else array
            for name, array in zip(self.definition.input, self.inputs, strict=True)
        ]
        self.step()
        visit(index, self.definition, before, self.outputs)


def _run_first(model: Model, inputs: Mapping[str, Array], visit: Visit) -> list[_Prepared]:
    """The operators of `model` for inputs of these sizes, each run as it is prepared."""
    workspace = Workspace(root_folder=model.folder, allow_io=model.allow_io)
    for name, array in model.parameters.items():
        workspace.adopt_blob(name, array)
        workspace.get_blob(name).tensor().freeze()
    for name, array in inputs.items():
        workspace.adopt_blob(name, array)
    prepared = []
    for index, definition in enumerate(model.program.op):
        operator = create_operator(by_onednn(definition), workspace, index=index, net=model.program.name)
        step = operator.bind(operator.infer()).step
        inputs_now, outputs = (
            tuple(_array(workspace, name) for name in names) for names in (definition.input, definition.output)
        )
        prepared.append(_Prepared(definition, step, inputs_now, outputs))
        prepared[-1].run(index, visit)
    return prepared


def by_onednn(definition: Node) -> Node:
    """`definition` with engine ONEDNN, if its type has that and it names no other."""
    if definition.engine or "ONEDNN" not in registered_engines(definition.type):
        return definition
    return definition.changed(engine="ONEDNN")


def _array(workspace: Workspace, name: str) -> Array:
    return workspace.get_blob(name).get(Tensor).array


def _observe(model: Model, feeds: Sequence[Feeds], names: Collection[str], see: Callable[[str, Array], object]) -> None:
    """Call `see` with every value of the blobs `names`: inputs as they are fed, others as they are written."""

    def visit(_index: int, definition: Node, _inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
        for name, array in zip(definition.output, outputs, strict=True):
            if name in names:
                see(name, array)

    for sample in feeds:
        for name, array in check_feeds(model, sample, model.needed_inputs()).items():
            if name in names:
                see(name, array)
    run_each(model, feeds, visit)


def _extremes(model: Model, feeds: Sequence[Feeds], names: Collection[str]) -> dict[str, ValueRange]:
    ranges: dict[str, ValueRange] = {}

    def see(name: str, array: Array) -> None:
        low, high = (float(array.min()), float(array.max())) if array.size else (0.0, 0.0)
        if not (np.isfinite(low) and np.isfinite(high)):
            raise FeedError(f"model {model.name!r}: blob {name!r} is not finite in a calibration run")
        found = ValueRange(min(low, 0.0), max(high, 0.0))
        ranges[name] = found.union(ranges[name]) if name in ranges else found

    _observe(model, feeds, names, see)
    return ranges


def quantized_weights(weights: Array) -> tuple[Array, npt.NDArray[np.float32]]:
    """int8 weights, symmetric about 0 in each row of axis 0, and a scale for each: |q| <= 127. Rows of zeros have 1."""
    largest = np.abs(weights.reshape(len(weights), -1)).max(axis=1, initial=0.0)
    scales = (largest / 127).astype(np.float32)
    scales[~(scales >= np.finfo(np.float32).tiny)] = 1
    spread = scales.reshape(-1, *(1,) * (weights.ndim - 1))
    return np.clip(np.rint(weights / spread), -127, 127).astype(np.int8), scales


def fake_quantized(values: Array, span: ValueRange) -> npt.NDArray[np.float32]:
    """What is left of float values after they were uint8 of a range."""
    scale, zero = span.parameters()
    integers = np.clip(np.rint(values / scale) + np.float32(zero), 0, LEVELS)
    return ((integers - np.float32(zero)) * scale).astype(np.float32)


def fake_quantized_weights(weights: Array) -> npt.NDArray[np.float32]:
    """What is left of float weights after they were int8 with a scale a row."""
    integers, scales = quantized_weights(weights)
    return integers * scales.reshape(-1, *(1,) * (weights.ndim - 1))
