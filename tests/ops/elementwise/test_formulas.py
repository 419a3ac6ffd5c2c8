"""Every operator that declares a formula against it: values, gradients, and what all element-wise operators promise."""

from __future__ import annotations

import math
import warnings
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import BroadcastableShapes, mutually_broadcastable_shapes

from dagexec import Workspace
from dagexec.core import registry
from dagexec.core.device import Device
from dagexec.core.gradient import gradient
from dagexec.core.registry import has_engine, registered_engines, schema_of
from dagexec.errors import ShapeError
from dagexec.ops.engines.onednn.expressions import ExpressionKernel
from tests.cuda.emulated import cuda_devices, has_compiler, has_gpu
from tests.ops.formulas import (
    Values,
    arity,
    cases,
    differentiable,
    expected,
    inputs,
    slopes,
    smooth_inputs,
    takes,
    with_formulas,
)
from tests.ops.gradient_checks import analytic_gradients
from tests.ops.onednn.engine import AVX2, AVX512, fallbacks, has_vectors_of, needs_onednn
from tests.ops.running import Array, assert_rounds_to, on_device, operator_def, run_net, run_operator

FLOAT = [name for name in with_formulas() if takes(name, np.float32)]
INTEGER = [name for name in with_formulas() if takes(name, np.int32) and name != "Div"]
BOOLEAN = [name for name in with_formulas() if takes(name, np.bool_)]
IN_PLACE = [name for name in FLOAT if schema_of(name).inplace(0, 0)]
ONEDNN = [name for name in FLOAT if has_engine(name, "ONEDNN") and name != "Pow"]
"""Without the one whose kernel takes one constant exponent."""
UNARY = [name for name in FLOAT if arity(name) == 1]
DIFFERENTIABLE = differentiable()
LIBRARY_IS_INEXACT = {"Gelu", "Log"}
"""What the default engine computes in place of oneDNN, see `dagexec.ops.engines.onednn.accuracy`; Gelu by tanh is
oneDNN's."""
KERNEL_ALONE = {name for name in ONEDNN if issubclass(registry._operators["cpu", name, "ONEDNN"], ExpressionKernel)}
"""What a kernel of our own computes in float32 from AVX2 on, and the default engine elsewhere."""

NUMPY_TYPES: list[type] = [np.float32, np.float64, np.int64, np.uint8, np.bool_]
EXTREME = np.array([0.0, -0.0, 1e-30, -1e-30, 100, -100, 1000, -1000, 1e30, -1e30, 3e38, -3e38]) / 4
CUDA = Device("cuda", 0)
needs_compiler = pytest.mark.skipif(not (has_compiler() or has_gpu()), reason="needs a GPU, or g++ to emulate one")


def net_of(op_type: str, arrays: list[Array], output: str, engine: str = "", **arguments: Any) -> Array:
    """The output of an operator in a net, which may be one of its inputs x0, x1, ..."""
    workspace, names = Workspace(), [f"x{index}" for index in range(len(arrays))]
    for name, array in zip(names, arrays, strict=True):
        workspace.feed_blob(name, array)
    definition = operator_def(op_type, names, [output], engine=engine, **arguments)
    run_net(workspace, definition)
    return workspace.fetch_blob(output)


@pytest.mark.parametrize(("op_type", "arguments"), cases(FLOAT))
@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 1e-6), (np.float64, 1e-13)])
def test_values_are_those_of_the_formula(op_type: str, arguments: Values, dtype: type, tolerance: float) -> None:
    arrays = inputs(op_type, (3, 1000), dtype)
    [y] = run_operator(op_type, list(arrays), **arguments)
    wanted = expected(op_type, arguments, arrays)
    assert y.dtype == wanted.dtype
    np.testing.assert_allclose(y, wanted, rtol=tolerance * 4, atol=tolerance)


