"""Operators of training against the operators of ONNX that onnxruntime has for the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper

from tests.ops.running import Array, operator_def, run_net, run_operator, workspace_of


def run_onnx(node: onnx.NodeProto, feeds: Mapping[str, Array], outputs: Sequence[str], opset: int) -> list[Array]:
    """The outputs of one node."""
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in feeds.items()
    ]
    results = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in outputs]
    graph = helper.make_graph([node], "graph", inputs, results)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    model.ir_version = 8
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return list(session.run(list(outputs), dict(feeds)))


@pytest.mark.parametrize("shape", [(6, 5), (2, 5, 7), (3, 4, 6, 2)], ids=str)
def test_losses_agree_with_softmax_cross_entropy_loss(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 4, shape).astype(np.float32)
    labels = rng.integers(-1 if len(shape) > 2 else 0, shape[1], (shape[0], *shape[2:]))
    node = helper.make_node("SoftmaxCrossEntropyLoss", ["x", "label"], ["loss"], ignore_index=-1, reduction="mean")
    [wanted] = run_onnx(node, {"x": logits, "label": labels}, ["loss"], 13)
    op_type = "SpatialSoftmaxWithLoss" if len(shape) > 2 else "SoftmaxWithLoss"
    [_, loss] = run_operator(op_type, [logits, labels], 2)
    np.testing.assert_allclose(loss, wanted, rtol=1e-5)


@pytest.mark.parametrize("shape", [(6, 5), (4, 3, 7), (3, 4, 9, 8)], ids=str)
def test_batch_normalization_agrees_with_that_of_onnx_in_training(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(1)
    feeds = {
        "x": rng.normal(1, 2, shape).astype(np.float32),
        **{name: rng.uniform(0.5, 2, shape[1]).astype(np.float32) for name in ("scale", "bias", "mean", "variance")},
    }
    node = helper.make_node(
        "BatchNormalization",
        list(feeds),
        ["y", "new_mean", "new_variance"],
        training_mode=1,
        momentum=0.75,
        epsilon=0.01,
    )
    wanted = run_onnx(node, feeds, ["y", "new_mean", "new_variance"], 15)
    outputs = ["y", "mean", "variance", "saved_mean", "saved_inverse"]
    definition = operator_def("SpatialBN", list(feeds), outputs, is_test=0, momentum=0.75, epsilon=0.01)
    workspace = workspace_of(feeds)
    run_net(workspace, definition)
    for blob, reference in zip(outputs, wanted, strict=False):
        np.testing.assert_allclose(workspace.fetch_blob(blob), reference, 1e-4, 1e-5, err_msg=blob)
