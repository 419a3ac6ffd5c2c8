"""Fully connected layers and matrix products by oneDNN, against products in float64."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagexec import NetDef, Workspace
from dagexec.core.arguments import ArgumentValue
from dagexec.core.registry import create_operator
from dagexec.core.tensor import Tensor
from dagexec.errors import ArgumentError
from dagexec.scheduler.nets.simple import SimpleNet
from tests.ops.drawing import drawn
from tests.ops.onednn.engine import ENGINES, fallbacks, needs_onednn, normal, run_fallback, run_onednn
from tests.ops.running import Array, operator_def, run_net, run_operator, workspace_of


def layer(x: Array, w: Array, b: Array) -> Array:
    return np.einsum("mk,nk->mn", x.astype(np.float64), w.astype(np.float64)) + b


@pytest.mark.slow
@needs_onednn
@drawn(60)
@given(
    rows=st.integers(1, 20),
    inner=st.integers(1, 70),
    units=st.integers(1, 70),
    transposed=st.booleans(),
    pieces=st.sampled_from([1, 2]),
)
def test_a_layer_multiplies_and_adds_the_bias(rows: int, inner: int, units: int, transposed: bool, pieces: int) -> None:
    x, w, b = normal(1, rows, inner), normal(2, units, inner), normal(3, units)
    fed = w.T.copy() if transposed else w
    (found,) = run_onednn("FCTransposed" if transposed else "FC", [x, fed, b], pieces=pieces, batch_invariant=0)
    np.testing.assert_allclose(found, layer(x, w, b), rtol=1e-4, atol=1e-4)


@needs_onednn
def test_axes_fold_both_tensors() -> None:
    x, w, b = normal(4, 2, 3, 4, 5), normal(5, 12, 4, 5), normal(6, 12)
    (found,) = run_onednn("FC", [x, w, b], axis=2)
    expected = layer(x.reshape(6, 20), w.reshape(12, 20), b).reshape(2, 3, 12)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    (found,) = run_onednn("FC", [x, w.reshape(3, 4, 20), b], axis=-2, axis_w=-1)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def run_constant(
    op_type: str, arrays: list[Array], constants: list[int], **arguments: ArgumentValue
) -> tuple[Array, list[Tensor]]:
    """The output with some inputs constant, of a second net, too; and the input tensors."""
    workspace = Workspace()
    names = [f"x{index}" for index in range(len(arrays))]
    for name, array in zip(names, arrays, strict=True):
        workspace.feed_blob(name, array)
    tensors = [workspace.get_blob(name).get(Tensor) for name in names]
    for index in constants:
        tensors[index].freeze()
    definition = operator_def(op_type, names, ["y"], **arguments, engine="ONEDNN")
    with fallbacks() as found:
        for _ in range(2):
            run_net(workspace, definition)
    assert not found, found
    return workspace.fetch_blob("y"), tensors


@needs_onednn
@pytest.mark.parametrize(
    ("rows", "inner", "units", "pieces"), [(1, 64, 64, 1), (1, 500, 10, 1), (8, 300, 202, 1), (1, 1024, 1002, 6)]
)
def test_constant_weights_are_packed_once_for_each_piece(rows: int, inner: int, units: int, pieces: int) -> None:
    x, w, b = normal(7, rows, inner), normal(8, units, inner), normal(9, units)
    found, tensors = run_constant("FC", [x, w, b], [1, 2])
    np.testing.assert_allclose(found, layer(x, w, b), rtol=1e-3, atol=1e-3)
    constant = tensors[1].constant
    assert constant is not None
    assert len(constant.forms()) == pieces


@needs_onednn
def test_operators_that_share_constant_weights_each_have_their_layout() -> None:
    workspace = Workspace()
    arrays = {"x": normal(41, 70, 48), "w": normal(42, 48, 48), "b": normal(43, 48)}
    for name, array in arrays.items():
        workspace.feed_blob(name, array)
    workspace.get_blob("w").get(Tensor).freeze()
    definitions = [
        operator_def("FC", ["x", "w", "b"], ["straight"]),
        operator_def("FCTransposed", ["x", "w", "b"], ["turned"]),
        operator_def("MatMul", ["x", "w"], ["product"]),
        operator_def("MatMul", ["x", "w"], ["turned_product"], trans_b=1),
    ]
    for definition in definitions:
        definition.engine = "ONEDNN"
    with fallbacks() as reasons, SimpleNet(NetDef(name="n", op=definitions), workspace) as net:
        net.run()
    assert not reasons
    straight, turned = layer(*arrays.values()), layer(arrays["x"], arrays["w"].T, arrays["b"])
    expected = {"straight": straight, "turned": turned}
    expected |= {"product": turned - arrays["b"], "turned_product": straight - arrays["b"]}
    for name, array in expected.items():
        np.testing.assert_allclose(workspace.fetch_blob(name), array, rtol=1e-4, atol=1e-4)


@needs_onednn
def test_weights_that_are_fed_anew_are_read_anew() -> None:
    workspace = workspace_of((("x", normal(10, 80, 32)), ("w", normal(11, 48, 32)), ("b", normal(12, 48))))
    definition = operator_def("FC", ["x", "w", "b"], ["y"], engine="ONEDNN")
    with SimpleNet(NetDef(name="n", op=[definition]), workspace) as net:
        net.run()
        workspace.feed_blob("w", normal(13, 48, 32))
        net.run()
    expected = layer(normal(10, 80, 32), normal(13, 48, 32), normal(12, 48))
    np.testing.assert_allclose(workspace.fetch_blob("y"), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("operand", [(3, 40), (40,), (1, 1), (3, 1)])
@pytest.mark.parametrize("link", ["add", "mul", "max"])
def test_a_fused_layer_applies_its_post_ops(engine: str, operand: tuple[int, ...], link: str) -> None:
    x, w, b, other = normal(14, 3, 25), normal(15, 40, 25), normal(16, 40), normal(17, *operand)
    links = ["relu", f"{link}:3", "linear:0.5:1.0", "tanh"]
    (found,) = run_operator("FusedFC", [x, w, b, other], engine=engine, post_ops=links)
    ufunc = {"add": np.add, "mul": np.multiply, "max": np.maximum}[link]
    expected = np.tanh(0.5 * ufunc(np.where((y := layer(x, w, b)) > 0, y, 0), other) + 1)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@needs_onednn
@pytest.mark.parametrize("operand", [(3, 40), (40,), (1, 1)])
def test_a_fused_layer_with_an_operand_goes_to_onednn(operand: tuple[int, ...]) -> None:
    x, w, b, other = normal(14, 3, 25), normal(15, 40, 25), normal(16, 40), normal(17, *operand)
    run_onednn("FusedFC", [x, w, b, other], post_ops=["relu", "add:3"])


@pytest.mark.parametrize("engine", ENGINES)
def test_a_fused_layer_adds_what_the_output_held(engine: str) -> None:
    workspace = Workspace()
    arrays = {"x": normal(18, 3, 25), "w": normal(19, 40, 25), "b": normal(20, 40), "y": normal(21, 3, 40)}
    for name, array in arrays.items():
        workspace.feed_blob(name, array)
    definition = operator_def("FusedFC", ["x", "w", "b", "y"], ["y"], post_ops=["sum:3", "relu"], engine=engine)
    run_net(workspace, definition)
    expected = np.maximum(layer(arrays["x"], arrays["w"], arrays["b"]) + arrays["y"], 0)
    np.testing.assert_allclose(workspace.fetch_blob("y"), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_fused_layer_keeps_leading_axes(engine: str) -> None:
    x, w, b, other = normal(22, 2, 3, 25), normal(23, 40, 25), normal(24, 40), normal(25, 2, 3, 40)
    (found,) = run_operator("FusedFC", [x, w, b, other], engine=engine, axis=2, post_ops=["add:3", "sigmoid"])
    expected = 1 / (1 + np.exp(-(layer(x.reshape(6, 25), w, b).reshape(2, 3, 40) + other)))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_an_operand_that_is_no_operand_is_an_error() -> None:
    with pytest.raises(ArgumentError, match="needs an operand"):
        run_operator("FusedFC", [normal(1, 2, 3), normal(2, 4, 3), normal(3, 4)], post_ops=["add:2"])


@needs_onednn
def test_a_layer_in_float64_is_computed_by_numpy() -> None:
    x, w, b = (normal(seed, *shape).astype(np.float64) for seed, shape in ((1, (4, 64)), (2, (32, 64)), (3, (32,))))
    (found,), reason = run_fallback("FC", [x, w, b])
    np.testing.assert_allclose(found, layer(x, w, b), rtol=1e-12)
    assert "float64" in reason


@needs_onednn
@pytest.mark.parametrize("trans_a", [0, 1])
@pytest.mark.parametrize("trans_b", [0, 1])
@pytest.mark.parametrize("constants", [[], [1]])
def test_matrices_may_be_transposed(trans_a: int, trans_b: int, constants: list[int]) -> None:
    """Not batch-invariant, which without AVX-512 oneDNN computes of packed matrices alone."""
    arguments = {"trans_a": trans_a, "trans_b": trans_b, "batch_invariant": 0}
    a, b = normal(26, *((7, 9) if not trans_a else (9, 7))), normal(27, *((9, 20) if not trans_b else (20, 9)))
    expected = (a.T if trans_a else a).astype(np.float64) @ (b.T if trans_b else b)
    found, _ = run_constant("MatMul", [a, b], constants, **arguments)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    a, b = a.reshape(1, *a.shape).repeat(3, 0), normal(28, 3, *b.shape)
    expected = (a.swapaxes(1, 2) if trans_a else a).astype(np.float64) @ (b.swapaxes(1, 2) if trans_b else b)
    found, _ = run_constant("BatchMatMul", [a, b], constants, **arguments)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@needs_onednn
@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((4, 5), (5, 6)),
        ((2, 3, 4, 5), (5, 6)),
        ((3, 4, 5), (2, 1, 5, 6)),
        ((5,), (2, 5, 6)),
        ((2, 4, 5), (5,)),
        ((5,), (5,)),
    ],
)
def test_stacks_broadcast(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    left, right = normal(29, *a), normal(30, *b)
    (found,) = run_operator("BatchMatMul", [left, right], engine="ONEDNN", broadcast=1)
    np.testing.assert_allclose(found, left.astype(np.float64) @ right.astype(np.float64), rtol=1e-4, atol=1e-5)


@needs_onednn
def test_stacks_of_matrices_go_to_onednn() -> None:
    for a, b in (((2, 4, 5), (2, 5, 6)), ((2, 3, 4, 5), (5, 6)), ((2, 3, 8, 9), (2, 3, 9, 7))):
        run_onednn("BatchMatMul", [normal(29, *a), normal(30, *b)], broadcast=1)


@needs_onednn
@pytest.mark.parametrize(("alpha", "beta"), [(1, 1), (0.5, 1), (1, 2), (-1.5, 0.25), (2, 0), (0, 1)])
@pytest.mark.parametrize("shape", [(4, 6), (6,), (1, 6), (4, 1), ()])
def test_gemm_scales_and_adds(alpha: float, beta: float, shape: tuple[int, ...]) -> None:
    a, b, c = normal(31, 4, 5), normal(32, 6, 5), np.random.default_rng(33).standard_normal(shape).astype(np.float32)
    (found,) = run_operator("Gemm", [a, b, c], engine="ONEDNN", alpha=float(alpha), beta=float(beta), trans_b=1)
    expected = alpha * (a.astype(np.float64) @ b.T) + beta * c.astype(np.float64)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@needs_onednn
def test_a_layer_reads_and_writes_a_callers_memory() -> None:
    workspace = workspace_of((("x", normal(34, 2, 8)), ("w", normal(35, 16, 8)), ("b", normal(36, 16))))
    definition = operator_def("FusedFC", ["x", "w", "b"], ["y"], post_ops=["relu"], engine="ONEDNN")
    op = create_operator(definition, workspace)
    step = op.bind(op.infer())
    other, result = normal(37, 2, 8), np.empty((2, 16), np.float32)
    step.input_rebinds[0](other)
    step.output_rebinds[0](result)
    step()
    np.testing.assert_allclose(result, np.maximum(layer(other, normal(35, 16, 8), normal(36, 16)), 0), atol=1e-5)
