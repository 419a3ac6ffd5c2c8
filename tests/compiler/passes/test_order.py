"""The order of the passes: for each that needs another before it, a net on which they find less the other way around.

A case names two passes, the first of which has to come first, and what becomes of its net. In an order that does not
keep them so the case fails. Neighbors in the catalog that no case orders, through others or not, are listed: they
may change places. So whoever adds a pass says by a case what it needs or makes room for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import networkx
import numpy as np
import pytest

from dagexec.compiler.compilation import PASSES
from dagexec.compiler.passes import Pass, run_passes
from dagexec.compiler.passes.layout import LAYOUT, layout_pass
from dagexec.core.model import Model
from dagexec.core.proto import OperatorDef
from tests.compiler.passes.models import Array, model_of, op
from tests.compiler.passes.test_activation_patterns import NUMBERS, PATTERNS
from tests.compiler.passes.test_attention import END, KEYS_TURNED, PRODUCT, SHAPES, SOFTMAX
from tests.compiler.passes.test_quantized_operators import CONV, DQ_W, INPUT, OUTPUT, A, W, Y
from tests.ops.onednn.engine import needs_onednn

ORDER = tuple(layout_pass("NHWC") if step is LAYOUT else step for step in PASSES)
NAMES = [step.name + " again" * (step in ORDER[:place]) for place, step in enumerate(ORDER)]

Shapes = Mapping[str, tuple[int | None, ...]]
IMAGE, ONE_IMAGE, MATRIX, ROWS = {"x": (2, 4, 6, 6)}, {"x": (1, 4, 6, 6)}, {"x": (2, 6)}, {"x": (None, 5, 6)}

_random = np.random.default_rng(3)
CONSTANTS: dict[str, Array] = {
    **{name: number for name, number in NUMBERS.items() if name in ("half", "one", "root2")},
    "zero": np.array(0, np.float32), "mask": np.ones((1, 1, 1, 1), np.float32),
    "ones": np.array([1]), "zeros": np.array([0]),
    **{name: np.abs(_random.standard_normal(shape)).astype(np.float32) for name, shape in (
        ("w", (4, 4, 1, 1)), ("b", 4), ("scale", 4), ("shift", 4), ("mean", 4), ("variance", 4), ("scale8", 8),
        ("shift8", 8), ("mean8", 8), ("variance8", 8), ("channel", (4, 1, 1)), ("f", (6, 6)), ("g", 6),
        ("w16", (16, 1, 1, 1)), ("v16", (16, 1, 1, 1)), ("b16", 16),
    )},
}  # fmt: skip


def conv(x: str, y: str) -> OperatorDef:
    return op("Conv", [x, "w", "b"], [y], kernel=1)


def fc(x: str, y: str) -> OperatorDef:
    return op("FC", [x, "f", "g"], [y])


def one(kind: str, x: str, y: str, **arguments: int) -> OperatorDef:
    return op(kind, [x], [y], **arguments)


def joined(a: str, b: str) -> OperatorDef:
    return op("Concat", [a, b], ["joined", "sizes"], axis=1)


def merged(*layer: OperatorDef) -> list[OperatorDef]:
    """A layer between reshapes: from r to c."""
    return [op("Reshape", ["x"], ["r"], shape=[-1, 6]), *layer, op("Reshape", ["l"], ["c"], shape=[-1, 5, 6])]


TWO_LAYERS = [conv("x", "a"), one("Tanh", "x", "t"), conv("t", "c"), joined("a", "c")]


class Case(NamedTuple):
    """Operators, the last of which gives the output, and the types of those that all passes make of them."""

    first: str
    second: str
    operators: Sequence[OperatorDef]
    result: str
    inputs: Shapes = IMAGE
    parameters: Mapping[str, Array] = CONSTANTS

    def model(self) -> Model:
        made = {name for definition in self.operators for name in definition.output}
        read = {name for definition in self.operators for name in definition.input}.difference(made, self.inputs)
        parameters = {name: self.parameters[name] for name in sorted(read)}
        return model_of(self.operators, self.operators[-1].output[0], self.inputs, **parameters)


CASES = [
    Case("single-assignment", "constant-folding", [
        op("Mul", ["channel", "half"], ["c"]), op("Add", ["c", "half"], ["c"]), op("Add", ["x", "c"], ["y"]),
    ], "Add+"),
    Case("quantized-operators", "constant-folding", [
        *INPUT, DQ_W, CONV, *OUTPUT,
    ], "QuantizeLinear+ QuantConv+ DequantizeLinear+", IMAGE, {**A, **W, **Y}),
    Case("constant-folding", "inner-products", [
        op("Transpose", ["f"], ["t"]), op("MatMul", ["x", "t"], ["y"]),
    ], "FC+", MATRIX),
    Case("identities", "dead-code", [
        one("Shape", "x", "s"), op("Mul", ["s", "ones"], ["t"]), op("Add", ["t", "zeros"], ["u"]),
        op("Reshape", ["x", "u"], ["r", "old"]), one("Sqr", "r", "y"),
    ], "Sqr+", {"x": (None, 3)}),
    Case("identities", "channel-shuffle", [
        op("Reshape", ["x"], ["a"], shape=[2, 2, 2, 6, 6]), one("Dropout", "a", "d", is_test=1),
        op("Transpose", ["d"], ["t"], axes=[0, 2, 1, 3, 4]), op("Reshape", ["t"], ["y"], shape=[2, 4, 6, 6]),
    ], "ChannelShuffle+"),
    Case("dead-code", "common-subexpressions", [
        op("Concat", ["x", "x"], ["a"], axis=1), op("Concat", ["x", "x"], ["c", "sizes"], axis=1),
        op("Add", ["a", "c"], ["y"]),
    ], "Concat+ Add+"),
    Case("common-subexpressions", "attention", [
        *KEYS_TURNED, op("BatchMatMul", ["qh", "kh"], ["s"], broadcast=1), one("Softmax", "s", "m", axis=3),
        one("Softmax", "s", "again", axis=3), op("NE", ["m", "again"], ["n"]), op("Where", ["n", "zero", "m"], ["w"]),
        *END,
    ], "Reshape Reshape Reshape FusedAttention+ Reshape", SHAPES),
    Case("common-subexpressions", "activation-patterns", [
        one("Tanh", "x", "a"), one("Tanh", "x", "c"), one("Sigmoid", "a", "s"), op("Mul", ["c", "s"], ["y"]),
    ], "FusedElementwise+"),
    Case("common-subexpressions", "residual-fusion", [
        conv("x", "a"), conv("x", "c"), op("Add", ["a", "c"], ["y"]),
    ], "FusedConv+ Add+"),
    Case("attention", "elementwise-fusion", [
        *KEYS_TURNED, PRODUCT, op("Mul", ["p", "half"], ["a"]), op("Add", ["a", "mask"], ["s"]), SOFTMAX, *END,
    ], "Reshape Reshape Reshape FusedAttention+ Reshape", SHAPES),
    Case("attention", "expression-fusion", [
        *KEYS_TURNED, PRODUCT, op("Mul", ["p", "half"], ["s"]), SOFTMAX, *END,
    ], "Reshape Reshape Reshape FusedAttention+ Reshape", SHAPES),
    Case("inner-products", "leading-axes", merged(op("MatMul", ["r", "f"], ["l"])), "FC+", ROWS),
    Case("leading-axes", "before-concat", [
        *merged(fc("r", "l")), op("Concat", ["c", "x"], ["j", "sizes"], axis=2), one("Relu", "j", "y"),
    ], "FusedFC+ Relu+ Concat+", ROWS),
    Case("leading-axes", "batch-norm-folding", [*merged(fc("r", "l")), op("Add", ["c", "g"], ["y"])], "FC+", ROWS),
    Case("global-pooling", "before-concat", [
        one("Relu", "x", "r"), op("ReduceMean", ["r"], ["a"], axes=[2, 3], keepdims=1),
        one("AveragePool", "x", "p", global_pooling=1), conv("p", "c"), joined("a", "c"), one("Relu", "joined", "y"),
    ], "Relu+ AveragePool+ AveragePool+ FusedConv+ Concat+"),
    Case("activation-patterns", "before-concat", [
        *TWO_LAYERS, one("Sigmoid", "joined", "s"), op("Mul", ["joined", "s"], ["y"]),
    ], "Tanh+ FusedConv+ FusedConv+ Concat+"),
    Case("activation-patterns", "batch-norm-folding", [
        fc("u", "x"), *PATTERNS["Gelu"], fc("y", "z"),
    ], "FusedFC+ FC+", {"u": (2, 6)}),
    Case("activation-patterns", "elementwise-fusion", [
        one("Tanh", "x", "a"), one("Sigmoid", "a", "s"), op("Mul", ["a", "s"], ["y"]),
    ], "FusedElementwise+"),
    Case("before-concat", "batch-norm-folding", [
        *TWO_LAYERS, op("SpatialBN", ["joined", "scale8", "shift8", "mean8", "variance8"], ["y"], is_test=1),
    ], "Tanh+ FusedConv+ FusedConv+ Concat+"),
    Case("batch-norm-folding", "activation-fusion", [
        one("Relu", "x", "r"), fc("r", "a"), op("Mul", ["a", "g"], ["c"]), one("Tanh", "c", "t"), fc("t", "d"),
        op("Add", ["d", "r"], ["y"]),
    ], "Relu+ FusedFC+ FusedFC+", MATRIX),
    Case("batch-norm-folding", "residual-fusion", [
        one("Relu", "x", "r"), conv("x", "a"), op("SpatialBN", ["a", "scale", "shift", "mean", "variance"], ["c"],
        is_test=1), op("Add", ["c", "r"], ["y"]),
    ], "Relu+ FusedConv+"),
    Case("convolution-sums", "channel-multiplier", [
        op("Conv", ["x8", "w16", "b16"], ["a"], group=8, kernel=1), op("Conv", ["x8", "v16"], ["c"], group=8, kernel=1),
        op("Add", ["a", "c"], ["y"]),
    ], "Conv+ Conv+ Concat+ ChannelShuffle+", {"x8": (2, 8, 4, 4)}),
    Case("convolution-sums", "residual-fusion", [
        conv("x", "a"), op("SpatialBN", ["x", "scale", "shift", "mean", "variance"], ["c"], is_test=1),
        op("Add", ["a", "c"], ["s"]), one("Relu", "s", "y"),
    ], "FusedConv+"),
    Case("activation-fusion", "residual-fusion", [
        one("Relu", "x", "r"), fc("r", "a"), one("Tanh", "a", "t"), fc("t", "d"), op("Add", ["d", "r"], ["y"]),
    ], "Relu+ FusedFC+ FusedFC+", MATRIX),
    Case("residual-fusion", "elementwise-fusion", [
        one("Relu", "x", "r"), conv("x", "a"), op("Add", ["a", "r"], ["c"]), one("Tanh", "c", "y"),
    ], "Relu+ FusedConv+"),
    Case("elementwise-fusion", "in-place", [
        one("Softmax", "x", "s", axis=0, single_axis=1), one("Tanh", "s", "t"), one("Relu", "t", "y"),
    ], "Softmax+ FusedElementwise+", MATRIX),
    Case("channel-shuffle", "layout", [
        conv("x", "a"), op("Reshape", ["a"], ["c"], shape=[2, 2, 2, 6, 6]),
        op("Transpose", ["c"], ["t"], axes=[0, 2, 1, 3, 4]), op("Reshape", ["t"], ["d"], shape=[2, 4, 6, 6]),
        conv("d", "y"),
    ], "FusedConv+ ChannelShuffle+ Conv+"),
    Case("elementwise-fusion", "expression-fusion", [one("Tanh", "x", "t"), one("Relu", "t", "y")],
         "FusedElementwise+", MATRIX),
    Case("expression-fusion", "in-place", [
        one("Softmax", "x", "s", axis=0, single_axis=1), one("Tanh", "s", "a"), one("Sigmoid", "s", "c"),
        op("Mul", ["a", "c"], ["y"]),
    ], "Softmax+ FusedExpression+", MATRIX),
    Case("expression-fusion", "engine", [
        one("Tanh", "x", "a"), one("Sigmoid", "x", "c"), op("Mul", ["a", "c"], ["y"]),
    ], "FusedExpression+", MATRIX),
    Case("elementwise-fusion", "engine", [one("Tanh", "x", "t"), one("Relu", "t", "y")], "FusedElementwise+"),
    Case("engine", "layout", [conv("x", "y")], "FusedConv+"),
    Case("layout", "identities again", [
        op("Transpose", ["x"], ["t"], axes=[0, 3, 1, 2]), conv("t", "a"), op("Transpose", ["a"], ["y"],
        axes=[0, 2, 3, 1]),
    ], "Conv+", {"x": (2, 6, 6, 4)}),
    Case("layout", "zero-copy", [
        conv("x", "a"), conv("a", "c"), joined("a", "c"), one("MaxPool", "joined", "y", kernel=2),
    ], "FusedConv+ Conv+ Concat+ MaxPool+", ONE_IMAGE),
]  # fmt: skip

LOOSE = {
    ("common-subexpressions", "embedding-bags"), ("embedding-bags", "slice-indices"), ("slice-indices", "attention"),
    ("single-assignment", "quantized-operators"), ("constant-folding", "identities"), ("attention", "inner-products"),
    ("leading-axes", "global-pooling"), ("global-pooling", "activation-patterns"),
    ("batch-norm-folding", "before-resize"), ("before-resize", "channel-shuffle"),
    ("channel-shuffle", "convolution-sums"), ("channel-multiplier", "activation-fusion"),
    ("engine", "padded-rows"), ("padded-rows", "bodies"),
    ("bodies", "layout"), ("identities again", "zero-copy"), ("zero-copy", "in-place"), ("in-place", "dead-code again"),
}  # fmt: skip
"""Neighbors that may change places."""


def result(model: Model, order: Sequence[Pass]) -> str:
    """What is left of a model but for Reorders: operator types, + where oneDNN computes, * where nothing is copied."""
    made = [one for one in run_passes(model, order).model.program.op if one.type != "Reorder"]
    return " ".join(one.type + "+" * bool(one.engine) + "*" * one.arguments().bool("zero_copy") for one in made)


@needs_onednn
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.first}, {case.second}")
def test_a_pass_comes_after_what_it_needs(case: Case) -> None:
    model = case.model()
    assert result(model, ORDER) == case.result
    first, second = NAMES.index(case.first), NAMES.index(case.second)
    assert first < second
    before, between, after = ORDER[:first], ORDER[first + 1 : second], ORDER[second + 1 :]
    assert result(model, (*before, *between, ORDER[second], ORDER[first], *after)) != case.result
    assert result(model, (*before, ORDER[second], ORDER[first], *between, *after)) != case.result


def test_neighbors_that_no_case_orders_are_listed() -> None:
    graph = networkx.DiGraph([(case.first, case.second) for case in CASES])
    assert set(graph) <= set(NAMES)
    ordered = {(first, second) for first in graph for second in networkx.descendants(graph, first)}
    assert set(pairwise(NAMES)) - ordered == LOOSE
