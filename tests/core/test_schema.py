"""Schemas: arity, names, in-place rules, required arguments, and the checks inference is written with."""

from typing import Any

import numpy as np
import pytest

from dagexec import OperatorDef
from dagexec.core.arguments import make_argument
from dagexec.core.dtypes import FLOAT32, FLOAT64, INT32
from dagexec.core.node import arguments_of, new_node, operator_label
from dagexec.core.schema import (
    UNBOUNDED,
    Cost,
    OperatorCall,
    OpSchema,
    TensorType,
    UnknownValueError,
    any_to_first,
    first_to_first,
    memory_cost,
    no_inplace,
    one_to_one,
    same_as_input,
)
from dagexec.errors import SchemaError, ShapeError


def schema(**changes: Any) -> OpSchema:
    plain = {"type": "Op", "inputs": (1, 2), "outputs": (1, 2), "infer": same_as_input, "doc": "d"}
    return OpSchema(**(plain | changes))


def verify(inputs: list[str], outputs: list[str], args: dict[str, Any] | None = None, /, **changes: Any) -> None:
    schema(**changes).verify(new_node("Op", inputs, outputs, arg=args or {}))


@pytest.mark.parametrize(
    ("inputs", "outputs", "bounds", "message"),
    [
        ([], ["y"], {}, r"expected 1 to 2 input\(s\), found 0"),
        (["a"] * 3, ["y"], {}, r"expected 1 to 2 input\(s\), found 3"),
        (["a"], ["y", "z", "w"], {}, r"expected 1 to 2 output\(s\), found 3"),
        (["a"], ["y"], {"inputs": (2, 2)}, r"expected 2 input\(s\), found 1"),
        (["a"], ["y"], {"inputs": (2, UNBOUNDED)}, r"expected at least 2 input\(s\), found 1"),
        (["a"], [""], {}, "a blob name is empty"),
        ([""], ["y"], {}, "a blob name is empty"),
        (["a"], ["y", "y"], {}, r"an output is named twice: \['y', 'y'\]"),
    ],
)
def test_counts_and_names_are_checked(
    inputs: list[str], outputs: list[str], bounds: dict[str, Any], message: str
) -> None:
    with pytest.raises(SchemaError, match=f"^{message}"):
        verify(inputs, outputs, **bounds)


def test_counts_within_the_bounds_pass() -> None:
    verify(["a"], ["y"])
    verify(["a", "a"], ["y", "z"])
    verify(["a"] * 50, ["y"], inputs=(0, UNBOUNDED))