@pytest.mark.parametrize(("op_type", "arguments"), cases(UNARY))
def test_values_at_extremes_are_right_without_a_warning(op_type: str, arguments: Values) -> None:
    x = EXTREME.astype(np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        [y] = run_operator(op_type, [x], **arguments)
    np.testing.assert_allclose(y, expected(op_type, arguments, [x]), rtol=3e-6, atol=1e-7)


@pytest.mark.parametrize(("op_type", "arguments"), cases(FLOAT))
@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float16, 1e-3), (ml_dtypes.bfloat16, 8e-3)])
def test_16_bit_floats_are_rounded_once(op_type: str, arguments: Values, dtype: Any, tolerance: float) -> None:
    arrays = inputs(op_type, 3000, dtype)
    [y] = run_operator(op_type, list(arrays), **arguments)
    wanted = expected(op_type, arguments, arrays)
    assert y.dtype == wanted.dtype
    np.testing.assert_allclose(y.astype(np.float64), wanted.astype(np.float64), rtol=tolerance, atol=tolerance / 8)


@pytest.mark.parametrize("op_type", INTEGER)
def test_integers_stay_in_their_type(op_type: str) -> None:
    arrays = [np.array([-3, 0, 5, 2], np.int32) + number for number in range(arity(op_type))]
    np.testing.assert_array_equal(run_operator(op_type, list(arrays))[0], expected(op_type, {}, arrays), strict=True)


@pytest.mark.parametrize("op_type", [name for name in FLOAT if not takes(name, np.int32)])
def test_what_takes_no_integers_says_so_and_names_the_blob(op_type: str) -> None:
    with pytest.raises(ShapeError, match=r"'x0' must be one of float32.*found int32"):
        run_operator(op_type, [np.array([1, 2], np.int32)] * arity(op_type))


@pytest.mark.parametrize("op_type", BOOLEAN)
def test_logic_is_that_of_the_formula(op_type: str) -> None:
    arrays = [np.array([True, True, False, False]), np.array([True, False, True, False])][: arity(op_type)]
    np.testing.assert_array_equal(run_operator(op_type, list(arrays))[0], expected(op_type, {}, arrays), strict=True)


@pytest.mark.parametrize(("op_type", "arguments"), cases(FLOAT))
def test_a_tensor_of_several_pieces_has_the_values_of_its_parts(op_type: str, arguments: Values) -> None:
    arrays = inputs(op_type, 150_001, np.float32)
    [whole] = run_operator(op_type, list(arrays), **arguments)
    parts = [run_operator(op_type, [x[part] for x in arrays], **arguments)[0] for part in np.s_[:70_000, 70_000:]]
    np.testing.assert_array_equal(whole, np.concatenate(parts))


@pytest.mark.parametrize(("op_type", "arguments"), cases(IN_PLACE))
def test_in_place_it_gives_the_same_bytes(op_type: str, arguments: Values) -> None:
    arrays = inputs(op_type, 70_000, np.float32)
    found = net_of(op_type, arrays, "x0", **arguments)
    assert found.tobytes() == net_of(op_type, arrays, "y", **arguments).tobytes()


@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (2, 3, 4, 1)])
@pytest.mark.parametrize("op_type", FLOAT)
def test_any_shape_is_taken(op_type: str, shape: tuple[int, ...]) -> None:
    arrays = inputs(op_type, shape, np.float32)
    [y] = run_operator(op_type, list(arrays))
    assert y.shape == shape
    np.testing.assert_allclose(y, expected(op_type, {}, arrays), rtol=1e-5, atol=1e-6)


@settings(max_examples=8, deadline=None)
@given(shapes=mutually_broadcastable_shapes(num_shapes=3, max_dims=4, max_side=4, min_side=0), data=st.data())
@pytest.mark.parametrize("op_type", [name for name in with_formulas() if arity(name) > 1])
def test_operands_broadcast_as_numpys(op_type: str, shapes: BroadcastableShapes, data: st.DataObject) -> None:
    dtype = data.draw(
        st.sampled_from([one for one in (np.float32, np.float64, np.int64, np.uint8, np.bool_) if takes(op_type, one)])
    )
    operands = shapes.input_shapes[: arity(op_type)]
    arrays = [np.random.default_rng(seed).integers(0, 5, shape).astype(dtype) for seed, shape in enumerate(operands)]
    [y] = run_operator(op_type, list(arrays))
    assert y.shape == np.broadcast_shapes(*operands)
    if op_type == "Div" and dtype in (np.int64, np.uint8):
        return
    np.testing.assert_allclose(y, expected(op_type, {}, arrays), rtol=1e-6)


