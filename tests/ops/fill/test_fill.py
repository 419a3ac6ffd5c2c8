"""Fillers: what the arguments say is what is in the tensor; random ones by their moments, bounds and seeds."""

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagexec import NetDef, OperatorDef, Workspace
from dagexec.core.arguments import ArgumentValue
from dagexec.core.dtypes import ALL_TYPES, STRING
from dagexec.core.graph import build_graph
from dagexec.core.inference import infer_net
from dagexec.core.schema import TensorType
from dagexec.errors import ArgumentError, DagexecError, OperatorError, ResourceError, ShapeError
from dagexec.scheduler.nets.simple import SimpleNet
from tests.ops.running import operator_def, run_operator, workspace_of

Array = npt.NDArray[Any]
NUMERIC = [meta for meta in ALL_TYPES if meta is not STRING]


def draws(definition: OperatorDef, runs: int, feeds: dict[str, npt.ArrayLike] | None = None) -> list[Array]:
    """What a random filler gives in each of several runs of one net."""
    workspace = Workspace()
    for name, value in (feeds or {}).items():
        workspace.feed_blob(name, np.asarray(value))
    with SimpleNet(NetDef(name="fill", op=[definition]), workspace) as net:
        results = []
        for _ in range(runs):
            net.run()
            results.append(workspace.fetch_blob(definition.output[0]))
    return results


def seeded(op_type: str, seed: int, **arguments: ArgumentValue) -> OperatorDef:
    definition = operator_def(op_type, [], ["y"], **arguments)
    definition.device_option.random_seed = seed
    return definition


@pytest.mark.parametrize(
    ("value", "dtype"), [(None, np.float32), (2.5, np.float32), (7, np.int64), ("abc", object), (b"\xff", object)]
)
def test_constant_fill_takes_its_type_from_the_value(value: Any, dtype: npt.DTypeLike) -> None:
    arguments = {} if value is None else {"value": value}
    [y] = run_operator("ConstantFill", [], shape=[2, 3], **arguments)
    assert y.dtype == dtype
    expected = 0.0 if value is None else value.encode() if isinstance(value, str) else value
    assert y.tolist() == [[expected] * 3] * 2


@pytest.mark.parametrize("meta", NUMERIC, ids=str)
@pytest.mark.parametrize("by_name", [False, True])
def test_constant_fill_makes_every_type(meta: Any, by_name: bool) -> None:
    [y] = run_operator("ConstantFill", [], shape=[3], value=1, dtype=meta.name if by_name else meta.number)
    assert y.dtype == meta.numpy
    assert [float(v) for v in y] == [1.0, 1.0, 1.0]


def test_constant_fill_may_be_nan_or_infinite() -> None:
    [y] = run_operator("ConstantFill", [], shape=[1], value=math.nan)
    assert math.isnan(y[0])
    [y] = run_operator("ConstantFill", [], shape=[1], value=-math.inf)
    assert y[0] == -math.inf


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"value": 1.5, "dtype": 2}, "argument 'value' must be an integer; found a float"),
        ({"value": 300, "dtype": "uint8"}, "argument 'value' must fit uint8, found 300"),
        ({"value": 1, "dtype": "string"}, "argument 'value' must be a string"),
        ({"value": "a", "dtype": 1}, "argument 'value' must be a float; found a string"),
        ({"value": 1, "dtype": 0}, "data type number 0 is unknown"),
        ({"extra_shape": [2]}, "argument 'extra_shape' requires an input"),
        ({"input_as_shape": 1}, "argument 'input_as_shape' requires an input"),
    ],
)
def test_constant_fill_refuses_arguments_that_contradict(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=rf"ConstantFill 'y0'.*{message}"):
        run_operator("ConstantFill", [], **arguments)


def test_the_shape_comes_from_argument_input_or_values_of_the_input() -> None:
    assert run_operator("ConstantFill", [])[0].shape == ()
    assert run_operator("ConstantFill", [], shape=[0, 2])[0].shape == (0, 2)
    assert run_operator("ConstantFill", [np.zeros((3, 1))])[0].shape == (3, 1)
    assert run_operator("ConstantFill", [np.zeros((3, 1))], extra_shape=[4])[0].shape == (3, 1, 4)
    for dtype in (np.int32, np.int64):
        assert run_operator("ConstantFill", [np.array([2, 5], dtype)], input_as_shape=1)[0].shape == (2, 5)
    assert run_operator("ConstantFill", [np.array([2])], input_as_shape=1, extra_shape=[3])[0].shape == (2, 3)


