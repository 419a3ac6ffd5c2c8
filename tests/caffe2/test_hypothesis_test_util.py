"""Caffe2's way to test operators: what it accepts, and what turns red."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from dagexec.caffe2 import core, workspace
from dagexec.caffe2 import hypothesis_test_util as hu
from dagexec.caffe2.gpus import simulate_gpus
from dagexec.caffe2.proto import caffe2_pb2

CASE = hu.HypothesisTestCase()
CPU = hu.cpu_do
X = np.array([[1, -2, 3], [0.5, 4, -1]], np.float32)


@pytest.fixture
def _gpu() -> Iterator[None]:
    simulate_gpus(1)
    yield
    simulate_gpus(None)


class TestScale(hu.HypothesisTestCase):
    """A test in the form of Caffe2's."""

    @pytest.mark.slow
    @settings(max_examples=3, deadline=None)
    @given(X=hu.tensor(max_dim=2), **hu.gcs)
    def test_scale(self, X: Any, gc: Any, dc: Any) -> None:
        op = core.CreateOperator("Scale", ["X"], ["Y"], scale=3.0)
        self.assertReferenceChecks(
            gc, op, [X], lambda X: [3 * X], output_to_grad="Y", grad_reference=lambda g, outputs, inputs: [3 * g],
            ensure_outputs_are_inferred=True,
        )  # fmt: skip
        self.assertDeviceChecks(dc, op, [X], [0])
        self.assertGradientChecks(gc, op, [X], 0, [0])


def test_a_wrong_output_is_found() -> None:
    op = core.CreateOperator("Relu", "X", "Y")
    assert CASE.assertReferenceChecks(CPU, op, [X], lambda x: (np.maximum(x, 0),))[0].shape == X.shape
    with pytest.raises(AssertionError, match="output 'Y' of Relu"):
        CASE.assertReferenceChecks(CPU, op, [X], lambda x: [np.abs(x)])
    with pytest.raises(AssertionError, match="outputs of the reference"):
        CASE.assertReferenceChecks(CPU, op, [X], lambda x: [x, x])
    with pytest.raises(RuntimeError, match="list or tuple"):
        CASE.assertReferenceChecks(CPU, op, [X], lambda x: np.maximum(x, 0))
    with pytest.raises(ValueError, match="must supply"):
        CASE.assertReferenceChecks(CPU, op, [], lambda: [X])
    assert workspace.CurrentWorkspace() == "default"


def test_only_the_outputs_asked_for_are_compared() -> None:
    op = core.CreateOperator("TopK", ["X"], ["values", "indices"], k=1)
    CASE.assertReferenceChecks(CPU, op, [X], lambda x: [x.max(1, keepdims=True)], outputs_to_check=[0])


def test_a_wrong_gradient_is_found() -> None:
    op = core.CreateOperator("Relu", "X", "Y")

    def check(gradient: Any) -> None:
        CASE.assertReferenceChecks(
            CPU, op, [X], lambda x: [np.maximum(x, 0)], output_to_grad="Y", grad_reference=gradient
        )

    check(lambda g, outputs, inputs: [g * (inputs[0] > 0)])
    with pytest.raises(AssertionError, match="gradient of 'X' of Relu"):
        check(lambda g, outputs, inputs: [g * 2])
    with pytest.raises(AssertionError, match="not None"):
        check(lambda g, outputs, inputs: [None])
    rows = core.CreateOperator("Gather", ["data", "rows"], "Y")
    picked = np.array([1, 0, 1], np.int32)
    CASE.assertReferenceChecks(
        CPU, rows, [X, picked], lambda data, rows: [data[rows]], output_to_grad="Y",
        grad_reference=lambda g, outputs, inputs: [(picked, g), None],
    )  # fmt: skip


def test_differences_show_gradients_that_are_wrong() -> None:
    """At the edge of Clip the difference is half of the gradient."""
    tanh = core.CreateOperator("Tanh", "X", "Y")
    CASE.assertGradientChecks(CPU, tanh, [X / 4], 0, [0])
    clip = core.CreateOperator("Clip", "X", "Y", min=-0.5, max=0.5)
    edge = np.array([0.5, 0.1], np.float32)
    with pytest.raises(AssertionError, match=r"of Clip at \[\[0\]\]"):
        CASE.assertGradientChecks(CPU, clip, [edge], 0, [0])
    with pytest.raises(ValueError, match="no others"):
        CASE.assertGradientChecks(CPU, tanh, [X], 0, [0], grad_ops=[tanh])


@pytest.mark.usefixtures("_gpu")
def test_devices_are_compared_with_the_first() -> None:
    op = core.CreateOperator("Relu", "X", "Y")
    gpu = core.DeviceOption(caffe2_pb2.CUDA, 0)
    CASE.assertDeviceChecks([CPU, gpu], op, [X], [0])
    CASE.assertGradientChecks(gpu, core.CreateOperator("Sqr", "X", "Y"), [X], 0, [0], stepsize=1e-2)
    noise = core.CreateOperator("UniformFill", [], "Y", shape=[4])
    with pytest.raises(AssertionError, match="'Y' of UniformFill on device 1"):
        CASE.assertDeviceChecks([CPU, gpu], noise, [], [0], threshold=1e-6)


def test_validators_and_errors() -> None:
    op = core.CreateOperator("Abs", "X", "Y")
    seen: list[Any] = []
    CASE.assertValidationChecks(CPU, op, [X], lambda X, Y: seen.append((X + 1, Y)))
    CASE.assertValidationChecks(CPU, op, [X], lambda inputs, outputs: seen.append((inputs, outputs)), as_kwargs=False)
    np.testing.assert_array_equal(seen[0][1], np.abs(X))
    assert len(seen[1][1]) == 1
    add = core.CreateOperator("Add", ["X", "Z"], "Y")
    CASE.assertRunOpRaises(CPU, add, [X, X[:1, :2]], exception=RuntimeError, regexp="opnet")
    with pytest.raises(AssertionError):
        CASE.assertRunOpRaises(CPU, op, [X])


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(
    hu.segmented_tensor(allow_empty=True), hu.segmented_tensor(is_sorted=False), hu.lengths_tensor(min_segments=2),
    hu.sparse_lengths_tensor(), hu.tensors(2, max_dim=2), hu.tensors1d(2, dtype=np.int32, max_len=3),
)  # fmt: skip
def test_arrays_fit_each_other(ordered: Any, any_order: Any, by_length: Any, sparse: Any, pair: Any, ids: Any) -> None:
    assert len(ordered[0]) == len(ordered[1])
    assert (np.diff(ordered[1]) >= 0).all()
    assert any_order[1].shape == any_order[0].shape[:1]
    assert by_length[1].sum() == len(by_length[0])
    assert len(by_length[1]) >= 2
    assert sparse[2].sum() == len(sparse[1])
    assert (sparse[1] < len(sparse[0])).all()
    assert pair[0].shape == pair[1].shape
    assert ids[0].dtype == np.int32
    assert ids[0].ndim == 1
