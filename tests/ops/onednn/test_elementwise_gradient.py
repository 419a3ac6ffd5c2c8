"""Gradients of activations and of softmax by oneDNN, against formulas in float64."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from dagexec import NetDef, Workspace
from dagexec.core.arguments import ArgumentValue
from dagexec.scheduler.nets.simple import SimpleNet
from tests.ops.onednn.engine import AVX512, needs_onednn, normal, run_fallback, run_onednn
from tests.ops.running import Array, operator_def, run_operator

Formula = Callable[[Array, Array], Array]

CASES: list[tuple[str, dict[str, ArgumentValue], Formula]] = [
    ("ReluGradient", {}, lambda y, dy: np.where(y > 0, dy, 0)),
    ("LeakyReluGradient", {}, lambda y, dy: np.where(y >= 0, dy, 0.01 * dy)),
    ("LeakyReluGradient", {"alpha": 0.5}, lambda y, dy: np.where(y >= 0, dy, 0.5 * dy)),
    ("ClipGradient", {"min": 0.0, "max": 0.5}, lambda y, dy: dy * ((y > 0) & (y < 0.5))),
    ("ClipGradient", {"min": 0.25, "max": 0.5}, lambda y, dy: dy * ((y > 0.25) & (y < 0.5))),
    ("ClipGradient", {"min": -0.5, "max": 0.5}, lambda y, dy: dy * (np.abs(y) < 0.5)),
    ("ClipGradient", {"min": -0.25}, lambda y, dy: np.where(y > -0.25, dy, 0)),
    ("ClipGradient", {"max": -0.25}, lambda y, dy: np.where(y < -0.25, dy, 0)),
    ("SigmoidGradient", {}, lambda y, dy: dy * (y - y**2)),
    ("TanhGradient", {}, lambda y, dy: dy * (1 - y) * (1 + y)),
    ("SoftmaxGradient", {}, lambda y, dy: y * (dy - np.sum(y * dy, axis=(1, 2), keepdims=True))),
    ("SoftmaxGradient", {"axis": 2}, lambda y, dy: y * (dy - np.sum(y * dy, axis=2, keepdims=True))),
    ("SoftmaxGradient", {"axis": 1, "single_axis": 1}, lambda y, dy: y * (dy - np.sum(y * dy, axis=1, keepdims=True))),
    ("LogSoftmaxGradient", {"axis": 2}, lambda y, dy: dy - np.exp(y) * np.sum(dy, axis=2, keepdims=True)),
]
IDS = [f"{op_type} {arguments}" for op_type, arguments, _ in CASES]


def operands(shape: tuple[int, ...], op_type: str) -> tuple[Array, Array]:
    """Y with zeros, and dY; the Y of a softmax is one."""
    y = np.maximum(normal(0, *shape), -0.5) if "Relu" in op_type else normal(0, *shape)
    if op_type == "ClipGradient":  # with elements at the limits, which are outside
        y = np.where(np.abs(y) > 1.5, 0.5 * np.sign(y), y)
    y[..., ::3] = 0
    if "Softmax" in op_type:
        powers = np.exp(y)
        y = powers / powers.sum(axis=-1, keepdims=True)
        y = np.log(y) if "Log" in op_type else y
    return y, normal(1, *shape)


def lanes_for(op_type: str) -> int:
    """oneDNN has gradients of softmax for AVX-512."""
    return AVX512 if "Softmax" in op_type else 1


@needs_onednn
@pytest.mark.parametrize(("op_type", "arguments", "formula"), CASES, ids=IDS)
@pytest.mark.parametrize("shape", [(2, 3, 5), (1, 1, 1), (7, 129, 33)])
def test_gradient_agrees_with_its_formula(
    op_type: str, arguments: dict[str, ArgumentValue], formula: Formula, shape: tuple[int, ...]
) -> None:
    y, dy = (array.astype(np.float32) for array in operands(shape, op_type))
    if "single_axis" in arguments:  # all that 3.1 has for a middle axis is its reference, so the default engine serves
        (found,) = run_operator(op_type, [y, dy], engine="ONEDNN", **arguments)
    else:
        (found,) = run_onednn(op_type, [y, dy], lanes=lanes_for(op_type), **arguments)
    expected = formula(y.astype(np.float64), dy.astype(np.float64))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=2e-5)


@needs_onednn
def test_clip_tells_the_smallest_number_from_its_limits() -> None:
    tiny = np.float32(1e-38)
    y = np.array([0, tiny, 0.5, np.nextafter(np.float32(6), np.float32(0)), 6], np.float32)
    (found,) = run_onednn("ClipGradient", [y, np.ones_like(y)], min=0.0, max=6.0)
    np.testing.assert_array_equal(found, [0, 1, 1, 1, 0])


@needs_onednn
@pytest.mark.parametrize("op_type", ["ReluGradient", "SigmoidGradient", "TanhGradient", "SoftmaxGradient"])
def test_gradient_overwrites_the_one_it_reads(op_type: str) -> None:
    y, dy = (array.astype(np.float32) for array in operands((50, 77), op_type))
    (expected,) = run_onednn(op_type, [y, dy], lanes=lanes_for(op_type))
    workspace = Workspace()
    workspace.feed_blob("y", y)
    workspace.feed_blob("dy", dy)
    definition = operator_def(op_type, ["y", "dy"], ["dy"])
    definition.engine = "ONEDNN"
    with SimpleNet(NetDef(name="test", op=[definition]), workspace) as net:
        net.run()
    assert workspace.fetch_blob("dy").tobytes() == expected.tobytes()


@needs_onednn
@pytest.mark.parametrize("op_type", ["ReluGradient", "SigmoidGradient", "TanhGradient"])
def test_y_may_be_the_gradient_itself(op_type: str) -> None:
    workspace = Workspace()
    y = np.linspace(-0.75, 0.75, 40, dtype=np.float32)
    workspace.feed_blob("y", y)
    definition = operator_def(op_type, ["y", "y"], ["dx"])
    definition.engine = "ONEDNN"
    with SimpleNet(NetDef(name="test", op=[definition]), workspace) as net:
        net.run()
    derivative = {"ReluGradient": y > 0, "SigmoidGradient": y - y**2, "TanhGradient": 1 - y**2}[op_type]
    np.testing.assert_allclose(workspace.fetch_blob("dx"), y * derivative, rtol=1e-5, atol=1e-6)


@needs_onednn
@pytest.mark.parametrize("op_type", ["ReluGradient", "SoftmaxGradient"])
def test_float64_is_left_to_the_default_engine(op_type: str) -> None:
    y, dy = (array.astype(np.float64) for array in operands((4, 50), op_type))
    (found,) = run_fallback(op_type, [y, dy])[0]
    expected = np.where(y > 0, dy, 0) if op_type == "ReluGradient" else y * (dy - np.sum(y * dy, axis=1, keepdims=True))
    np.testing.assert_allclose(found, expected, rtol=1e-12)


@needs_onednn
def test_tensor_without_elements() -> None:
    (found,) = run_operator("ReluGradient", [np.zeros((0, 3), np.float32)] * 2, engine="ONEDNN")
    assert found.shape == (0, 3)
