"""activation-patterns: activations spelled out."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dagexec.compiler.passes import run_passes
from dagexec.compiler.passes.activation_patterns import PASS
from dagexec.compiler.passes.catalog import GRAPH_PASSES
from dagexec.core.proto import OperatorDef
from tests.compiler.passes.models import Array, model_of, normal, op, rewritten, unchanged


def number(value: float) -> Array:
    return np.array(value, np.float32)


ROOT = math.sqrt(2 / math.pi)
NUMBERS = {
    "half": number(0.5), "one": number(1), "root2": number(math.sqrt(2)), "three": number(3), "six": number(6),
    "c": number(0.044715), "r": number(ROOT), "p3": number(3), "sixth": number(1 / 6), "minus": number(-1),
}  # fmt: skip
GELU = [
    op("Div", ["x", "root2"], ["a"]),
    op("Erf", ["a"], ["b"]),
    op("Add", ["b", "one"], ["d"]),
]
PATTERNS = {
    "Swish": [op("Sigmoid", ["x"], ["a"]), op("Mul", ["x", "a"], ["y"])],
    "Swish by exp": [
        op("Negative", ["x"], ["a"]),
        op("Exp", ["a"], ["b"]),
        op("Add", ["one", "b"], ["d"]),
        op("Div", ["x", "d"], ["y"]),
    ],
    "HardSwish": [op("HardSigmoid", ["x"], ["a"], alpha=1 / 6, beta=0.5), op("Mul", ["a", "x"], ["y"])],
    "HardSwish by Clip": [
        op("Add", ["x", "three"], ["a"]),
        op("Clip", ["a"], ["b"], min=0.0, max=6.0),
        op("Mul", ["x", "b"], ["d"]),
        op("Div", ["d", "six"], ["y"]),
    ],
    "HardSwish by ReluN": [
        op("Add", ["x", "three"], ["a"]),
        op("ReluN", ["a"], ["b"]),
        op("Mul", ["b", "sixth"], ["d"]),
        op("Mul", ["x", "d"], ["y"]),
    ],
    "Mish": [op("Softplus", ["x"], ["a"]), op("Tanh", ["a"], ["b"]), op("Mul", ["x", "b"], ["y"])],
    "Gelu": [*GELU, op("Mul", ["x", "d"], ["e"]), op("Mul", ["e", "half"], ["y"])],
    "Gelu, half first": [*GELU, op("Mul", ["x", "half"], ["e"]), op("Mul", ["e", "d"], ["y"])],
    "Gelu by tanh": [
        op("Pow", ["x", "p3"], ["a"]),
        op("Mul", ["a", "c"], ["b"]),
        op("Add", ["x", "b"], ["d"]),
        op("Mul", ["d", "r"], ["e"]),
        op("Tanh", ["e"], ["f"]),
        op("Add", ["f", "one"], ["g"]),
        op("Mul", ["x", "g"], ["h"]),
        op("Mul", ["h", "half"], ["y"]),
    ],
}


@pytest.mark.parametrize("name", PATTERNS)
def test_it_is_recognized_however_it_is_written(name: str) -> None:
    model = model_of(PATTERNS[name], **NUMBERS)
    expected = name.split()[0].rstrip(",")
    assert rewritten(PASS, model) == [f"{expected} x -> y"]
    given = {argument.name for argument in PASS.apply(model).model.net.op[0].arg}
    assert ("fast_gelu" in given) == (name == "Gelu by tanh")


def test_behind_other_operators_and_twice() -> None:
    operators: list[OperatorDef] = [op("Tanh", ["x"], ["u"])]
    for source, target in (("u", "v"), ("v", "y")):
        operators += [op("Sigmoid", [source], [f"{target}s"]), op("Mul", [source, f"{target}s"], [target])]
    assert rewritten(PASS, model_of(operators)) == ["Tanh x -> u", "Swish u -> v", "Swish v -> y"]


ALMOST = {
    "another number": [
        *GELU[:2],
        op("Add", ["b", "half"], ["d"]),
        op("Mul", ["x", "d"], ["e"]),
        op("Mul", ["e", "half"], ["y"]),
    ],
    "a slope": [op("HardSigmoid", ["x"], ["a"], alpha=0.2, beta=0.5), op("Mul", ["a", "x"], ["y"])],
    "far limits": [
        op("Sigmoid", ["x"], ["a"]),
        op("Mul", ["x", "a"], ["b"]),
        op("Clip", ["b"], ["d"], max=2e4),
        op("Mul", ["d", "one"], ["y"]),
    ],
    "two arguments": [op("Abs", ["x"], ["z"]), op("Sigmoid", ["x"], ["a"]), op("Mul", ["z", "a"], ["y"])],
}


@pytest.mark.parametrize("name", ALMOST)
def test_what_is_almost_one_stays(name: str) -> None:
    result = PASS.apply(model_of(ALMOST[name], **NUMBERS))
    assert "y" not in [one.output[0] for one in result.model.net.op if one.type in ("Swish", "HardSwish", "Gelu")]


def test_a_factor_at_its_end_is_not_folded_into_the_next_layer_first() -> None:
    layers = {"w": normal(6, 4), "w0": normal(6), "v": normal(3, 6), "e0": normal(3)}
    operators = [
        op("FC", ["u", "w", "w0"], ["x"]),
        *PATTERNS["Gelu"],
        op("FC", ["y", "v", "e0"], ["z"]),
    ]
    model = model_of(operators, ["z"], {"u": (2, 4)}, **NUMBERS, **layers)
    assert [one.type for one in run_passes(model, GRAPH_PASSES).model.net.op] == ["FusedFC", "FC"]


def test_what_others_read_stays() -> None:
    operators = PATTERNS["Swish"]
    assert unchanged(PASS, model_of(operators, ["y", "a"]))
    assert unchanged(PASS, model_of([*operators, op("Abs", ["a"], ["z"])], ["y", "z"]))


def test_a_number_that_is_fed_or_makes_more_axes_is_none() -> None:
    operators = PATTERNS["Gelu"]
    assert unchanged(PASS, model_of(operators, inputs={"x": (2, 3), "half": ()}, **NUMBERS))
    assert unchanged(PASS, model_of(operators, inputs={"x": (3,)}, **{**NUMBERS, "half": number(0.5).reshape(1, 1)}))