def test_input_as_shape_follows_the_input_from_run_to_run() -> None:
    workspace = Workspace()
    fill = operator_def("ConstantFill", ["s"], ["y"], input_as_shape=1, value=1.0)
    workspace.feed_blob("s", [2])
    with SimpleNet(NetDef(name="fill", op=[fill]), workspace) as net:
        for size in (2, 5, 1):
            workspace.feed_blob("s", [size])
            net.run()
            assert workspace.fetch_blob("y").tolist() == [1.0] * size


def test_only_input_as_shape_makes_the_output_shape_depend_on_a_value() -> None:
    for by_value, shape in ((0, (2,)), (1, (2, 3))):
        fill = operator_def("ConstantFill", ["s"], ["y"], input_as_shape=by_value)
        net = build_graph(NetDef(name="n", op=[operator_def("Shape", ["x"], ["s"]), fill]))
        float32, int64 = (next(meta for meta in ALL_TYPES if meta.name == name) for name in ("float32", "int64"))
        types = infer_net(net, {"x": TensorType((2, 3), float32)}).blobs
        assert types["s"] == TensorType((2,), int64)
        assert types["y"] == TensorType(shape, float32)


def test_a_bad_shape_is_refused() -> None:
    with pytest.raises(ShapeError, match=r"no negative size, found \(2, -1\)"):
        run_operator("ConstantFill", [], shape=[2, -1])
    with pytest.raises(ShapeError, match="at most 64 axes"):
        run_operator("ConstantFill", [], shape=[1] * 65)
    with pytest.raises(ArgumentError, match="from the input or from 'shape', found both"):
        run_operator("ConstantFill", [np.zeros(2)], shape=[2])
    with pytest.raises(DagexecError, match="must be one of int32, int64, found float32"):
        run_operator("ConstantFill", [np.zeros(2, np.float32)], input_as_shape=1)
    workspace = workspace_of({"x": np.zeros(2, np.float32)})
    with pytest.raises(ShapeError, match="in place the output must have the input's shape and type"):
        workspace.run_operator_once(operator_def("ConstantFill", ["x"], ["x"], extra_shape=[2]))


@pytest.mark.parametrize("op_type", ["ConstantFill", "RangeFill", "XavierFill", "GaussianFill", "UniformIntFill"])
@pytest.mark.parametrize("shape", [[2**40, 2**10], [2**62, 2**62], [2**62, 4, 0], [2**63 - 1]])
def test_a_huge_shape_is_refused_before_memory_is_asked_for(op_type: str, shape: list[int]) -> None:
    with pytest.raises(ResourceError, match=r"needs|overflows"):
        run_operator(op_type, [], shape=shape)


GIVEN = {
    "GivenTensorFill": (np.float32, [0.5, -1.25, math.inf, 0.0]),
    "GivenTensorDoubleFill": (np.float64, [0.5, -1.25, 1e30, 0.0]),
    "GivenTensorIntFill": (np.int32, [1, -2, 2**31 - 1, -(2**31)]),
    "GivenTensorInt64Fill": (np.int64, [1, -2, 2**63 - 1, -(2**63)]),
    "GivenTensorInt16Fill": (np.int16, [1, -2, 2**15 - 1, 0]),
    "GivenTensorUInt8Fill": (np.uint8, [1, 2, 255, 0]),
    "GivenTensorBoolFill": (np.bool_, [1, 0, 0, 1]),
    "GivenTensorStringFill": (object, ["a", "", "µ", "longer text"]),
}


@pytest.mark.parametrize("op_type", GIVEN)
def test_given_tensors_hold_the_listed_values_in_order(op_type: str) -> None:
    dtype, values = GIVEN[op_type]
    [y] = run_operator(op_type, [], shape=[2, 2], values=values)
    assert y.dtype == dtype
    expected = [v.encode() if isinstance(v, str) else v for v in values]
    if dtype is np.float64:
        expected = [float(np.float32(v)) for v in values]
    assert [v for row in y.tolist() for v in row] == expected
    [empty] = run_operator(op_type, [], shape=[0], values=[])
    assert (empty.shape, empty.dtype) == ((0,), np.dtype(dtype))


