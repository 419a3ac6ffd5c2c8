"""Images from files to a database, a network trained on them, saved and loaded: the calls of Caffe2's tutorials on
pre-processing of images, on data sets of one's own and on CIFAR-10."""

import os
import sys

import numpy as np
from caffe2.proto import caffe2_pb2
from caffe2.python import brew, core, model_helper, optimizer, utils, workspace
from caffe2.python.predictor import mobile_exporter
from PIL import Image

folder = sys.argv[1]
random = np.random.default_rng(11)
labels = np.arange(24) % 3
for index, label in enumerate(labels):
    picture = random.integers(0, 60, (12, 10, 3))
    picture[:, :, label] += 150
    Image.fromarray(picture.astype(np.uint8)).save(os.path.join(folder, f"{index:02}.png"))


def preprocess(path, size, mean):
    """A square from the middle, scaled; channels first, blue, green and red; less the mean."""
    image = Image.open(path).convert("RGB")
    side = min(image.size)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    image = image.crop((left, top, left + side, top + side)).resize((size, size), Image.Resampling.BILINEAR)
    pixels = np.asarray(image).astype(np.float32)
    return pixels.swapaxes(1, 2).swapaxes(0, 1)[(2, 1, 0), :, :] - mean


def write_db(db_type, path, images):
    db = core.C.create_db(db_type, path, core.C.Mode.write)
    transaction = db.new_transaction()
    for index, (image, label) in enumerate(zip(images, labels, strict=True)):
        record = caffe2_pb2.TensorProtos()
        record.protos.extend([utils.NumpyArrayToCaffe2Tensor(image), utils.NumpyArrayToCaffe2Tensor(label)])
        transaction.put(f"{index:03}", record.SerializeToString())
    del transaction
    del db


paths = [os.path.join(folder, f"{index:02}.png") for index in range(24)]
images = np.stack([preprocess(path, 8, 100.0) for path in paths])
write_db("minidb", os.path.join(folder, "train.minidb"), images)

workspace.ResetWorkspace(folder)
arg_scope = {"order": "NCHW"}


def add_model(model, data):
    conv1 = brew.conv(model, data, "conv1", dim_in=3, dim_out=4, kernel=3)
    pool1 = brew.max_pool(model, conv1, "pool1", kernel=2, stride=2)
    relu1 = brew.relu(model, pool1, "relu1")
    fc1 = brew.fc(model, relu1, "fc1", dim_in=4 * 3 * 3, dim_out=3)
    return brew.softmax(model, fc1, "softmax")


train_model = model_helper.ModelHelper(name="train_net", arg_scope=arg_scope)
data, label = brew.db_input(train_model, ["data", "label"], 12, os.path.join(folder, "train.minidb"), "minidb")
data = train_model.StopGradient(train_model.Scale(data, "scaled", scale=1.0 / 128), "scaled")
softmax = add_model(train_model, data)
loss = train_model.AveragedLoss(train_model.LabelCrossEntropy([softmax, label], "xent"), "loss")
brew.accuracy(train_model, [softmax, label], "accuracy")
train_model.AddGradientOperators([loss])
optimizer.build_sgd(train_model, base_learning_rate=0.1, policy="fixed", momentum=0.9, weight_decay=0.004)

workspace.RunNetOnce(train_model.param_init_net)
workspace.CreateNet(train_model.net, overwrite=True)
losses, accuracies = [], []
for _ in range(20):
    workspace.RunNet(train_model.net)
    losses.append(float(workspace.FetchBlob("loss")))
    accuracies.append(float(workspace.FetchBlob("accuracy")))

deploy_model = model_helper.ModelHelper(name="deploy_net", arg_scope=arg_scope, init_params=False)
add_model(deploy_model, "scaled")
init_net, predict_net = mobile_exporter.Export(workspace, deploy_model.net, deploy_model.params)
with open(os.path.join(folder, "init_net.pb"), "wb") as file:
    file.write(init_net.SerializeToString())
with open(os.path.join(folder, "predict_net.pb"), "wb") as file:
    file.write(predict_net.SerializeToString())

params = {str(param): workspace.FetchBlob(param) for param in deploy_model.params}
workspace.ResetWorkspace(folder)
with (
    open(os.path.join(folder, "init_net.pb"), "rb") as init_file,
    open(os.path.join(folder, "predict_net.pb"), "rb") as predict_file,
):
    predictor = workspace.Predictor(init_file.read(), predict_file.read())
results = predictor.run({"scaled": images / np.float32(128)})[0]
