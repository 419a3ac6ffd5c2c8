"""A small convolutional network on two GPUs, in the calls that Caffe2's tutorial on several GPUs documents."""

import sys

import numpy as np
from caffe2.proto import caffe2_pb2
from caffe2.python import brew, core, data_parallel_model, utils, workspace
from caffe2.python.model_helper import ModelHelper

random = np.random.default_rng(8)
labels = np.arange(16) % 4
images = random.integers(0, 60, (16, 1, 6, 6))
images[np.arange(16), 0, labels] += 180
database = core.C.create_db("minidb", sys.argv[1], core.C.Mode.write)
transaction = database.new_transaction()
for index in range(16):
    record = caffe2_pb2.TensorProtos()
    record.protos.extend(
        map(utils.NumpyArrayToCaffe2Tensor, (images[index].astype(np.uint8), labels[index].astype(np.int32)))
    )
    transaction.put(f"{index:04}", record.SerializeToString())
del transaction
del database

gpus = list(range(workspace.NumCudaDevices()))
batch_per_device = 4
workspace.ResetWorkspace()
train_model = ModelHelper(name="train")
reader = train_model.CreateDB("reader", db=sys.argv[1], db_type="minidb")


def add_input_ops(model):
    data, _ = model.net.TensorProtosDBInput([reader], ["data_uint8", "label"], batch_size=batch_per_device)
    model.Scale(model.Cast(data, "data_float", to=core.DataType.FLOAT), "data", scale=1.0 / 256)
    model.StopGradient("data", "data")


def create_model_ops(model, loss_scale):
    conv = brew.conv(model, "data", "conv", dim_in=1, dim_out=3, kernel=3)
    pred = brew.fc(model, brew.relu(model, conv, conv), "pred", dim_in=3 * 4 * 4, dim_out=4)
    softmax, loss = model.SoftmaxWithLoss([pred, "label"], ["softmax", "loss"])
    brew.accuracy(model, [softmax, "label"], "accuracy")
    return [model.Scale(loss, "loss_scaled", scale=loss_scale)]


def add_parameter_update_ops(model):
    brew.add_weight_decay(model, 1e-4)
    iteration = brew.iter(model, "iter")
    lr = model.net.LearningRate([iteration], "lr", base_lr=0.05, policy="step", stepsize=10, gamma=0.1)
    for param in model.GetParams():
        param_grad = model.param_to_grad[param]
        momentum = model.param_init_net.ConstantFill([param], param + "_momentum", value=0.0)
        model.net.MomentumSGDUpdate(
            [param_grad, momentum, lr, param], [param_grad, momentum, param], momentum=0.9, nesterov=1
        )


data_parallel_model.Parallelize_GPU(
    train_model,
    input_builder_fun=add_input_ops,
    forward_pass_builder_fun=create_model_ops,
    param_update_builder_fun=add_parameter_update_ops,
    devices=gpus,
    optimize_gradient_memory=True,
)
workspace.RunNetOnce(train_model.param_init_net)
workspace.CreateNet(train_model.net, overwrite=True)
start = {name: workspace.FetchBlob("gpu_1/" + name) for name in ("conv_w", "conv_b", "pred_w", "pred_b")}
losses = []
for _ in range(8):
    workspace.RunNet(train_model.net)
    losses.append(float(np.mean([workspace.FetchBlob(f"gpu_{gpu}/loss") for gpu in gpus])))
params = {name: [workspace.FetchBlob(f"gpu_{gpu}/{name}") for gpu in gpus] for name in start}
