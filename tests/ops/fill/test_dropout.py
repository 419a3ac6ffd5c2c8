"""Dropout: inference, masks in training and what decides them, and the gradient."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagexec import NetDef, OperatorDef
from dagexec.core.arguments import make_argument
from dagexec.core.gradient import gradient
from dagexec.errors import ArgumentError, SchemaError, ShapeError
from dagexec.scheduler.nets.simple import SimpleNet
from tests.ops.running import Array, operator_def, run_net, run_operator, workspace_of


def test_output_equals_the_input_and_the_mask_is_all_true() -> None:
    x = np.random.default_rng(0).normal(size=(2, 3)).astype(np.float32)
    y, mask = run_operator("Dropout", [x], 2, is_test=1, ratio=0.25)
    np.testing.assert_array_equal(y, x)
    assert mask.dtype == np.bool_
    assert mask.shape == x.shape
    assert mask.all()


def test_output_has_its_own_values_when_its_input_is_overwritten_later() -> None:
    workspace = workspace_of({"x": np.array([-1.0, 2.0], np.float32)})
    ops = [operator_def("Dropout", ["x"], ["y"], is_test=1), operator_def("Relu", ["x"], ["x"])]
    with SimpleNet(NetDef(name="n", op=ops, external_output=["x", "y"]), workspace) as net:
        net.run()
    assert workspace.fetch_blob("y").tolist() == [-1, 2]
    assert workspace.fetch_blob("x").tolist() == [0, 2]


def dropout(
    seed: int | None, *, name: str = "y", source: str = "x", iteration: bool = True, ratio: float = 0.5
) -> OperatorDef:
    inputs = [source, "iteration"] if iteration else [source]
    definition = operator_def("Dropout", inputs, [name, f"{name}_mask"], is_test=0, ratio=ratio)
    if seed is not None:
        definition.device_option.random_seed = seed
    return definition


def masks(
    operators: list[OperatorDef],
    iterations: list[int],
    net_type: str = "simple",
    workers: int = 1,
    shape: tuple[int, ...] = (40, 1000),
) -> list[dict[str, Array]]:
    """The masks of each run, by name."""
    workspace = workspace_of({"x": np.ones(shape, np.float32), "iteration": np.array([0], np.int64)})
    net = NetDef(name="n", op=operators, type=net_type, num_workers=workers)
    found = []
    with workspace.create_net(net) as made:
        for number in iterations:
            workspace.feed_blob("iteration", np.array([number], np.int64))
            made.run()
            found.append({op.output[1]: workspace.fetch_blob(op.output[1]).copy() for op in operators})
    return found


def test_the_mask_of_an_iteration_is_the_same_in_a_run_that_is_resumed_there() -> None:
    through = masks([dropout(7)], [0, 1, 2])
    [resumed] = masks([dropout(7)], [2])
    np.testing.assert_array_equal(through[2]["y_mask"], resumed["y_mask"])
    assert (through[0]["y_mask"] != through[1]["y_mask"]).mean() > 0.4


def test_a_layer_has_the_mask_of_the_name_it_is_given_wherever_it_is() -> None:
    first, second = dropout(7, name="one/y"), dropout(7, name="two/y")
    [plain] = masks([first, second], [3])
    assert (plain["one/y_mask"] != plain["two/y_mask"]).mean() > 0.4
    for definition in (first, second):
        definition.arg.append(make_argument("drawn_as", "y"))
    [named] = masks([first, second], [3])
    [expected] = masks([dropout(7)], [3])
    np.testing.assert_array_equal(named["one/y_mask"], expected["y_mask"])
    np.testing.assert_array_equal(named["two/y_mask"], expected["y_mask"])


@pytest.mark.parametrize("iteration", [True, False])
def test_masks_are_the_same_bytes_under_every_net_type_and_number_of_workers(iteration: bool) -> None:
    operators = [dropout(seed, name=f"y{seed}", iteration=iteration) for seed in range(4)]
    expected = masks(operators, [0, 1])
    for net_type in ("dag", "async_dag"):
        for workers in range(1, 5):
            for one, other in zip(expected, masks(operators, [0, 1], net_type, workers), strict=True):
                for name, mask in one.items():
                    assert mask.tobytes() == other[name].tobytes(), (net_type, workers, name)


def correlation(one: Array, other: Array) -> float:
    return float(np.corrcoef(one.reshape(-1), other.reshape(-1))[0, 1])


@pytest.mark.parametrize(
    "operators",
    [
        [dropout(1), dropout(2, name="z")],
        [dropout(1), dropout(1, name="z")],
        [dropout(None), dropout(None, name="z")],
        [dropout(1, iteration=False), dropout(2, name="z", iteration=False)],
    ],
    ids=["two seeds", "one seed", "no seed", "two seeds, no iteration"],
)
def test_masks_of_two_dropouts_and_of_two_runs_are_independent(operators: list[OperatorDef]) -> None:
    first, second = masks(operators, [0, 1])
    bound = 5 / np.sqrt(40_000)
    assert abs(correlation(first["y_mask"], first["z_mask"])) < bound
    assert abs(correlation(first["y_mask"], second["y_mask"])) < bound
    assert abs(correlation(first["z_mask"], second["z_mask"])) < bound


def test_without_a_seed_each_net_draws_other_masks() -> None:
    one, other = masks([dropout(None)], [3])[0]["y_mask"], masks([dropout(None)], [3])[0]["y_mask"]
    assert abs(correlation(one, other)) < 0.05


@pytest.mark.parametrize("ratio", [0.001, 0.1, 0.3, 0.5, 0.75, 0.99])
@pytest.mark.parametrize("iteration", [True, False])
def test_kept_elements_are_as_many_as_the_ratio_says_in_every_part_of_the_mask(ratio: float, iteration: bool) -> None:
    size = 1 << 20
    [found] = masks([dropout(11, iteration=iteration, ratio=ratio)], [5], shape=(size,))
    kept = found["y_mask"].reshape(64, -1).sum(axis=1)
    expected, variance = (1 - ratio) * size / 64, ratio * (1 - ratio) * size / 64
    chi_square = ((kept - expected) ** 2 / variance).sum()
    assert 25 < chi_square < 130  # of 64 degrees of freedom: mean 64, deviation 11.3
    assert abs(correlation(found["y_mask"][1:], found["y_mask"][:-1])) < 5 / np.sqrt(size)


def test_a_mask_does_not_depend_on_how_many_elements_there_are() -> None:
    [whole] = masks([dropout(3)], [1], shape=(100_003,))
    [head] = masks([dropout(3)], [1], shape=(40_001,))
    np.testing.assert_array_equal(whole["y_mask"][:40_001], head["y_mask"])


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("inplace", [False, True])
def test_output_is_the_input_times_mask_over_what_is_kept(dtype: Any, inplace: bool) -> None:
    x = np.random.default_rng(1).normal(size=(3, 50_000)).astype(dtype)
    x[0, 7] = np.nan
    workspace = workspace_of({"x": x, "iteration": np.array([9])})
    definition = dropout(2, name="x" if inplace else "y", ratio=0.25)
    run_net(workspace, definition)
    mask, y = workspace.fetch_blob(definition.output[1]), workspace.fetch_blob(definition.output[0])
    assert y.dtype == dtype
    expected = np.where(mask, x.astype(np.float64) / 0.75, x.astype(np.float64) * 0)
    tolerance = {8: 1e-15, 4: 3e-7}.get(np.dtype(dtype).itemsize, 1e-2)
    np.testing.assert_allclose(y.astype(np.float64), expected, rtol=tolerance, atol=1e-7)
    assert np.isnan(y[0, 7].astype(np.float64))


def test_ratio_zero_keeps_everything() -> None:
    x = np.random.default_rng(2).normal(size=(4, 5))
    y, mask = run_operator("Dropout", [x, np.array([0])], 2, is_test=0, ratio=0.0)
    np.testing.assert_array_equal(y, x)
    assert mask.all()


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(
    shape=st.lists(st.integers(0, 5), max_size=4),
    ratio=st.floats(0, 0.95),
    dtype=st.sampled_from([np.float32, np.float64, np.float16]),
)
def test_gradient_is_that_of_a_product_with_the_mask(shape: list[int], ratio: float, dtype: Any) -> None:
    rng = np.random.default_rng(0)
    dy, mask = rng.normal(size=shape).astype(dtype), rng.uniform(size=shape) > ratio
    [dx] = run_operator("DropoutGrad", [dy, mask], is_test=0, ratio=ratio)
    assert dx.dtype == dtype
    expected = np.where(mask, dy.astype(np.float64), 0) / (1 - ratio)
    np.testing.assert_allclose(dx.astype(np.float64), expected, rtol=2e-3 if dtype == np.float16 else 1e-6)
    np.testing.assert_array_equal(run_operator("DropoutGrad", [dy], is_test=1, ratio=ratio)[0], dy)


def test_gradient_maker_uses_the_mask_in_training_only() -> None:
    [training] = gradient(dropout(1), ["dy", None]).operators
    assert (training.type, list(training.input), list(training.output)) == ("DropoutGrad", ["dy", "y_mask"], ["x_grad"])
    [inference] = gradient(operator_def("Dropout", ["x"], ["y"], is_test=1), ["dy"]).operators
    assert list(inference.input) == ["dy"]


def test_dropout_refuses_what_does_not_fit() -> None:
    x = np.ones(2, np.float32)
    with pytest.raises(SchemaError, match="argument 'is_test' is required"):
        run_operator("Dropout", [x])
    for ratio in (1.0, -0.5):
        with pytest.raises(ArgumentError, match=rf"'ratio' must be in \[0, 1\), found {ratio:g}"):
            run_operator("Dropout", [x], is_test=1, ratio=ratio)
    with pytest.raises(ArgumentError, match="'ratio' is not a number"):
        run_operator("Dropout", [x], is_test=1, ratio=float("nan"))
    with pytest.raises(ShapeError, match=r"training \(is_test=0\) needs two outputs"):
        run_operator("Dropout", [x], is_test=0)
    with pytest.raises(ShapeError, match=r"the iteration must be one int64, found shape \(2,\)"):
        run_operator("Dropout", [x, np.zeros(2, np.int64)], 2, is_test=0)
    with pytest.raises(ShapeError, match=r"'x0' must be one of float32.*found int32"):
        run_operator("Dropout", [np.ones(2, np.int32)], 2, is_test=0)
    with pytest.raises(ShapeError, match=r"'x1' must have shape \(2,\).*found \(3,\)"):
        run_operator("DropoutGrad", [x, np.ones(3, np.bool_)], is_test=0)
    with pytest.raises(ShapeError, match=r"needs two inputs, dY and the mask"):
        run_operator("DropoutGrad", [x], is_test=0)