@pytest.mark.parametrize("op_type", [name for name in FLOAT if arity(name) == 1 and hasattr(math, name.lower())])
def test_a_formula_of_the_name_of_a_function_is_that_function(op_type: str) -> None:
    places = np.linspace(0.01, 1.99, 50)
    places = places[np.isfinite(expected(op_type, {}, [places]))]
    assert places.size > 20
    known = [getattr(math, op_type.lower())(value) for value in places.tolist()]
    np.testing.assert_allclose(expected(op_type, {}, [places]), known, rtol=1e-14)


@needs_onednn
@pytest.mark.parametrize(("op_type", "arguments"), cases(ONEDNN))
@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 1e-5), (ml_dtypes.bfloat16, 2e-2)])
def test_onednn_computes_the_formula(op_type: str, arguments: Values, dtype: Any, tolerance: float) -> None:
    arrays = inputs(op_type, (3, 5, 70), dtype)
    with fallbacks() as found:
        [y] = run_operator(op_type, list(arrays), engine="ONEDNN", **arguments)
    by_default = LIBRARY_IS_INEXACT if dtype is np.float32 else LIBRARY_IS_INEXACT | KERNEL_ALONE
    lanes = AVX512 if dtype is not np.float32 else AVX2 if op_type in KERNEL_ALONE else 1
    assert not found or op_type in by_default or not has_vectors_of(lanes)
    wanted = expected(op_type, arguments, arrays).astype(np.float64)
    np.testing.assert_allclose(y.astype(np.float64), wanted, rtol=tolerance, atol=tolerance)


def gradients_of(op_type: str, arguments: Values, arrays: list[Array], dy: Array, output: str = "y") -> list[Array]:
    definition = operator_def(op_type, [f"x{index}" for index in range(len(arrays))], [output], **arguments)
    return list(analytic_gradients(definition, arrays, {0: dy}, range(len(arrays))).values())


def upstream(arrays: list[Array]) -> Array:
    """A gradient of the output."""
    return np.random.default_rng(2).uniform(-1, 1, arrays[0].shape).astype(arrays[0].dtype)


@pytest.mark.parametrize(("op_type", "arguments"), cases(DIFFERENTIABLE))
def test_gradients_are_the_slopes_of_the_formula(op_type: str, arguments: Values) -> None:
    arrays = smooth_inputs(op_type, arguments, 40)
    dy = upstream(arrays)
    for position, found in enumerate(gradients_of(op_type, arguments, arrays, dy)):
        slope = slopes(op_type, arguments, arrays, position, 1e-6)[2]
        np.testing.assert_allclose(found, dy * slope, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("op_type", "arguments"), cases(DIFFERENTIABLE))
def test_in_place_it_has_the_same_gradient_or_its_input_is_needed(op_type: str, arguments: Values) -> None:
    arrays = smooth_inputs(op_type, arguments, 40)
    dy = upstream(arrays)
    names = [f"x{index}" for index in range(len(arrays))]
    [*_, made] = gradient(operator_def(op_type, names, ["y"], **arguments), ["y_grad"]).operators or [None]
    if made is None or "x0" in made.input or not schema_of(op_type).inplace(0, 0):
        return
    apart = gradients_of(op_type, arguments, arrays, dy)
    for one, other in zip(gradients_of(op_type, arguments, arrays, dy, "x0"), apart, strict=True):
        assert one.tobytes() == other.tobytes()


@pytest.mark.slow
@pytest.mark.parametrize(("op_type", "arguments"), cases(DIFFERENTIABLE))
@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 1e-5), (np.float16, 6e-3), (ml_dtypes.bfloat16, 5e-2)])
def test_gradients_of_other_floats_agree_with_those_of_float64(
    op_type: str, arguments: Values, dtype: Any, tolerance: float
) -> None:
    arrays = smooth_inputs(op_type, arguments, 500, dtype)
    dy = upstream(arrays)
    [y] = run_operator(op_type, list(arrays), **arguments)
    wide = gradients_of(op_type, arguments, [x.astype(np.float64) for x in arrays], dy.astype(np.float64))
    for found, wanted in zip(gradients_of(op_type, arguments, arrays, dy), wide, strict=True):
        assert found.dtype == dtype
        scale = 1 + np.abs(wanted) + np.abs(y.astype(np.float64))  # Y is rounded before it is read
        assert np.max(np.abs(found.astype(np.float64) - wanted) / scale) < tolerance


