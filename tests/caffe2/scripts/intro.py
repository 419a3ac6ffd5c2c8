"""A first net, trained on random numbers: the calls of Caffe2's introduction."""

import numpy as np
from caffe2.python import model_helper, workspace

random = np.random.default_rng(2)
workspace.ResetWorkspace()
data = random.random((16, 100)).astype(np.float32)
label = (random.random(16) * 10).astype(np.int32)
workspace.FeedBlob("data", data)
workspace.FeedBlob("label", label)
m = model_helper.ModelHelper(name="my first net")
m.param_init_net.XavierFill([], "fc_w", shape=[10, 100])
m.param_init_net.ConstantFill([], "fc_b", shape=[10])
fc_1 = m.net.FC(["data", "fc_w", "fc_b"], "fc1")
pred = m.net.Sigmoid(fc_1, "pred")
softmax, loss = m.net.SoftmaxWithLoss([pred, "label"], ["softmax", "loss"])
m.AddGradientOperators([loss])
text = str(m.net.Proto()), str(m.param_init_net.Proto())
workspace.RunNetOnce(m.param_init_net)
workspace.CreateNet(m.net)
for _ in range(3):
    data = random.random((16, 100)).astype(np.float32)
    label = (random.random(16) * 10).astype(np.int32)
    workspace.FeedBlob("data", data)
    workspace.FeedBlob("label", label)
    workspace.RunNet(m.name, 10)
w, result, gradient = (workspace.FetchBlob(name) for name in ("fc_w", "softmax", "fc_w_grad"))
