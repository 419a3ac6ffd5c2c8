"""Gradients of operators of several operands, however these are stretched: numerical derivatives and formulas."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagexec import NetDef, Workspace
from dagexec.core.gradient import gradient
from dagexec.errors import ArgumentError, GradientError, ShapeError
from dagexec.scheduler.nets.simple import SimpleNet
from dagexec.training.backward import add_gradient_operators
from tests.ops.gradient_checks import analytic_gradients
from tests.ops.running import Array, operator_def, run_operator, workspace_of

Shape = tuple[int, ...]
BINARY = ["Add", "Sub", "Mul", "Div"]


def numbers(shape: Shape, seed: int, low: float = 0.5, high: float = 2.0) -> Array:
    return np.random.default_rng(seed).uniform(low, high, shape)


@st.composite
def stretched(draw: st.DrawFn, operands: int, least: int = 0) -> list[Shape]:
    """Shapes that broadcast together by NumPy's rule."""
    full = draw(st.lists(st.integers(least, 4), max_size=4))
    shapes = []
    for _ in range(operands):
        start = draw(st.integers(0, len(full)))
        shapes.append(tuple(1 if draw(st.booleans()) else size for size in full[start:]))
    return shapes


def summed_to(values: Array, shape: Shape) -> Array:
    """The sum of an array over what a tensor of `shape` is stretched along, element by element."""
    result = np.zeros(shape)
    for place in np.ndindex(values.shape):
        own = place[len(place) - len(shape) :]
        result[tuple(0 if size == 1 else i for i, size in zip(own, shape, strict=True))] += values[place]
    return result


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.sampled_from(BINARY), stretched(2))
def test_gradients_of_stretched_operands_are_summed(op_type: str, shapes: list[Shape]) -> None:
    a, b = numbers(shapes[0], 0), numbers(shapes[1], 1)
    dc = numbers(np.broadcast_shapes(*shapes), 2, -1, 1)
    found = analytic_gradients(operator_def(op_type, ["a", "b"], ["c"]), [a, b], {0: dc}, [0, 1])
    by_a = {"Add": dc, "Sub": dc, "Mul": dc * b, "Div": dc / b}[op_type]
    by_b = {"Add": dc, "Sub": -dc, "Mul": dc * a, "Div": -dc * a / b**2}[op_type]
    for position, (values, operand) in enumerate(((by_a, a), (by_b, b))):
        assert found[position].shape == operand.shape
        np.testing.assert_allclose(found[position], summed_to(values, operand.shape), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("op_type", [*BINARY, "Pow", "Max", "Mean", "Sum"])
def test_operand_used_twice_has_the_sum_of_both_gradients(op_type: str) -> None:
    net = NetDef(name="test", op=[operator_def(op_type, ["x", "x"], ["y"])], external_input=["x"])
    gradients = add_gradient_operators(net, {"y": "dy"})
    workspace = Workspace()
    x, dy = numbers((2, 3), 0), numbers((2, 3), 1)
    workspace.feed_blob("x", x)
    workspace.feed_blob("dy", dy)
    with SimpleNet(net, workspace) as runnable:
        runnable.run()
    derivative = {
        "Add": 2,
        "Sub": 0,
        "Mul": 2 * x,
        "Div": 0,
        "Pow": x**x * (1 + np.log(x)),
        "Max": 2,  # of equal operands each gets all
        "Mean": 1,
        "Sum": 2,
    }[op_type]
    np.testing.assert_allclose(workspace.fetch_blob(str(gradients["x"])), dy * derivative, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    ("op_type", "target", "wanted"),
    [
        ("Add", "a", ["a", "b"]),
        ("Add", "b", ["a", "b"]),
        ("Sub", "a", ["a", "b"]),
        ("Mul", "a", ["a"]),
        ("Mul", "b", ["b"]),
        ("Div", "a", ["a", "b"]),
        ("Mean", "a", ["a", "b"]),
        ("Sum", "a", ["a", "b"]),
    ],
)
def test_operator_in_place_has_gradients_where_the_old_value_is_not_needed(
    op_type: str, target: str, wanted: list[str]
) -> None:
    a, b, dc = numbers((2, 3), 0), numbers((2, 3), 1), numbers((2, 3), 2)
    results = []
    for output in (target, "c"):
        net = NetDef(name="test", op=[operator_def(op_type, ["a", "b"], [output])], external_input=["a", "b"])
        gradients = add_gradient_operators(net, {output: "given"}, wanted=wanted)
        workspace = workspace_of({"a": a, "b": b, "given": dc})
        with SimpleNet(net, workspace) as runnable:
            runnable.run()
        results.append([workspace.fetch_blob(str(gradients[name])) for name in wanted])
    for found, expected in zip(*results, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-14)


@pytest.mark.parametrize(
    ("op_type", "wanted"), [("Mul", ["a", "b"]), ("Mul", ["b"]), ("Pow", ["a"]), ("Max", ["a"]), ("Min", ["b"])]
)
def test_operator_in_place_whose_old_value_is_needed_is_refused_by_name(op_type: str, wanted: list[str]) -> None:
    net = NetDef(name="test", op=[operator_def(op_type, ["a", "b"], ["a"])], external_input=["a", "b"])
    with pytest.raises(GradientError, match="'a' that it saw, which it overwrites itself"):
        add_gradient_operators(net, {"a": "given"}, wanted=wanted)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(st.sampled_from(["Max", "Min", "Mean", "Sum"]), st.integers(1, 4).flatmap(stretched), st.booleans())
def test_gradients_of_operators_of_any_number_of_operands(op_type: str, shapes: list[Shape], ties: bool) -> None:
    operands = [numbers(shape, seed) for seed, shape in enumerate(shapes)]
    if ties:
        operands = [np.round(operand) for operand in operands]
    dy = numbers(np.broadcast_shapes(*shapes), 9, -1, 1)
    names = [f"x{index}" for index in range(len(operands))]
    arguments = {"broadcast": 1} if op_type == "Sum" else {}
    definition = operator_def(op_type, names, ["y"], **arguments)
    found = analytic_gradients(definition, operands, {0: dy}, range(len(operands)))
    full = [np.broadcast_to(operand, dy.shape) for operand in operands]
    for position, operand in enumerate(operands):
        factor = {
            "Mean": 1 / len(operands),
            "Sum": 1,
            "Max": np.all([full[position] >= other for other in full], axis=0),
            "Min": np.all([full[position] <= other for other in full], axis=0),
        }[op_type]
        expected = summed_to(dy * factor, operand.shape)
        np.testing.assert_allclose(found[position], expected, rtol=1e-12, atol=1e-13)


def test_gradient_of_a_sum_is_passed_on_without_an_operator() -> None:
    made = gradient(operator_def("Sum", ["a", "b"], ["c"]), ["c_grad"], wanted=[1])
    assert (made.operators, made.inputs) == ((), (None, "c_grad"))


def test_mean_gradient_without_operands_divides_by_the_number_of_outputs() -> None:
    for found in run_operator("MeanGradient", [np.array([3.0, 6.0])], 3):
        np.testing.assert_array_equal(found, [1, 2])


def test_div_gradient_without_a_is_that_of_caffe2s_older_form() -> None:
    dc, b, c = numbers((2, 3), 0), numbers((3,), 1), numbers((2, 3), 2)
    da, db = run_operator("DivGradient", [dc, b, c], 2)
    np.testing.assert_allclose(da, dc / b)
    np.testing.assert_allclose(db, (-dc * c / b).sum(0))


@pytest.mark.parametrize(
    ("base", "exponent", "by_base", "by_exponent"),
    [
        (0.0, 2.0, 0, 0),
        (0.0, 1.0, 1, 0),
        (0.0, 0.0, 0, 0),
        (2.0, 0.0, 0, math.log(2)),
        (-2.0, 3.0, 12, math.nan),
        (0.0, 0.5, math.inf, 0),
        (0.0, -1.0, -math.inf, -math.inf),
    ],
)
def test_power_at_zero_and_below(base: float, exponent: float, by_base: float, by_exponent: float) -> None:
    inputs = [np.array([base]), np.array([exponent])]
    definition = operator_def("Pow", ["x", "e"], ["y"])
    with np.errstate(all="ignore"):
        found = analytic_gradients(definition, inputs, {0: np.ones(1)}, [0, 1])
    np.testing.assert_array_equal(found[0], [by_base])
    np.testing.assert_array_equal(found[1], [by_exponent])


def test_where_passes_no_nan_of_what_was_not_taken() -> None:
    inputs = [np.array([True, False, True]), np.ones(3, np.float32), np.ones(3, np.float32)]
    dz = np.array([np.nan, np.nan, 2], np.float32)
    found = analytic_gradients(operator_def("Where", ["c", "x", "y"], ["z"]), inputs, {0: dz}, [1, 2])
    np.testing.assert_array_equal(found[1], [np.nan, 0, 2])
    np.testing.assert_array_equal(found[2], [0, np.nan, 0])


def test_condition_has_no_gradient() -> None:
    made = gradient(operator_def("Where", ["c", "x", "y"], ["z"]), ["z_grad"], wanted=[0])
    assert (made.operators, made.inputs) == ((), (None, None, None))


@settings(max_examples=30, deadline=None)
@given(stretched(1), st.lists(st.integers(1, 3), max_size=2))
def test_sum_reduce_like_sums_to_the_other_shape(shapes: list[Shape], leading: list[int]) -> None:
    [like] = shapes
    full = (*leading, *(3 if size == 1 else size for size in like))
    a = numbers(full, 0)
    [found] = run_operator("SumReduceLike", [a, np.zeros(like)])
    np.testing.assert_allclose(found, summed_to(a, like), rtol=1e-12)


def test_sum_reduce_like_by_the_older_rule() -> None:
    a = numbers((2, 3, 4), 0)
    spellings: list[dict[str, int | str]] = [{"broadcast": 1, "axis": 1}, {"axis": 1}, {"axis_str": "C"}]
    for arguments in spellings:
        [found] = run_operator("SumReduceLike", [a, np.zeros(3)], **arguments)
        np.testing.assert_allclose(found, a.sum((0, 2)))


@pytest.mark.parametrize("op_type", [*BINARY, "Max", "Mean"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 2e-6), (np.float16, 1e-3), (ml_dtypes.bfloat16, 8e-3)])
def test_large_sums_in_other_float_types_agree_with_float64(op_type: str, dtype: type, tolerance: float) -> None:
    """Several pieces are added up; they must not lose what 16-bit numbers would."""
    a, b = numbers((64, 7, 500), 0).astype(dtype), numbers((7, 1), 1).astype(dtype)
    dc = numbers((64, 7, 500), 2, 0.05, 0.2).astype(dtype)
    definition = operator_def(op_type, ["a", "b"], ["c"])
    found = analytic_gradients(definition, [a, b], {0: dc}, [0, 1])
    x, y, dz = (array.astype(np.float64) for array in (a, b, dc))
    by_a, by_b = {
        "Add": (dz, dz),
        "Sub": (dz, -dz),
        "Mul": (dz * y, dz * x),
        "Div": (dz / y, -dz * x / y**2),
        "Max": (dz * (x >= y), dz * (y >= x)),
        "Mean": (dz / 2, dz / 2),
    }[op_type]
    expected = [by_a, by_b.sum((0, 2)).reshape(7, 1)]
    for position in (0, 1):
        assert found[position].dtype == dtype
        scale = np.abs(expected[position]).max()
        close = tolerance * (6 if op_type == "Div" else 2)  # C is rounded
        np.testing.assert_allclose(found[position].astype(np.float64) / scale, expected[position] / scale, 0, close)