@pytest.mark.parametrize(
    ("rule", "allowed"),
    [
        (no_inplace, set()),
        (one_to_one, {(0, 0), (1, 1)}),
        (first_to_first, {(0, 0)}),
        (any_to_first, {(0, 0), (1, 0)}),
    ],
)
@pytest.mark.parametrize("pair", [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_an_in_place_pair_needs_its_rule(rule: Any, allowed: set[tuple[int, int]], pair: tuple[int, int]) -> None:
    inputs, outputs = ["a", "b"], ["y", "z"]
    outputs[pair[1]] = inputs[pair[0]]
    if pair in allowed:
        verify(inputs, outputs, inplace=rule)
        return
    with pytest.raises(SchemaError, match=f"output {pair[1]} may not overwrite input {pair[0]} in place .blob '[ab]'"):
        verify(inputs, outputs, inplace=rule)


def test_an_enforced_pair_must_be_in_place() -> None:
    enforced = {"enforced_inplace": ((1, 0),)}
    verify(["a", "b"], ["b"], **enforced)
    verify(["a"], ["y"], **enforced)
    with pytest.raises(SchemaError, match="output 0 must overwrite input 1 in place; expected 'b', found 'y'"):
        verify(["a", "b"], ["y"], **enforced)
    with pytest.raises(SchemaError, match="output 0 may not overwrite input 0"):
        verify(["a"], ["a"], **enforced)


def test_required_arguments_must_be_there() -> None:
    verify(["a"], ["y"], {"k": 0}, required_args=("k",))
    with pytest.raises(SchemaError, match=r"^argument 'k' is required"):
        verify(["a"], ["y"], {"j": 0}, required_args=("k",))


def test_help_names_everything() -> None:
    text = schema(doc=" What it does. ", input_names=("X", "W"), output_names=("Y",), args={"k": "how many"}).help()
    assert text.splitlines() == [
        "Op", "", "What it does.", "", "  input 0: X", "  input 1: W", "  output 0: Y", "  argument k: how many",
    ]  # fmt: skip


def test_values_may_be_read_only_when_an_argument_says_so() -> None:
    switched = schema(value_inputs=(0, 1), values_read_if="by_value")
    definition = new_node("Op", ["a"])
    assert schema(value_inputs=(0, 1)).values_read(definition) == (0,)
    assert switched.values_read(definition) == ()
    assert switched.values_read(definition.changed(arguments={"by_value": 1})) == (0,)


def call(*kinds: TensorType, values: tuple[Any, ...] = (), **arguments: Any) -> OperatorCall:
    names = [f"x{index}" for index in range(len(kinds))]
    definition = OperatorDef(type="Op", input=names, output=["y"])
    definition.arg.extend(make_argument(name, value) for name, value in arguments.items())
    return OperatorCall(definition, arguments_of(definition, "Op 'y'"), kinds, values or (None,) * len(kinds), "Op 'y'")


MATRIX = TensorType((2, 3), FLOAT32)
VECTOR = TensorType((3,), INT32)


def test_checks_of_inputs_name_expected_and_found() -> None:
    inputs = r" \(inputs: x0: float32\[2, 3\], x1: int32\[3\]\)$"
    given = call(MATRIX, VECTOR)
    assert given.require_rank(0, 2, 4) == (2, 3)
    with pytest.raises(ShapeError, match="^Op 'y': input 'x0' must have 3 or 4 axes, found 2" + inputs):
        given.require_rank(0, 3, 4)
    given.require_shape(1, (3,), "a row")
    with pytest.raises(ShapeError, match=r"input 'x1' must have shape \(2,\) \(a column\), found \(3,\)" + inputs):
        given.require_shape(1, (2,), "a column")
    assert given.require_types(0, FLOAT64, FLOAT32) is FLOAT32
    with pytest.raises(ShapeError, match="input 'x1' must be one of float32, float64, found int32" + inputs):
        given.require_types(1, FLOAT32, FLOAT64)
    assert given.require_same_type(0) is FLOAT32
    with pytest.raises(ShapeError, match="inputs must share one element type, found float32, int32" + inputs):
        given.require_same_type()


@pytest.mark.parametrize(
    ("axis", "end", "expected"),
    [(0, False, 0), (2, False, 2), (-1, False, 2), (-3, False, 0), (3, True, 3), (3, False, None), (-4, True, None)],
)
def test_an_axis_counts_from_either_end(axis: int, end: bool, expected: int | None) -> None:
    given = call(MATRIX, axis=axis)
    if expected is None:
        with pytest.raises(ShapeError, match=rf"'axis' must be in \[-3, {3 if end else 2}\], found {axis}"):
            given.axis("axis", 0, 3, end=end)
    else:
        assert given.axis("axis", 0, 3, end=end) == expected
    assert call(MATRIX).axis("axis", -1, 3) == 2


def test_a_value_is_known_or_said_to_be_unknown() -> None:
    known = np.array([1])
    assert call(VECTOR, MATRIX, values=(known, None)).known_value(0) is known
    with pytest.raises(UnknownValueError, match="the value of 'x1' is not known yet"):
        call(VECTOR, MATRIX, values=(known, None)).known_value(1)


def test_cost_counts_bytes_and_ranks_by_the_slower_of_compute_and_memory() -> None:
    cost = memory_cost(call(MATRIX, VECTOR), [MATRIX, VECTOR], 2.0)
    assert cost == Cost(flops=18, bytes_read=36, bytes_written=36)
    assert Cost(0, 10**9, 0).seconds == pytest.approx(1 / 30, rel=0.01)
    assert Cost(15 * 10**9, 10**6, 0).seconds == pytest.approx(0.1, rel=0.01)
    assert Cost(15 * 10**9, 10**6, 0).seconds_at(2.0) == pytest.approx(0.05, rel=0.01)
    assert Cost(0, 10**9, 0).seconds_at(2.0) == pytest.approx(1 / 30, rel=0.01)
    assert Cost(0, 0, 0).seconds > 0


def test_a_type_knows_its_size() -> None:
    assert (MATRIX.elements, MATRIX.nbytes, str(MATRIX)) == (6, 24, "float32[2, 3]")


def test_a_label_tells_type_name_place_and_net() -> None:
    named = OperatorDef(type="Op", name="first", output=["y"])
    assert operator_label(named, 3, "net") == "Op 'first' (operator 3) of net 'net'"
    assert operator_label(OperatorDef(type="Op", output=["y"]), -1) == "Op 'y'"
    assert operator_label(OperatorDef(type="Op"), 0) == "Op '' (operator 0)"


def test_counts_are_by_default_those_of_the_names() -> None:
    made = OpSchema("Op", infer=same_as_input, doc="d", input_names=("a", "b"))
    assert (made.inputs, made.outputs) == ((2, 2), (0, 0))