def test_given_tensor_fill_follows_dtype_and_reads_integers_as_floats() -> None:
    [y] = run_operator("GivenTensorFill", [], shape=[2], values=[3, 4], dtype=10)
    assert (y.dtype, y.tolist()) == (np.dtype(np.int64), [3, 4])
    [y] = run_operator("GivenTensorFill", [], shape=[2], values=[3, 4])
    assert (y.dtype, y.tolist()) == (np.dtype(np.float32), [3.0, 4.0])
    [y] = run_operator("GivenTensorFill", [], shape=[2], values=[1.5, math.nan], dtype="float16")
    assert y.dtype == np.float16
    assert y[0] == 1.5
    assert math.isnan(y[1])


@pytest.mark.parametrize(
    ("op_type", "arguments", "message"),
    [
        ("GivenTensorFill", {"values": [1.0, 2.0, 3.0]}, r"must hold 4 values for shape \(2, 2\), found 3"),
        ("GivenTensorFill", {}, "argument 'values' is required"),
        ("GivenTensorIntFill", {"values": [1.0] * 4}, "must be a list of ints for int32, found"),
        ("GivenTensorStringFill", {"values": [1] * 4}, "must be a list of strings for string"),
        ("GivenTensorUInt8Fill", {"values": [0, 0, 0, 256]}, "argument 'values' must fit uint8, found 256"),
        ("GivenTensorIntFill", {"values": [0, 0, 0, -(2**31) - 1]}, "must fit int32, found -2147483649"),
    ],
)
def test_given_values_must_fit_shape_and_type(op_type: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(DagexecError, match=message):
        run_operator(op_type, [], shape=[2, 2], **arguments)


@pytest.mark.slow
@given(st.one_of(st.tuples(st.integers(0, 5), st.integers(0, 5)), st.integers(0, 4).map(lambda n: (n, n, n))))
@settings(max_examples=40, deadline=None)
def test_diagonal_fill_sets_where_all_indices_are_equal(shape: tuple[int, ...]) -> None:
    [y] = run_operator("DiagonalFill", [], shape=list(shape), value=2.0)
    for place in np.ndindex(shape):
        assert y[place] == (2.0 if len(set(place)) == 1 else 0.0)


def test_diagonal_fill_needs_a_diagonal() -> None:
    with pytest.raises(ShapeError, match=r"2 axes, or more of equal size, found \(2, 2, 3\)"):
        run_operator("DiagonalFill", [], shape=[2, 2, 3])
    [y] = run_operator("DiagonalFill", [], shape=[2, 2], value="x", dtype="string")
    assert y.tolist() == [[b"x", b""], [b"", b"x"]]


def test_range_fill_counts_from_zero() -> None:
    [y] = run_operator("RangeFill", [], shape=[2, 3])
    assert (y.dtype, y.tolist()) == (np.dtype(np.float32), [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]])


def test_xavier_fill_is_uniform_within_its_bound() -> None:
    [y] = draws(seeded("XavierFill", 1, shape=[200, 8, 5, 5]), 1)
    bound = math.sqrt(3 / (8 * 5 * 5))
    assert y.dtype == np.float32
    assert np.abs(y).max() <= bound * (1 + 1e-6)
    histogram = np.histogram(y, bins=8, range=(-bound, bound))[0] / y.size
    np.testing.assert_allclose(histogram, 1 / 8, atol=0.01)


def test_msra_fill_has_the_variance_of_its_fan_out() -> None:
    [y] = draws(seeded("MSRAFill", 1, shape=[64, 40, 5, 5]), 1)
    assert y.std() == pytest.approx(math.sqrt(2 / (64 * 25)), rel=0.02)
    assert abs(y.mean()) < 0.002
    assert np.mean(np.abs(y) < y.std()) == pytest.approx(math.erf(1 / math.sqrt(2)), abs=0.01)


def test_gaussian_and_uniform_fill_have_their_moments() -> None:
    [g] = draws(seeded("GaussianFill", 3, shape=[50000], mean=-2.0, std=0.5), 1)
    assert (g.mean(), g.std()) == (pytest.approx(-2, abs=0.02), pytest.approx(0.5, rel=0.02))
    [u] = draws(seeded("UniformFill", 3, shape=[50000], min=-1.0, max=3.0), 1)
    assert u.min() >= -1
    assert u.max() <= 3
    assert (u.mean(), u.std()) == (pytest.approx(1, abs=0.02), pytest.approx(4 / math.sqrt(12), rel=0.02))


