"""Gradients of activations and of softmax by kernels, beyond their formulas: limits, Y that is dY, float64."""

from __future__ import annotations

import numpy as np
import pytest

from dagexec import Workspace
from tests.ops.onednn.engine import AVX2, needs_onednn, run_fallback, run_onednn
from tests.ops.running import operator_def, run_net


@needs_onednn
def test_clip_tells_the_smallest_number_from_its_limits() -> None:
    tiny = np.float32(1e-38)
    y = np.array([0, tiny, 0.5, np.nextafter(np.float32(6), np.float32(0)), 6], np.float32)
    (found,) = run_onednn("ClipGradient", [y, np.ones_like(y)], lanes=AVX2, min=0.0, max=6.0)
    np.testing.assert_array_equal(found, [0, 1, 1, 1, 0])


@needs_onednn
@pytest.mark.parametrize("op_type", ["ReluGradient", "SigmoidGradient", "TanhGradient"])
def test_y_may_be_the_gradient_itself(op_type: str) -> None:
    workspace = Workspace()
    y = np.linspace(-0.75, 0.75, 40, dtype=np.float32)
    workspace.feed_blob("y", y)
    definition = operator_def(op_type, ["y", "y"], ["dx"], engine="ONEDNN")
    run_net(workspace, definition)
    derivative = {"ReluGradient": y > 0, "SigmoidGradient": y - y**2, "TanhGradient": 1 - y**2}[op_type]
    np.testing.assert_allclose(workspace.fetch_blob("dx"), y * derivative, rtol=1e-5, atol=1e-6)


@needs_onednn
@pytest.mark.parametrize("op_type", ["ReluGradient", "SoftmaxGradient"])
def test_float64_is_left_to_the_default_engine(op_type: str) -> None:
    y, dy = np.random.default_rng(0).normal(size=(2, 4, 50))
    (found,) = run_fallback(op_type, [y, dy])[0]
    expected = np.where(y > 0, dy, 0) if op_type == "ReluGradient" else y * (dy - np.sum(y * dy, axis=1, keepdims=True))
    np.testing.assert_allclose(found, expected, rtol=1e-12)
