"""Basics: blobs, workspaces, operators and a net with its gradient, in the calls that Caffe2's tutorial documents."""

import numpy as np
from caffe2.proto import caffe2_pb2
from caffe2.python import core, model_helper, workspace

assert workspace.Blobs() == []
values = np.random.default_rng(0).normal(size=(2, 3)).astype(np.float32)
workspace.FeedBlob("X", values)
assert workspace.HasBlob("X")
np.testing.assert_array_equal(workspace.FetchBlob("X"), values)
try:
    workspace.FetchBlob("invincible_pink_unicorn")
except RuntimeError as error:
    missing = error

workspace.SwitchWorkspace("gutentag", True)
assert workspace.CurrentWorkspace() == "gutentag"
assert workspace.Blobs() == []
workspace.SwitchWorkspace("default")
assert "X" in workspace.Blobs()
workspace.ResetWorkspace()
assert workspace.Blobs() == []

op = core.CreateOperator("Relu", ["X"], ["Y"])
assert isinstance(op, caffe2_pb2.OperatorDef)
workspace.FeedBlob("X", values)
workspace.RunOperatorOnce(op)
np.testing.assert_array_equal(workspace.FetchBlob("Y"), np.maximum(values, 0))

data = np.random.default_rng(1).random((16, 100)).astype(np.float32)
label = (np.random.default_rng(2).random(16) * 10).astype(np.int32)
workspace.FeedBlob("data", data)
workspace.FeedBlob("label", label)
m = model_helper.ModelHelper(name="my first net")
weight = m.param_init_net.XavierFill([], "fc_w", shape=[10, 100])
bias = m.param_init_net.ConstantFill([], "fc_b", shape=[10])
fc_1 = m.net.FC(["data", "fc_w", "fc_b"], "fc1")
pred = m.net.Sigmoid(fc_1, "pred")
softmax, loss = m.net.SoftmaxWithLoss([pred, "label"], ["softmax", "loss"])
gradients = m.AddGradientOperators([loss])
workspace.RunNetOnce(m.param_init_net)
workspace.CreateNet(m.net)
for _ in range(3):
    workspace.RunNet(m.name, 10)
w, b, result, loss_value, w_gradient = workspace.FetchBlobs(["fc_w", "fc_b", "softmax", "loss", gradients["fc_w"]])