@pytest.mark.parametrize(
    ("full", "stretched_shape"),
    [
        ((2, 3, 70000), (2, 1, 1)),
        ((300, 500), (500,)),
        ((300, 500), (300, 1)),
        ((9, 200, 100), (1, 200, 1)),
        ((2, 99999), ()),
    ],
)
def test_sums_over_several_pieces_are_whole(full: Shape, stretched_shape: Shape) -> None:
    dc, a, b = numbers(full, 0), numbers(full, 1), numbers(stretched_shape, 2)
    _, db = run_operator("MulGradient", [dc, a, b], 2)
    like = (1,) * (len(full) - len(stretched_shape)) + stretched_shape
    axes = tuple(axis for axis, size in enumerate(like) if size == 1)
    np.testing.assert_allclose(db, (dc * a).sum(axes).reshape(stretched_shape), rtol=1e-12)
    [total] = run_operator("SumReduceLike", [dc, b])
    np.testing.assert_allclose(total, dc.sum(axes).reshape(stretched_shape), rtol=1e-12)


def test_gradient_of_another_shape_cannot_take_its_memory() -> None:
    workspace = workspace_of({"dc": np.ones((2, 3)), "a": np.ones((2, 3)), "b": np.ones(3)})
    net = NetDef(name="test", op=[operator_def("AddGradient", ["dc", "a", "b"], ["da", "dc"])])
    with pytest.raises(ShapeError, match=r"the gradient of B, float64\[3\], cannot overwrite dC, float64\[2, 3\]"):
        SimpleNet(net, workspace).run()