def test_uniform_int_fill_includes_both_bounds() -> None:
    [y] = draws(seeded("UniformIntFill", 3, shape=[6000], min=-1, max=1), 1)
    assert y.dtype == np.int32
    values, counts = np.unique(y, return_counts=True)
    assert values.tolist() == [-1, 0, 1]
    np.testing.assert_allclose(counts, 2000, atol=200)
    [extreme] = draws(seeded("UniformIntFill", 3, shape=[4], min=-(2**31), max=2**31 - 1), 1)
    assert len(set(extreme.tolist())) == 4


def test_bounds_may_be_inputs_and_change_between_runs() -> None:
    definition = operator_def("UniformIntFill", ["like", "low", "high"], ["y"])
    workspace = workspace_of((("like", np.zeros(50)), ("low", np.int32(3)), ("high", np.int32(4))))
    with SimpleNet(NetDef(name="n", op=[definition]), workspace) as net:
        net.run()
        assert set(workspace.fetch_blob("y").tolist()) == {3, 4}
        workspace.feed_blob("high", np.int32(3))
        net.run()
        assert set(workspace.fetch_blob("y").tolist()) == {3}
        workspace.feed_blob("high", np.int32(2))
        with pytest.raises(OperatorError, match="min must not be above max, both finite; found 3 and 2"):
            net.run()


def test_bounds_and_deviations_are_checked() -> None:
    for op_type, arguments, message in (
        ("UniformFill", {"min": 1.0, "max": 0.0}, "'min' must not be above 'max', both finite; found 1.0 and 0.0"),
        ("UniformFill", {"max": math.inf}, "both finite"),
        ("UniformFill", {"max": math.nan}, "'max' is not a number"),
        ("UniformIntFill", {"min": 2}, "'min' and 'max' must be int32, in order; found 2 and 1"),
        ("UniformIntFill", {"max": 2**31}, "must be int32"),
        ("GaussianFill", {"std": -1.0}, "'std' at least 0, found 0.0 and -1.0"),
        ("GaussianFill", {"std": math.nan}, "'std' is not a number"),
    ):
        with pytest.raises(ArgumentError, match=message):
            run_operator(op_type, [], shape=[2], **arguments)
    with pytest.raises(ShapeError, match="at least 2 axes"):
        run_operator("MSRAFill", [], shape=[2])
    with pytest.raises(ShapeError, match="at least 1 axis"):
        run_operator("XavierFill", [])
    with pytest.raises(ShapeError, match="'x1' must hold 1 element"):
        run_operator("UniformFill", [np.zeros(2), np.zeros(2, np.float32), np.ones(1, np.float32)])
    with pytest.raises(ShapeError, match="only one of them"):
        run_operator("UniformFill", [np.zeros(2), np.zeros(1, np.float32)])


@pytest.mark.parametrize("op_type", ["XavierFill", "MSRAFill", "GaussianFill", "UniformFill", "UniformIntFill"])
def test_a_seed_repeats_the_draws_and_every_run_draws_anew(op_type: str) -> None:
    arguments: dict[str, ArgumentValue] = {"shape": [4, 5]} | ({"max": 10**6} if op_type == "UniformIntFill" else {})
    first = draws(seeded(op_type, 7, **arguments), 2)
    again = draws(seeded(op_type, 7, **arguments), 2)
    other = draws(seeded(op_type, 8, **arguments), 1)
    unseeded = draws(operator_def(op_type, [], ["y"], **arguments), 1)
    for one, two in zip(first, again, strict=True):
        assert one.tobytes() == two.tobytes()
    assert len({array.tobytes() for array in (*first, *other, *unseeded)}) == 4


def test_random_fill_of_nothing_is_nothing() -> None:
    for op_type in ("XavierFill", "MSRAFill", "GaussianFill", "UniformFill", "UniformIntFill"):
        assert draws(operator_def(op_type, [], ["y"], shape=[0, 3]), 1)[0].shape == (0, 3)
        assert draws(operator_def(op_type, [], ["y"], shape=[3, 0]), 1)[0].shape == (3, 0)
