"""Python operators: functions of the script in nets, one with a gradient, in the calls that the tutorial documents."""

import numpy as np
from caffe2.python import core, workspace


def f(inputs, outputs):
    outputs[0].feed(2 * inputs[0].data)


workspace.ResetWorkspace()
net = core.Net("tutorial")
net.Python(f)(["x"], ["y"])
workspace.FeedBlob("x", np.array([3.0]))
workspace.RunNetOnce(net)
doubled = workspace.FetchBlob("y")


def f_reshape(inputs, outputs):
    outputs[0].reshape(inputs[0].shape)
    outputs[0].data[...] = 2 * inputs[0].data


def f_workspace(inputs, outputs, workspace):
    outputs[0].feed(2 * workspace.blobs["x"].fetch())


workspace.ResetWorkspace()
net = core.Net("tutorial")
net.Python(f_workspace, pass_workspace=True)([], ["y"])
workspace.FeedBlob("x", np.array([3.0]))
workspace.RunNetOnce(net)
through_workspace = workspace.FetchBlob("y")


def grad_f(inputs, outputs):
    # inputs and outputs of the forward operator, then the gradients of its outputs
    grad_output = inputs[2]
    grad_input = outputs[0]
    grad_input.reshape(grad_output.shape)
    grad_input.data[...] = 2 * grad_output.data


workspace.ResetWorkspace()
net = core.Net("tutorial")
net.Python(f_reshape, grad_f)(["x"], ["y"])
net.AddGradientOperators({"y": "y_grad"})
workspace.FeedBlob("x", np.arange(4, dtype=np.float32))
workspace.FeedBlob("y_grad", np.arange(1, 5, dtype=np.float32))
workspace.RunNetOnce(net)
y, x_grad = workspace.FetchBlobs(["y", "x_grad"])


class Scale:
    def __init__(self, function):
        self.function = function

    def forward(self, inputs, outputs):
        self.function(inputs, outputs)
        self.shape = inputs[0].shape

    def backward(self, inputs, outputs):
        outputs[0].feed(np.full(self.shape, 3, np.float32) * inputs[1].data)


net = core.Net("typed")
net.Python((lambda scale: lambda inputs, outputs: outputs[0].feed(scale * inputs[0].data), (3,), {}))(["x"], ["three"])
net.Python(f_reshape, python_func_type=Scale, grad_input_indices=[0])(["x"], ["z"])
workspace.RunNetOnce(net)
three, z = workspace.FetchBlobs(["three", "z"])
