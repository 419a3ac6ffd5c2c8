"""Arguments: what a Python value becomes, and what a typed reading accepts and refuses."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagexec import NetDef
from dagexec.core.arguments import Arguments, ArgumentValue, make_argument
from dagexec.core.node import arguments_of, new_node
from dagexec.core.proto import Argument, OperatorDef, TensorProto
from dagexec.errors import ArgumentError


def reading(**values: ArgumentValue) -> Arguments:
    definition = OperatorDef(arg=[make_argument(name, value) for name, value in values.items()])
    return arguments_of(definition, "Op 'y'")


def test_an_absent_argument_gives_the_default() -> None:
    none = reading()
    assert none.int("a", 3) == 3
    assert none.float("a", 0.5) == 0.5
    assert none.string("a", "s") == "s"
    assert none.bool("a", True) is True
    assert none.ints("a", [1]) == [1]
    assert none.floats("a") == none.ints("a") == none.strings("a") == []
    assert none.net("a") is None
    assert none.field("a", "i") is None
    assert "a" not in none


@given(st.integers(-(2**63), 2**63 - 1))
def test_an_integer_is_read_exactly(value: int) -> None:
    assert reading(a=value).int("a", 0) == value
    assert reading(a=[value, 1]).ints("a") == [value, 1]


@given(st.floats(width=32, allow_nan=False))
def test_a_float_is_read_as_it_is_stored(value: float) -> None:
    assert reading(a=value).float("a", 0.0) == value
    assert reading(a=[value, 1]).floats("a") == [value, 1.0]


@given(st.text("a\0é€\ud7ff\ufffd😀"))  # one to four bytes each; all of Unicode would be tabulated first, for seconds
def test_text_is_read_as_utf_8(value: str) -> None:
    assert reading(a=value).string("a", "") == value
    assert reading(a=[value, "b"]).strings("a") == [value, "b"]


def test_an_integer_serves_where_a_float_is_asked_for() -> None:
    assert reading(a=3).float("a", 0.0) == 3.0
    assert reading(a=[3, 4]).floats("a") == [3.0, 4.0]


def test_booleans_and_nets_are_read() -> None:
    values = reading(yes=True, no=0, net=NetDef(name="inner"))
    assert values.bool("yes") is True
    assert values.bool("no", True) is False
    inner = values.net("net")
    assert inner is not None
    assert inner.name == "inner"
    assert values.names() == ["yes", "no", "net"]


def test_a_list_may_be_empty() -> None:
    values = reading(a=[])
    assert "a" in values
    assert values.ints("a", [1]) == values.floats("a", [1.0]) == values.strings("a", ["s"]) == []


@pytest.mark.parametrize(
    ("value", "kind", "message"),
    [
        (1.5, "int", "must be an integer; found a float"),
        ("a", "int", "must be an integer; found a string"),
        ([1, 2], "int", "must be an integer; found a list of integers"),
        ("a", "float", "must be a float; found a string"),
        (math.nan, "float", "is not a number"),
        (1, "string", "must be a string; found an integer"),
        (b"\xff\xfe", "string", "is not UTF-8 text"),
        ([b"\xff"], "strings", "is not UTF-8 text"),
        (1, "ints", "must be a list of integers; found an integer"),
        ([1.5], "ints", "must be a list of integers; found a list of floats"),
        (0.5, "floats", "must be a list of floats; found a float"),
        (["a"], "floats", "must be a list of floats; found a list of strings"),
        ([1], "strings", "must be a list of strings; found a list of integers"),
        (1, "net", "must be a net; found an integer"),
    ],
)
def test_another_kind_is_refused_with_both_kinds_named(value: ArgumentValue, kind: str, message: str) -> None:
    defaults = {"int": (0,), "float": (0.0,), "string": ("",)}
    with pytest.raises(ArgumentError, match=f"^Op 'y': argument 'a' {message}"):
        getattr(reading(a=value), kind)("a", *defaults.get(kind, ()))


def test_nan_stays_in_a_list_of_floats() -> None:
    assert math.isnan(reading(a=[math.nan, 1.0]).floats("a")[0])


def test_an_argument_given_twice_must_be_the_same() -> None:
    same = OperatorDef(arg=[make_argument("a", 1), make_argument("a", 1)])
    assert arguments_of(same, "Op").int("a", 0) == 1
    differing = OperatorDef(arg=[make_argument("a", 1), make_argument("a", 2)])
    with pytest.raises(ArgumentError, match="Op: argument 'a' is given twice with different values"):
        arguments_of(differing, "Op")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (True, Argument(name="a", i=1)),
        (2.0, Argument(name="a", f=2.0)),
        ("µ", Argument(name="a", s="µ".encode())),
        (b"\xff", Argument(name="a", s=b"\xff")),
        ([1, 2.5], Argument(name="a", floats=[1.0, 2.5])),
        ([True, 2], Argument(name="a", ints=[1, 2])),
        ((1, 2), Argument(name="a", ints=[1, 2])),
        (["s", b"t"], Argument(name="a", strings=[b"s", b"t"])),
        ([], Argument(name="a")),
        (TensorProto(dims=[2]), Argument(name="a", t=TensorProto(dims=[2]))),
    ],
)
def test_each_python_value_has_its_field(value: ArgumentValue, expected: Argument) -> None:
    assert make_argument("a", value) == expected


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "a NoneType cannot be an operator argument"),
        ({1: 2}, "a dict cannot be"),
        ([1, "a"], r"a list must hold only ints, floats or strings; found \[1, 'a'\]"),
        (2**63, "9223372036854775808 does not fit an int64"),
        ([1, -(2**63) - 1], "-9223372036854775809 does not fit an int64"),
    ],
)
def test_values_that_are_no_argument_are_refused(value: ArgumentValue, message: str) -> None:
    with pytest.raises(ArgumentError, match=f"argument 'a': {message}"):
        make_argument("a", value)


def test_arguments_are_stored_in_one_order_whatever_order_others_had_them_in() -> None:
    first, second = new_node("Conv", pad=7919, kernel=3), new_node("Conv", kernel=3, pad=7919)
    assert first.values is second.values
    assert [one.name for one in second.message().arg] == ["kernel", "pad"]


@pytest.mark.parametrize("value", [3, 0.5, "s", [1] * 10_000, [0.5] * 10_000, ["s", ""], NetDef(name="inner")])
def test_operators_of_equal_arguments_share_them(value: ArgumentValue) -> None:
    assert new_node("Op", a=value, b=1).values is new_node("Op", b=1, a=value).values


@pytest.mark.parametrize(
    ("one", "other"),
    [(1, 1.0), (0.0, -0.0), ([0.0], [-0.0]), ([1], 1), ([1, 2], [2, 1]), (["ab"], ["a", "b"]), ("1", 1), ([1], [1.0])],
)
def test_arguments_that_differ_in_a_bit_or_in_kind_are_others(one: ArgumentValue, other: ArgumentValue) -> None:
    assert new_node("Op", a=one).values != new_node("Op", a=other).values
    assert new_node("Op", a=one, b=NetDef()).values != new_node("Op", a=other, b=NetDef()).values