@needs_onednn
@pytest.mark.parametrize(("op_type", "arguments"), cases(DIFFERENTIABLE))
def test_gradients_by_the_engine_are_those_of_float64_and_may_overwrite_dy(op_type: str, arguments: Values) -> None:
    arrays = smooth_inputs(op_type, arguments, 1000, np.float32)
    names = [f"x{index}" for index in range(len(arrays))]
    made = gradient(operator_def(op_type, names, ["y"], **arguments), ["dy"])
    blobs = {**dict(zip(names, arrays, strict=True)), "dy": upstream(arrays)}
    blobs["y"] = run_operator(op_type, list(arrays), **arguments)[0]
    for definition in made.operators:
        inputs = [blobs[name] for name in definition.input]
        if (
            len(definition.output) > 1
            or not has_engine(definition.type, "ONEDNN")
            or inputs[0].shape != inputs[-1].shape
        ):
            return
        values = {name: value for name, value in arguments.items() if name in schema_of(definition.type).args}
        [found] = run_operator(definition.type, inputs, engine="ONEDNN", **values)
        [wide] = run_operator(definition.type, [one.astype(np.float64) for one in inputs], **values)
        np.testing.assert_allclose(found, wide, rtol=2e-5, atol=2e-5)
        if "dy" in definition.input and schema_of(definition.type).inplace(list(definition.input).index("dy"), 0):
            over = net_of(definition.type, inputs, f"x{list(definition.input).index('dy')}", engine="ONEDNN", **values)
            assert over.tobytes() == found.tobytes()


@pytest.mark.slow
@pytest.mark.parametrize(("op_type", "arguments"), cases(DIFFERENTIABLE))
def test_gradients_of_large_tensors_are_those_of_their_parts(op_type: str, arguments: Values) -> None:
    arrays = inputs(op_type, (7, 23456), np.float32)
    dy = upstream(arrays)
    parts = [gradients_of(op_type, arguments, [x[i : i + 1] for x in arrays], dy[i : i + 1]) for i in range(len(dy))]
    for whole, *rows in zip(gradients_of(op_type, arguments, arrays, dy), *parts, strict=True):
        np.testing.assert_allclose(whole, np.concatenate(rows), rtol=1e-6, atol=1e-7)
    assert gradients_of(op_type, arguments, [x[:, :0] for x in arrays], dy[:, :0])[0].shape == (7, 0)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(("op_type", "arguments"), cases(FLOAT))
def test_cuda_computes_the_formula_and_its_slopes(op_type: str, arguments: Values) -> None:
    assert registered_engines(op_type, "cuda")
    check_values_on_cuda(op_type, arguments)
    if op_type in DIFFERENTIABLE:
        check_slopes_on_cuda(op_type, arguments)


def check_values_on_cuda(op_type: str, arguments: Values) -> None:
    arrays = inputs(op_type, 2000, np.float32)
    named = {f"x{index}": array for index, array in enumerate(arrays)}
    with cuda_devices():
        [y] = on_device(CUDA, operator_def(op_type, list(named), ["y"], **arguments), named)
    assert_rounds_to(y, expected(op_type, arguments, arrays), f"{op_type} on {CUDA}", arrays)


def check_slopes_on_cuda(op_type: str, arguments: Values) -> None:
    arrays = smooth_inputs(op_type, arguments, 200, np.float32)
    named = {f"x{index}": array for index, array in enumerate(arrays)}
    made = gradient(operator_def(op_type, list(named), ["y"], **arguments), ["dy"])
    blobs = {**named, "dy": upstream(arrays), "y": run_operator(op_type, list(arrays), **arguments)[0]}
    for definition in made.operators:
        with cuda_devices():
            found = on_device(CUDA, definition, {name: blobs[name] for name in definition.input})
        blobs |= dict(zip(definition.output, found, strict=True))
    for position, name in enumerate(made.inputs):
        slope = slopes(op_type, arguments, [x.astype(np.float64) for x in arrays], position, 1e-6)[2]
        wanted = (blobs["dy"] * slope).astype(np.float32)
        assert_rounds_to(blobs[str(name)], wanted, f"gradient {position} of {op_type} on {CUDA}", list(blobs.values()))