@pytest.mark.parametrize(
    ("op_type", "inputs", "outputs", "arguments", "error", "message"),
    [
        ("AddGradient", [(2, 2), (2, 3), (3,)], 2, {}, ShapeError, r"\(2, 3\) \(that of the forward .*found \(2, 2\)"),
        ("AddGradient", [(2, 3), (2, 3), (4,)], 2, {}, ShapeError, "do not broadcast together"),
        ("MulGradient", [(3,), (3,), (3,)], 1, {}, ArgumentError, "output for each of the gradients of A, B, found 1"),
        ("MulGradient", [(3,), (3,), (3,)], 1, {"wanted": ["C"]}, ArgumentError, "must only contain A, B; found 'C'"),
        ("MulGradient", [(3,), (3,), (3,)], 2, {"wanted": ["A", "A"]}, ArgumentError, "names 'A' 2 times"),
        ("DivGradient", [(3,), (3,), (3,), (4,)], 2, {}, ShapeError, r"\(3,\) \(what A and B broadcast to\)"),
        ("MaxGradient", [(4,), (3,), (3,), (1,)], 2, {}, ShapeError, "what the operands broadcast to"),
        ("WhereGradient", [(3,), (3,), (3,), (3,)], 2, {}, ShapeError, "must be one of bool"),
        ("SumReduceLike", [(3,), (2, 3)], 1, {}, ShapeError, "must broadcast to A's shape"),
        (
            "PowGradient",
            [(3,), (3,), (3,), (3,)],
            2,
            {"exponent": 2.0},
            ArgumentError,
            "the exponent must be given once",
        ),
    ],
)
def test_inputs_that_do_not_fit_are_refused(
    op_type: str,
    inputs: list[Shape],
    outputs: int,
    arguments: dict[str, Any],
    error: type[Exception],
    message: str,
) -> None:
    with pytest.raises(error, match=message):
        run_operator(op_type, [np.ones(shape) for shape in inputs], outputs, **arguments)


def test_operands_of_two_types_are_refused() -> None:
    with pytest.raises(ShapeError, match="share one element type, found float32, float64"):
        run_operator("MulGradient", [np.ones(3), np.ones(3, np.float32), np.ones(3)], 2)
