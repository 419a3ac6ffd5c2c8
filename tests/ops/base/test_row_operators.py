"""Every row operator against its expression in float64, and its gradient against differences: on all engines."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from dagexec import NetDef, OperatorDef, Workspace
from dagexec.core.device import Device
from dagexec.core.dtypes import FLOAT64
from dagexec.core.expressions import evaluated
from dagexec.core.gradient import gradient, has_maker
from dagexec.core.registry import has_engine, operator_class, operator_module, registered_operators, schema_of
from dagexec.ops.base.expressed import Definition
from dagexec.ops.base.row_operator import RowOperator, all_axes
from dagexec.scheduler.nets.simple import SimpleNet
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
OF_ROWS = [name for name in ROW_OPERATORS if operator_class(name).form.members is not all_axes]
"""Without those of which all elements are one row."""
DIFFERENTIABLE = [name for name in ROW_OPERATORS if has_maker(name)]
SHAPES = [(3, 5), (2, 1), (7, 129), (2, 3, 2100), (4, 0), (0, 4)]
CUDA = Device("cuda", 0)
needs_compiler = pytest.mark.skipif(not (has_compiler() or has_gpu()), reason="needs a GPU, or g++ to emulate one")


def numbers(shape: tuple[int, ...], dtype: Any, seed: int = 0) -> Array:
    return np.random.default_rng(seed).normal(0, 1, shape).astype(dtype)


def inputs(op_type: str, shape: tuple[int, ...], dtype: Any) -> list[Array]:
    """Arrays for each input; of those of logarithms, between 0 and 1."""
    arrays = [numbers(shape, dtype, 2 * seed) for seed in range(forward(op_type).arity)]
    return [(1 / (1 + np.abs(one))).astype(dtype) for one in arrays] if op_type == "CrossEntropy" else arrays


def forward(op_type: str) -> Definition:
    formula = operator_class(op_type).formula
    assert isinstance(formula, Definition)
    return formula


def along(op_type: str, axis: int) -> dict[str, int]:
    """The arguments that say one axis, if there are any."""
    known = {"axis": axis, "single_axis": 1}
    return {name: value for name, value in known.items() if name in operator_class(op_type).schema.args}


def axes_of(op_type: str, rank: int) -> list[int]:
    """The axes that members may be along, one after another; one stands for those that an operator is fixed to."""
    return list(range(rank)) if along(op_type, 0) else [rank - 1]


def reference(op_type: str, arrays: list[Array], axis: int) -> Array:
    """The expression in float64, along one axis, or those that the operator is fixed to."""
    definition, kind, rank = forward(op_type), operator_class(op_type), arrays[0].ndim
    members = (axis,) if along(op_type, axis) else tuple(kind.form.members(None, rank))
    wide = [one.astype(np.float64) for one in arrays]
    [y] = evaluated([definition.result(definition.defaults, FLOAT64)], wide, members)
    return y.reshape(y.squeeze(members).shape or kind.form.of_all) if kind.form.joins else y


@pytest.mark.parametrize("engine", ["", pytest.param("ONEDNN", marks=needs_onednn)])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("op_type", ROW_OPERATORS)
def test_values_are_those_of_the_expression(op_type: str, shape: tuple[int, ...], engine: str) -> None:
    if engine and not has_engine(op_type, engine):
        pytest.skip("computed by the default engine")
    for dtype, tolerance in ((np.float32, 1e-6), (np.float64, 1e-13), (np.float16, 2e-3), (ml_dtypes.bfloat16, 2e-2)):
        arrays = inputs(op_type, shape, dtype)
        for axis in axes_of(op_type, len(shape)):
            [y] = run_operator(op_type, list(arrays), engine=engine, **along(op_type, axis))
            if arrays[0].size or operator_class(op_type).form.joins:
                wanted = reference(op_type, arrays, axis)
            else:
                wanted = arrays[0]
            assert y.dtype == dtype
            assert y.shape == wanted.shape
            terms = math.sqrt(max(1, arrays[0].size) / max(1, y.size))  # which may cancel
            np.testing.assert_allclose(y.astype(np.float64), wanted, rtol=tolerance * 4, atol=tolerance * terms)


@pytest.mark.parametrize("engine", ["", pytest.param("ONEDNN", marks=needs_onednn)])
@pytest.mark.parametrize("op_type", OF_ROWS)
def test_nan_is_of_its_row_alone(op_type: str, engine: str) -> None:
    if engine and not has_engine(op_type, engine):
        pytest.skip("computed by the default engine")
    for place in (0, 7, 40):
        arrays = inputs(op_type, (5, 41), np.float32)
        arrays[0][2, place] = np.nan
        y = run_operator(op_type, list(arrays), engine=engine)[0].reshape(5, -1)
        np.testing.assert_array_equal(np.isnan(y).any(axis=1), np.arange(5) == 2)
        assert np.isnan(y[2, min(place, y.shape[1] - 1)])


@pytest.mark.parametrize("engine", ["", pytest.param("ONEDNN", marks=needs_onednn)])
@pytest.mark.parametrize("op_type", OF_ROWS)
def test_a_rows_bytes_do_not_depend_on_the_batch(op_type: str, engine: str) -> None:
    if engine and not has_engine(op_type, engine):
        pytest.skip("computed by the default engine")
    arrays = inputs(op_type, (700, 233), np.float32)
    [y] = run_operator(op_type, list(arrays), engine=engine)
    for rows in (slice(0, 1), slice(3, 8), slice(100, 500)):
        [part] = run_operator(op_type, [one[rows] for one in arrays], engine=engine)
        assert part.tobytes() == y[rows].tobytes()


def differences(op_type: str, arrays: list[Array], position: int, dy: Array, axis: int) -> Array:
    """The slope of sum(Y dY) by each element of an input."""
    slopes, step = np.empty_like(arrays[position]), 1e-6
    for place in np.ndindex(slopes.shape):
        sums = []
        for move in (-step, step):
            moved = [one.copy() for one in arrays]
            moved[position][place] += move
            sums.append(float((reference(op_type, moved, axis) * dy).sum()))
        slopes[place] = (sums[1] - sums[0]) / (2 * step)
    return slopes


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("op_type", DIFFERENTIABLE)
def test_gradients_are_the_slopes_of_the_expression(op_type: str, axis: int) -> None:
    arrays = inputs(op_type, (4, 7), np.float64)
    dy = numbers(reference(op_type, arrays, axis).shape, np.float64, 1)
    definition = operator_def(op_type, [f"x{index}" for index in range(len(arrays))], ["y"], **along(op_type, axis))
    of_inputs = operator_class(f"{op_type}Gradient").formula.of_inputs
    for position, found in analytic_gradients(definition, arrays, {0: dy}, of_inputs).items():
        wanted = differences(op_type, arrays, position, dy, axis)
        np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-7, err_msg=f"input {position}")


def gradient_operators(op_type: str, arrays: list[Array]) -> tuple[list[OperatorDef], dict[str, Array]]:
    """The operator's gradient, and what it reads: inputs, result, and the gradient of that."""
    blobs = {f"x{index}": one for index, one in enumerate(arrays)}
    arguments = along(op_type, arrays[0].ndim - 1)
    made = gradient(operator_def(op_type, list(blobs), ["y"], **arguments), ["dy"]).operators
    [blobs["y"]] = run_operator(op_type, list(arrays), **arguments)
    blobs["dy"] = numbers(blobs["y"].shape, arrays[0].dtype, 1)
    return list(made), blobs


