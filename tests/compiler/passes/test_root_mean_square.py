"""root-mean-square: the ways in which models spell it, against float64; what only looks like it stays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from dagexec.compiler.passes.root_mean_square import PASS
from dagexec.core.model import Model
from dagexec.core.proto import OperatorDef
from tests.compiler.passes.models import feeds_for, model_of, normal, op, outputs_of, rewritten, unchanged

EPSILON, WIDTH = 0.25, 12  # large, so that one that is lost shows
NUMBERS = {
    "two": np.float32(2),
    "one": np.float32(1),
    "half": np.float32(0.5),
    "minus_half": np.float32(-0.5),
    "epsilon": np.float32(EPSILON),
}
SQUARES = [
    op("Sqr", ["x"], ["s"]),
    op("Pow", ["x"], ["s"], exponent=2.0),
    op("Pow", ["x", "two"], ["s"]),
    op("Mul", ["x", "x"], ["s"]),
]
ENDS: dict[str, list[OperatorDef]] = {
    "rsqrt": [op("Rsqrt", ["e"], ["r"]), op("Mul", ["x", "r"], ["n"])],
    "reciprocal": [op("Sqrt", ["e"], ["q"]), op("Reciprocal", ["q"], ["r"]), op("Mul", ["r", "x"], ["n"])],
    "one over the root": [op("Sqrt", ["e"], ["q"]), op("Div", ["one", "q"], ["r"]), op("Mul", ["x", "r"], ["n"])],
    "quotient": [op("Sqrt", ["e"], ["q"]), op("Div", ["x", "q"], ["n"])],
    "power": [op("Pow", ["e", "minus_half"], ["r"]), op("Mul", ["x", "r"], ["n"])],
}


def spelled(end: str, square: OperatorDef = SQUARES[0], mean: Mapping[str, Any] | None = None) -> list[OperatorDef]:
    arguments = {"axes": [-1], "keepdims": 1} if mean is None else dict(mean)
    sums = [op("ReduceMean", ["s"], ["m"], **arguments), op("Add", ["epsilon", "m"], ["e"])]
    return [square, *sums, *ENDS[end]]


def model(operators: list[OperatorDef], *more: OperatorDef, outputs: str | list[str] = "y") -> Model:
    parameters = {"weight": normal(WIDTH), **{name: np.array(value) for name, value in NUMBERS.items()}}
    return model_of([*operators, *more], outputs, {"x": (None, 5, WIDTH)}, **parameters)


SCALED = op("Mul", ["weight", "n"], ["y"])


@pytest.mark.parametrize("square", SQUARES, ids=lambda one: f"{one.type}{len(one.input)}")
@pytest.mark.parametrize("end", ENDS)
def test_a_root_mean_square_normalization_is_one_operator_however_it_is_spelled(end: str, square: OperatorDef) -> None:
    given = model(spelled(end, square), SCALED)
    assert rewritten(PASS, given) == ["RootMeanSquareNorm x weight -> y"]
    feeds = feeds_for(given)
    x = feeds["x"].astype(np.float64)
    expected = x / np.sqrt(np.square(x).mean(-1, keepdims=True) + EPSILON) * given.parameters["weight"]
    np.testing.assert_allclose(outputs_of(PASS.apply(given).model, feeds)["y"], expected, rtol=1e-5, atol=1e-6)


def test_without_a_scale_it_is_ones() -> None:
    given = model(spelled("rsqrt"), op("Relu", ["n"], ["y"]))
    assert rewritten(PASS, given) == ["RootMeanSquareNorm x n/ones -> n", "Relu n -> y"]


@pytest.mark.parametrize(
    "operators",
    [
        spelled("rsqrt", mean={"axes": [1], "keepdims": 1}),
        spelled("rsqrt", mean={"axes": [-1, -2], "keepdims": 1}),
        spelled("rsqrt", op("Pow", ["x"], ["s"], exponent=3.0)),
        [*spelled("rsqrt")[:-1], op("Div", ["x", "r"], ["n"])],
        [*spelled("quotient")[:-1], op("Mul", ["x", "q"], ["n"])],
        [*spelled("quotient")[:-1], op("Div", ["q", "x"], ["n"])],
        [op("Abs", ["x"], ["a"]), *spelled("rsqrt", op("Sqr", ["a"], ["s"]))],
    ],
    ids=["another axis", "two axes", "a cube", "by its inverse", "times the root", "turned over", "of another blob"],
)
def test_what_is_none_stays(operators: list[OperatorDef]) -> None:
    assert unchanged(PASS, model(operators, SCALED))


def test_a_mean_that_something_else_reads_stays() -> None:
    assert unchanged(PASS, model(spelled("rsqrt"), SCALED, outputs=["y", "m"]))
    assert unchanged(PASS, model(spelled("rsqrt"), SCALED, op("Relu", ["e"], ["z"]), outputs=["y", "z"]))


def test_a_scale_that_is_fed_stays_behind() -> None:
    given = model_of(
        [*spelled("rsqrt"), op("Mul", ["n", "w"], ["y"])],
        inputs={"x": (2, WIDTH), "w": (WIDTH,)},
        **{name: np.array(value) for name, value in NUMBERS.items()},
    )
    assert rewritten(PASS, given) == ["RootMeanSquareNorm x n/ones -> n", "Mul n w -> y"]
