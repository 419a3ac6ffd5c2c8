"""Every row operator against its expression in float64, and its gradient against differences: on all engines."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from dagexec.core.device import Device
from dagexec.core.dtypes import FLOAT64
from dagexec.core.expressions import evaluated
from dagexec.core.gradient import gradient, has_maker
from dagexec.core.registry import has_engine, operator_class, operator_module, registered_operators
from dagexec.ops.base.expressed import Definition
from dagexec.ops.base.row_operator import RowOperator
from tests.cuda.emulated import cuda_devices, has_compiler, has_gpu
from tests.ops.gradient_checks import analytic_gradients
from tests.ops.onednn.engine import needs_onednn
from tests.ops.running import Array, assert_rounds_to, on_device, operator_def, run_operator

ROW_OPERATORS = [
    name
    for name in registered_operators()
    if operator_module(name).startswith("dagexec.ops.")
    and issubclass(operator_class(name), RowOperator)
    and isinstance(operator_class(name).formula, Definition)
]
DIFFERENTIABLE = [name for name in ROW_OPERATORS if has_maker(name)]
SHAPES = [(3, 5), (2, 1), (7, 129), (2, 3, 2100), (4, 0), (0, 4)]
CUDA = Device("cuda", 0)
needs_compiler = pytest.mark.skipif(not (has_compiler() or has_gpu()), reason="needs a GPU, or g++ to emulate one")


def numbers(shape: tuple[int, ...], dtype: Any, seed: int = 0) -> Array:
    return np.random.default_rng(seed).normal(0, 1, shape).astype(dtype)


def along(op_type: str, axis: int) -> dict[str, int]:
    """The arguments that say one axis."""
    return {"axis": axis, "single_axis": 1} if "single_axis" in operator_class(op_type).schema.args else {"axis": axis}


def reference(op_type: str, x: Array, axis: int) -> Array:
    """The expression in float64, along one axis."""
    formula = operator_class(op_type).formula
    assert isinstance(formula, Definition)
    return evaluated([formula.result(formula.defaults, FLOAT64)], [x.astype(np.float64)], axis)[0]


@pytest.mark.parametrize("engine", ["", pytest.param("ONEDNN", marks=needs_onednn)])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("op_type", ROW_OPERATORS)
def test_values_are_those_of_the_expression(op_type: str, shape: tuple[int, ...], engine: str) -> None:
    if engine and not has_engine(op_type, engine):
        pytest.skip("computed by the default engine")
    for dtype, tolerance in ((np.float32, 1e-6), (np.float64, 1e-13), (np.float16, 2e-3), (ml_dtypes.bfloat16, 2e-2)):
        x = numbers(shape, dtype)
        for axis in range(x.ndim):
            [y] = run_operator(op_type, [x], engine=engine, **along(op_type, axis))
            wanted = reference(op_type, x, axis) if x.size else x
            assert y.dtype == x.dtype
            np.testing.assert_allclose(y.astype(np.float64), wanted, rtol=tolerance * 4, atol=tolerance)


@pytest.mark.parametrize("engine", ["", pytest.param("ONEDNN", marks=needs_onednn)])
@pytest.mark.parametrize("op_type", ROW_OPERATORS)
def test_nan_is_of_its_row_alone(op_type: str, engine: str) -> None:
    if engine and not has_engine(op_type, engine):
        pytest.skip("computed by the default engine")
    for place in (0, 7, 40):
        x = numbers((5, 41), np.float32)
        x[2, place] = np.nan
        [y] = run_operator(op_type, [x], engine=engine)
        np.testing.assert_array_equal(np.isnan(y).any(axis=1), np.arange(5) == 2)
        assert np.isnan(y[2, place])


@pytest.mark.parametrize("engine", ["", pytest.param("ONEDNN", marks=needs_onednn)])
@pytest.mark.parametrize("op_type", ROW_OPERATORS)
def test_a_rows_bytes_do_not_depend_on_the_batch(op_type: str, engine: str) -> None:
    if engine and not has_engine(op_type, engine):
        pytest.skip("computed by the default engine")
    x = numbers((700, 233), np.float32)
    [y] = run_operator(op_type, [x], engine=engine)
    for rows in (slice(0, 1), slice(3, 8), slice(100, 500)):
        assert run_operator(op_type, [x[rows]], engine=engine)[0].tobytes() == y[rows].tobytes()


def differences(op_type: str, x: Array, dy: Array, axis: int, step: float = 1e-6) -> Array:
    """The slope of sum(Y dY) by each element of X."""
    slopes = np.empty_like(x)
    for place in np.ndindex(x.shape):
        moved = [x.copy(), x.copy()]
        moved[0][place] -= step
        moved[1][place] += step
        low, high = (float((reference(op_type, one, axis) * dy).sum()) for one in moved)
        slopes[place] = (high - low) / (2 * step)
    return slopes


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("op_type", DIFFERENTIABLE)
def test_gradients_are_the_slopes_of_the_expression(op_type: str, axis: int) -> None:
    x, dy = numbers((4, 7), np.float64), numbers((4, 7), np.float64, 1)
    definition = operator_def(op_type, ["x0"], ["y"], **along(op_type, axis))
    [found] = analytic_gradients(definition, [x], {0: dy}, [0]).values()
    np.testing.assert_allclose(found, differences(op_type, x, dy, axis), rtol=1e-6, atol=1e-7)


@needs_onednn
@pytest.mark.parametrize("members", [1, 8, 37, 1024, 5000])
@pytest.mark.parametrize("op_type", DIFFERENTIABLE)
def test_gradients_by_kernels_are_those_of_float64(op_type: str, members: int) -> None:
    x, dy = numbers((6, members), np.float64), numbers((6, members), np.float64, 1)
    made = gradient(operator_def(op_type, ["x"], ["y"], **along(op_type, 1)), ["dy"]).operators
    [y] = run_operator(op_type, [x], **along(op_type, 1))
    blobs = {"x": x, "y": y, "dy": dy}
    for definition in made:
        arguments = along(op_type, 1)
        wide = [blobs[name] for name in definition.input]
        [wanted] = run_operator(definition.type, list(wide), **arguments)
        [found] = run_operator(definition.type, [one.astype(np.float32) for one in wide], engine="ONEDNN", **arguments)
        np.testing.assert_allclose(found, wanted, rtol=2e-4, atol=2e-6)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("op_type", ROW_OPERATORS)
def test_cuda_computes_the_expression_and_its_gradient(op_type: str) -> None:
    x = numbers((5, 300), np.float32)
    blobs = {"x": x, "dy": numbers((5, 300), np.float32, 1), "y": run_operator(op_type, [x])[0]}
    made = [operator_def(op_type, ["x"], ["y"])]
    made += gradient(made[0], ["dy"]).operators if has_maker(op_type) else []
    for definition in made:
        with cuda_devices():
            [found] = on_device(CUDA, definition, {name: blobs[name] for name in definition.input})
        [wanted] = run_operator(definition.type, [blobs[name].astype(np.float64) for name in definition.input])
        assert_rounds_to(found, wanted.astype(np.float32), f"{definition.type} on {CUDA}", list(blobs.values()))
