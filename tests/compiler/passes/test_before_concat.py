"""before-concat: activations and batch normalizations behind a Concat."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from dagexec.compiler.passes import run_passes
from dagexec.compiler.passes.before_concat import PASS
from dagexec.compiler.passes.catalog import GRAPH_PASSES
from dagexec.core.model import Model
from dagexec.core.proto import OperatorDef
from tests.compiler.passes.models import (
    Array,
    assert_close,
    feeds_for,
    listed,
    model_of,
    normal,
    op,
    outputs_of,
    rewritten,
    types_of,
    unchanged,
)


def conv(source: str, result: str) -> OperatorDef:
    return op("Conv", [source, "w"], [result], kernel=1)


def joined(
    *operators: OperatorDef, outputs: tuple[str, ...] = ("y",), parameters: Mapping[str, Array] | None = None
) -> Model:
    return model_of(operators, outputs, None, w=normal(4, 4, 1, 1), w3=normal(4, 4, 3, 3), **(parameters or {}))


def fully(model: Model) -> list[str]:
    """The operators after all passes, which change nothing a second time; results stay."""
    result = run_passes(model, GRAPH_PASSES).model
    assert run_passes(result, GRAPH_PASSES).model.net.op == result.net.op
    feeds = feeds_for(model)
    assert_close(outputs_of(result, feeds), outputs_of(model, feeds))
    return sorted(types_of(result))


BRANCHES = (conv("x", "a"), op("Tanh", ["x"], ["t"]), conv("t", "b"), op("Concat", ["a", "b"], ["j"]))


@pytest.mark.parametrize("kind", ["Relu", "Sigmoid", "LeakyRelu"])
def test_an_activation_goes_into_the_layers(kind: str) -> None:
    model = joined(*BRANCHES, op(kind, ["j"], ["y"]))
    assert rewritten(PASS, model)[-3:] == [
        f"{kind} a -> a/{kind}",
        f"{kind} b -> b/{kind}",
        f"Concat a/{kind} b/{kind} -> y",
    ]
    assert fully(model) == ["Concat", "FusedConv", "FusedConv", "Tanh"]


def test_what_others_read_too_costs_one_operator_and_not_two() -> None:
    one = joined(*BRANCHES, op("Relu", ["j"], ["y"]), outputs=("y", "a"))
    assert rewritten(PASS, one)[-3:] == ["Relu a -> a/Relu", "Relu b -> b/Relu", "Concat a/Relu b/Relu -> y"]
    assert unchanged(PASS, joined(*BRANCHES, op("Relu", ["j"], ["y"]), outputs=("y", "a", "b")))
    read = [*BRANCHES, op("Relu", ["j"], ["y"]), op("Sum", ["a", "b"], ["z"])]
    assert unchanged(PASS, joined(*read, outputs=("y", "z")))
    three = [*BRANCHES[:3], conv("t", "c"), op("Concat", ["a", "b", "c"], ["j"]), op("Relu", ["j"], ["y"])]
    assert unchanged(PASS, joined(*three, outputs=("y", "a", "b")))


def test_what_is_there_already_is_used() -> None:
    operators = [*BRANCHES, op("Relu", ["a"], ["r"]), op("Relu", ["j"], ["y"])]
    model = joined(*operators, outputs=("y", "a", "r"))
    assert rewritten(PASS, model)[-2:] == ["Relu b -> b/Relu", "Concat r b/Relu -> y"]
    later = [*BRANCHES, op("Relu", ["j"], ["y"]), op("Relu", ["a"], ["r"])]
    assert unchanged(PASS, joined(*later, outputs=("y", "a", "r")))


def test_other_arguments_are_another_activation() -> None:
    operators = [*BRANCHES, op("LeakyRelu", ["a"], ["r"], alpha=0.5), op("LeakyRelu", ["j"], ["y"], alpha=0.25)]
    changed = rewritten(PASS, joined(*operators, outputs=("y", "r")))
    assert changed[-1] == "Concat a/LeakyRelu b/LeakyRelu -> y"


POSITIVE = [op("Relu", ["x"], ["r"]), op("ReluN", ["x"], ["r"]), op("Clip", ["x"], ["r"], min=0.0, max=6.0)]


@pytest.mark.parametrize("positive", POSITIVE, ids=lambda one: one.type)
def test_means_of_what_is_not_negative_are_not_rectified_again(positive: OperatorDef) -> None:
    model = joined(
        positive,
        op("AveragePool", ["r"], ["a"], kernel=3, pad=1),
        conv("x", "b"),
        op("MaxPool", ["r"], ["c"], kernel=3, pad=1),
        op("Concat", ["a", "b", "c"], ["j"]),
        op("Relu", ["j"], ["y"]),
    )
    assert rewritten(PASS, model)[-2:] == ["Relu b -> b/Relu", "Concat a b/Relu c -> y"]


def test_means_of_anything_are_rectified() -> None:
    model = joined(
        op("AveragePool", ["x"], ["a"], kernel=3, pad=1),
        conv("x", "b"),
        op("Concat", ["a", "b"], ["j"]),
        op("Relu", ["j"], ["y"]),
    )
    assert "Relu a -> a/Relu" in rewritten(PASS, model)


def test_concats_of_concats_are_passed() -> None:
    inner = op("Concat", ["j", "c"], ["k"])
    model = joined(*BRANCHES, op("Abs", ["t"], ["u"]), conv("u", "c"), inner, op("Relu", ["k"], ["y"]))
    assert fully(model) == ["Abs", "Concat", "Concat", "FusedConv", "FusedConv", "FusedConv", "Tanh"]


def test_other_readers_an_output_and_a_tensor_joined_with_itself() -> None:
    assert unchanged(PASS, joined(*BRANCHES, op("Relu", ["j"], ["r"]), op("Sum", ["r", "j"], ["y"])))
    assert unchanged(PASS, joined(*BRANCHES, op("Relu", ["j"], ["y"]), outputs=("y", "j")))
    twice = [conv("x", "a"), op("Concat", ["a", "a"], ["j"]), op("Relu", ["j"], ["y"])]
    assert rewritten(PASS, joined(*twice))[1:] == ["Relu a -> a/Relu", "Concat a/Relu a/Relu -> y"]


def normalized() -> dict[str, Array]:
    return {"s": normal(8), "o": normal(8), "m": normal(8), "v": np.abs(normal(8)) + 1}


NORMALIZATION = op("SpatialBN", ["j", "s", "o", "m", "v"], ["n"], is_test=1, epsilon=1e-3)


def test_a_batch_normalization_of_joined_layers_becomes_part_of_their_weights() -> None:
    model = joined(*BRANCHES, NORMALIZATION, op("Relu", ["n"], ["y"]), parameters=normalized())
    assert fully(model) == ["Concat", "FusedConv", "FusedConv", "Tanh"]
    several = joined(*BRANCHES, NORMALIZATION, op("Relu", ["n"], ["y"]), outputs=("y", "n"), parameters=normalized())
    assert fully(several) == ["Concat", "Conv", "Conv", "Relu", "Tanh"]


def test_a_batch_normalization_stays_where_not_all_are_layers_or_other_axes_are_joined() -> None:
    one = [conv("x", "a"), op("Concat", ["a", "x"], ["j"]), NORMALIZATION]
    assert unchanged(PASS, joined(*one, outputs=("n",), parameters=normalized()))
    rows = [*BRANCHES[:3], op("Concat", ["a", "b"], ["j"], axis=2), NORMALIZATION]
    four = {name: normalized()[name][:4] for name in ("s", "o", "m", "v")}
    assert unchanged(PASS, joined(*rows, outputs=("n",), parameters=four))
    assert unchanged(PASS, joined(*BRANCHES, NORMALIZATION, outputs=("n", "a"), parameters=normalized()))


def test_as_many_columns_as_channels_are_no_channels() -> None:
    convolved = [op("Conv", [name, "w3"], [f"{name}c"], kernel=3) for name in ("x", "t")]
    columns = op("Concat", ["xc", "tc"], ["j"], axis=3)
    last = op("SpatialBN", list(NORMALIZATION.input), ["n"], is_test=1, order="NHWC")
    operators = [op("Tanh", ["x"], ["t"]), *convolved, columns, last]
    assert unchanged(PASS, joined(*operators, outputs=("n",), parameters=normalized()))


def test_max_pooling_and_rectification_change_places_behind_a_layer() -> None:
    operators = [conv("x", "a"), op("MaxPool", ["a"], ["p"], kernel=3, stride=2, pad=1), op("Relu", ["p"], ["y"])]
    assert rewritten(PASS, joined(*operators))[1:] == ["Relu a -> a/Relu", "MaxPool a/Relu -> y"]
    assert fully(joined(*operators)) == ["FusedConv", "MaxPool"]
    assert unchanged(PASS, joined(*operators, outputs=("y", "a")))
    assert unchanged(PASS, joined(*operators[:2], op("Sigmoid", ["p"], ["y"])))
    assert unchanged(PASS, joined(op("MaxPool", ["x"], ["p"], kernel=2), op("Relu", ["p"], ["y"])))


def test_a_window_in_the_padding_alone_keeps_its_place() -> None:
    operators = [conv("x", "a"), op("MaxPool", ["a"], ["p"], kernel=2, pad=2), op("Relu", ["p"], ["y"])]
    assert unchanged(PASS, joined(*operators))


def test_blobs_written_twice_stay() -> None:
    operators = [*BRANCHES, op("Relu", ["j"], ["j"]), op("Copy", ["j"], ["y"])]
    assert unchanged(PASS, joined(*operators))
    assert "FusedConv" in fully(joined(*operators))
    assert listed(joined(*operators))[-2] == "Relu j -> j"
