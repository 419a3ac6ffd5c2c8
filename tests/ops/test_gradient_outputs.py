"""What the outputs of a gradient operator are: Caffe2's order, or the names that argument `wanted` gives."""

from __future__ import annotations

import pytest

from dagexec.core.arguments import ArgumentValue
from dagexec.core.node import arguments_of
from dagexec.core.schema import OperatorCall
from dagexec.errors import ArgumentError
from dagexec.ops.families.conv.gradient_outputs import wanted_gradients
from tests.ops.running import operator_def


def read(outputs: int, **arguments: ArgumentValue) -> tuple[str, ...]:
    definition = operator_def("ConvGradient", ["X", "w", "dY"], [f"d{i}" for i in range(outputs)], **arguments)
    return wanted_gradients(OperatorCall(definition, arguments_of(definition, "Grad 'd0'"), (), (), "Grad 'd0'"))


@pytest.mark.parametrize(
    ("outputs", "no_bias", "expected"),
    [
        (2, 0, ("filter", "bias")),
        (3, 0, ("filter", "bias", "input")),
        (1, 1, ("filter",)),
        (2, 1, ("filter", "input")),
    ],
)
def test_without_wanted_the_order_is_that_of_caffe2(outputs: int, no_bias: int, expected: tuple[str, ...]) -> None:
    assert read(outputs, no_bias=no_bias) == expected
    if not no_bias:
        assert read(outputs) == expected


@pytest.mark.parametrize(
    "wanted", [["input"], ["bias"], ["filter"], ["input", "filter"], ["bias", "input"], ["input", "bias", "filter"]]
)
def test_wanted_names_the_outputs_in_any_order(wanted: list[str]) -> None:
    assert read(len(wanted), wanted=wanted) == tuple(wanted)
    if "bias" not in wanted:
        assert read(len(wanted), wanted=wanted, no_bias=1) == tuple(wanted)


@pytest.mark.parametrize(
    ("outputs", "arguments", "message"),
    [
        (1, {"wanted": ["weights"]}, "only contain filter, bias, input; found 'weights'"),
        (2, {"wanted": ["input", "input"]}, "names 'input' 2 times"),
        (1, {"wanted": ["bias"], "no_bias": 1}, "none with no_bias=1"),
        (2, {"wanted": ["input"]}, r"each of 2 output\(s\), found \['input'\]"),
        (1, {"wanted": ["filter", "input"]}, r"each of 1 output\(s\), found \['filter', 'input'\]"),
        (1, {"wanted": []}, r"each of 1 output\(s\), found \[\]"),
        (1, {"wanted": "input"}, "'wanted' must be a list of strings; found a string"),
        (1, {}, r"no_bias=0 .* filter, bias, input.* found 1 output\(s\)"),
        (3, {"no_bias": 1}, r"no_bias=1 .* filter, input.* found 3 output\(s\)"),
    ],
)
def test_what_the_outputs_cannot_be_is_refused(outputs: int, arguments: dict[str, ArgumentValue], message: str) -> None:
    with pytest.raises(ArgumentError, match=f"Grad 'd0': .*{message}"):
        read(outputs, **arguments)
