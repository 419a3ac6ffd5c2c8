"""LeNet as in Caffe's and Caffe2's MNIST tutorials, after LeCun et al. 1998, "Gradient-based learning"."""

from __future__ import annotations

from dagexec.core.model import Model
from dagexec.training.fillers import gaussian
from dagexec.training.model_helper import ModelHelper


def lenet(batch_size: int, seed: int) -> Model:
    """Two convolutions and two fully connected layers for 28x28 grey images in 10 classes; 431,080 parameters."""
    helper = ModelHelper("lenet", seed=seed)
    x = helper.add_input("data", (batch_size, 1, 28, 28))
    x = helper.conv(x, "conv1", 1, 20, kernel=5)
    x = helper.max_pool(x, "pool1", kernel=2, stride=2)
    x = helper.conv(x, "conv2", 20, 50, kernel=5)
    x = helper.max_pool(x, "pool2", kernel=2, stride=2)
    x = helper.fc(x, "fc3", 50 * 4 * 4, 500)
    x = helper.relu(x, x)
    x = helper.fc(x, "pred", 500, 10, weight_init=gaussian(0.03))
    return helper.model([helper.softmax(x, "softmax")])