@needs_onednn
@pytest.mark.parametrize("members", [1, 8, 37, 1024, 5000])
@pytest.mark.parametrize("op_type", DIFFERENTIABLE)
def test_gradients_by_kernels_are_those_of_float64(op_type: str, members: int) -> None:
    made, blobs = gradient_operators(op_type, inputs(op_type, (6, members), np.float64))
    for definition in made:
        wide, count = [blobs[name] for name in definition.input], len(definition.output)
        for engine, tolerance in (("", 2e-5), ("ONEDNN", 2e-4)):
            if engine and not has_engine(definition.type, engine):
                continue
            narrow = [one.astype(np.float32) for one in wide]
            arguments = along(op_type, 1)
            wanted = run_operator(definition.type, list(wide), count, **arguments)
            found = run_operator(definition.type, narrow, count, engine=engine, **arguments)
            for one, other in zip(found, wanted, strict=True):
                np.testing.assert_allclose(one, other, rtol=tolerance, atol=2e-6)


@pytest.mark.parametrize("engine", ["", pytest.param("ONEDNN", marks=needs_onednn)])
@pytest.mark.parametrize("op_type", DIFFERENTIABLE)
def test_a_gradient_has_the_same_bytes_in_the_place_of_what_it_may_overwrite(op_type: str, engine: str) -> None:
    made, blobs = gradient_operators(op_type, inputs(op_type, (300, 41), np.float32))
    for definition in made:
        definition.engine = engine
        arrays = [blobs[name] for name in definition.input]
        apart = run_operator(definition.type, list(arrays), len(definition.output), engine=engine, **along(op_type, 1))
        for position, name in enumerate(definition.input):
            if schema_of(definition.type).inplace(position, 0):
                over = OperatorDef()
                over.CopyFrom(definition)
                over.output[0] = name
                workspace = Workspace()
                for one in definition.input:
                    workspace.feed_blob(one, blobs[one])
                with SimpleNet(NetDef(name="n", op=[over]), workspace) as net:
                    net.run()
                assert workspace.fetch_blob(name).tobytes() == apart[0].tobytes()


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("op_type", ROW_OPERATORS)
def test_cuda_computes_the_expression_and_its_gradient(op_type: str) -> None:
    arrays = inputs(op_type, (5, 300), np.float32)
    blobs = {f"x{index}": one for index, one in enumerate(arrays)}
    made = [operator_def(op_type, list(blobs), ["y"])]
    if has_maker(op_type):
        more, blobs = gradient_operators(op_type, arrays)
        made += more
    for definition in made:
        with cuda_devices():
            found = on_device(CUDA, definition, {name: blobs[name] for name in definition.input})
        wide = [blobs[name].astype(np.float64) for name in definition.input]
        wanted = run_operator(definition.type, wide, len(definition.output), **along(op_type, 1))
        for one, other in zip(found, wanted, strict=True):
            assert_rounds_to(one, other.astype(np.float32), f"{definition.type} on {CUDA}", list(blobs.values()))
