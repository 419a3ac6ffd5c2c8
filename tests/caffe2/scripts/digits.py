"""A small network on images from a database, in the calls that Caffe2's tutorial on MNIST documents."""

import sys

import numpy as np
from caffe2.proto import caffe2_pb2
from caffe2.python import brew, core, model_helper, optimizer, utils, workspace

random = np.random.default_rng(3)
labels = np.arange(32) % 10
images = random.integers(0, 40, (32, 1, 12, 12))
images[np.arange(32), 0, 1 + labels] += 200
database = core.C.create_db("minidb", sys.argv[1], core.C.Mode.write)
transaction = database.new_transaction()
for index in range(32):
    record = caffe2_pb2.TensorProtos()
    record.protos.extend(
        map(utils.NumpyArrayToCaffe2Tensor, (images[index].astype(np.uint8), labels[index].astype(np.int32)))
    )
    transaction.put(f"{index:04}", record.SerializeToString())
del transaction
del database

workspace.ResetWorkspace()
model = model_helper.ModelHelper(name="digits", arg_scope={"order": "NCHW"})
data_uint8, label = brew.db_input(model, ["data_uint8", "label"], batch_size=32, db=sys.argv[1], db_type="minidb")
data = model.Cast(data_uint8, "data", to=core.DataType.FLOAT)
data = model.Scale(data, data, scale=float(1.0 / 256))
data = model.StopGradient(data, data)
with brew.arg_scope(["conv", "fc"], weight_init=("XavierFill", {"random_seed": 5})):
    conv1 = brew.conv(model, data, "conv1", dim_in=1, dim_out=4, kernel=3)
    pool1 = brew.max_pool(model, conv1, "pool1", kernel=2, stride=2)
    fc2 = brew.fc(model, pool1, "fc2", dim_in=4 * 5 * 5, dim_out=20)
    relu = brew.relu(model, fc2, fc2)
    pred = brew.fc(model, relu, "pred", 20, 10)
softmax = brew.softmax(model, pred, "softmax")
xent = model.LabelCrossEntropy([softmax, label], "xent")
loss = model.AveragedLoss(xent, "loss")
brew.accuracy(model, [softmax, label], "accuracy")
model.AddGradientOperators([loss])
optimizer.build_sgd(model, base_learning_rate=0.1, policy="step", stepsize=1, gamma=0.999)

workspace.RunNetOnce(model.param_init_net)
workspace.CreateNet(model.net, overwrite=True)
start = {str(param): workspace.FetchBlob(param) for param in model.params}
losses, accuracies = [], []
for _ in range(30):
    workspace.RunNet(model.net)
    losses.append(float(workspace.FetchBlob("loss")))
    accuracies.append(float(workspace.FetchBlob("accuracy")))
