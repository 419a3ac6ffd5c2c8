"""The zoo for training: the same layers as for inference, gradients for every parameter, and losses that fall."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dagexec import Workspace, zoo
from dagexec.errors import ModelFormatError
from dagexec.training.model_helper import ModelHelper
from dagexec.training.optimizer import SGD

SMALL = {"lenet": 28, "lenet_digits": 8, "resnet20": 16, "resnet50": 64, "googlenet": 64, "squeezenet": 64}

SAME_IN_BOTH = {"Softmax", "SoftmaxWithLoss", "Accuracy", "LabelCrossEntropy", "AveragedLoss"}


def fed(helper: ModelHelper, classes: int) -> Workspace:
    """A workspace with parameters, random images and their labels."""
    rng = np.random.default_rng(0)
    workspace = Workspace()
    helper.create(workspace)
    shape = helper.inputs["data"].shape
    assert shape is not None
    workspace.feed_blob("data", rng.standard_normal([size or 1 for size in shape]).astype(np.float32))
    workspace.feed_blob("label", (np.arange(shape[0] or 1) % classes).astype(np.int32))
    return workspace


@pytest.mark.parametrize("name", zoo.names())
def test_layers_and_parameters_are_those_of_inference(name: str) -> None:
    model, helper = zoo.build(name, 2), zoo.build_training(name, 2)
    assert model.init_net is not None
    assert [list(op.output) for op in model.init_net.op] == [
        list(op.output) for op in helper.init_net.op if "optimizer_iteration" not in op.output
    ]
    layers = [[op.type for op in net.op if op.type not in SAME_IN_BOTH] for net in (model.net, helper.net)]
    assert layers[0] == layers[1]
    assert {"data", "label"} == set(helper.inputs)
    written = {blob for op in helper.net.op for blob in op.output}
    assert {"softmax", "loss", "accuracy"} <= written


@pytest.mark.parametrize("name", zoo.names())
def test_every_parameter_of_every_network_gets_a_gradient(name: str) -> None:
    helper = zoo.build_training(name, 2, classes=5)
    assert list(helper.add_gradient_operators(["loss"])) == helper.params


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_the_loss_starts_near_that_of_guessing_and_gradients_are_finite(name: str) -> None:
    helper = zoo.build_training(name, 2, classes=4, image_size=SMALL[name])
    found = helper.add_gradient_operators(["loss"])
    workspace = fed(helper, 4)
    workspace.run_net_once(helper.net)
    assert float(workspace.fetch_blob("loss")) < 2.5 * math.log(4)
    for gradient in found.values():
        assert np.isfinite(workspace.fetch_blob(str(gradient))).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lenet_digits", "resnet20"])
def test_a_few_steps_learn_a_batch_by_heart(name: str) -> None:
    helper = zoo.build_training(name, 8, classes=4, image_size=8, channels=1)
    helper.add_gradient_operators(["loss"])
    SGD(learning_rate=0.02, momentum=0.9).add_updates(helper)
    workspace = fed(helper, 4)
    net = workspace.create_net(helper.net, "dag", 2)
    for _ in range(25):
        net.run()
    net.close()
    assert float(workspace.fetch_blob("loss")) < 0.1
    assert float(workspace.fetch_blob("accuracy")) == 1


def test_batches_sizes_channels_and_classes_can_be_chosen() -> None:
    helper = zoo.build_training("resnet20", 3, classes=7, image_size=20, channels=1)
    assert helper.inputs["data"].shape == (3, 1, 20, 20)
    assert helper.inputs["label"].shape == (3,)
    assert helper.parameters["pred_w"] == (7, 64)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet20", "mobilenet_v2", "nasnet_a"])
def test_with_channels_last_a_network_is_the_same(name: str) -> None:
    """The same images and parameters, with their axes in the other order, give the same loss and gradients."""
    planes, last = (
        zoo.build_training(name, 2, classes=4, image_size=max(64, zoo.architecture(name).least_size), order=order)
        for order in ("NCHW", "NHWC")
    )
    results, gradients = [], []
    one, other = fed(planes, 4), Workspace()
    last.create(other)
    for blob in [*planes.checkpoint_blobs(), "data", "label"]:
        value = one.fetch_blob(blob)
        value = value.astype(np.float64) if value.dtype == np.float32 else value
        one.feed_blob(blob, value)
        other.feed_blob(blob, np.ascontiguousarray(np.moveaxis(value, 1, -1)) if value.ndim == 4 else value)
    assert last.inputs["data"].shape == other.fetch_blob("data").shape
    for helper, workspace in ((planes, one), (last, other)):
        found = helper.add_gradient_operators(["loss"])
        workspace.run_net_once(helper.net)
        results.append(workspace.fetch_blob("loss"))
        gradients.append(workspace.fetch_blob(str(found[helper.params[0]])))
    np.testing.assert_allclose(results[1], results[0], rtol=1e-9)
    expected = np.moveaxis(gradients[0], 1, -1)
    assert expected.dtype == np.float64
    assert np.linalg.norm(gradients[1] - expected) < 1e-7 * np.linalg.norm(expected)


def test_the_seed_decides_what_a_training_starts_from() -> None:
    values = []
    for seed in (1, 1, 2):
        workspace = Workspace()
        zoo.build_training("lenet_digits", 1, seed).create(workspace)
        values.append(workspace.fetch_blob("conv1_w").tobytes())
    assert values[0] == values[1] != values[2]


def test_what_a_network_does_not_fit_is_refused() -> None:
    with pytest.raises(ModelFormatError, match="no zoo model 'lennet'; did you mean lenet"):
        zoo.build_training("lennet", 1)
    with pytest.raises(ModelFormatError, match="'lenet': the batch size must be at least 1, found 0"):
        zoo.build_training("lenet", 0)
    with pytest.raises(ModelFormatError, match="'lenet': images must be at least 16 pixels high, found 15"):
        zoo.build_training("lenet", 1, image_size=15)
    with pytest.raises(ModelFormatError, match=r"'lenet': channels and classes must be at least 1, found .*classes=0"):
        zoo.build_training("lenet", 1, classes=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in zoo.names() if name != "vgg19"])
def test_the_smallest_images_run(name: str) -> None:
    architecture = zoo.architecture(name)
    helper = zoo.build_training(name, 2, classes=3, image_size=architecture.least_size)
    workspace = fed(helper, 3)
    workspace.run_net_once(helper.net)
    assert workspace.fetch_blob("softmax").shape == (2, 3)
