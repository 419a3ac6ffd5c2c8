"""The handwritten digits of scikit-learn: 1,437 images to train on, 360 held out."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec import zoo
from dagexec.core.dtypes import INT32
from dagexec.ops.families.optimize.policies import Poly
from dagexec.training.datasets import digits
from dagexec.training.model_helper import ModelHelper
from dagexec.training.optimizer import SGD, Optimizer
from dagexec.training.task import Results, TrainingTask
from dagexec.zoo.architecture import Architecture, Images

Array = npt.NDArray[Any]


def lenet(seed: int) -> TrainingTask:
    """LeNet on the digits at 28x28, as it was published; stochastic gradient descent with momentum."""
    epochs, batch_size = 20, 32
    optimizer = SGD(0.02, momentum=0.9, weight_decay=5e-4, policy=Poly(1.0, epochs * (1437 // batch_size) + 1))
    return _classification("lenet_digits", zoo.architecture("lenet"), 28, optimizer, batch_size, epochs, seed, pixels=2)


def resnet20(seed: int) -> TrainingTask:
    """ResNet-20 on the digits at 32x32, with batch normalization and momentum."""
    epochs, batch_size = 8, 32
    optimizer = SGD(0.05, momentum=0.9, weight_decay=1e-4, policy=Poly(1.0, epochs * (1437 // batch_size) + 1))
    return _classification(
        "resnet20_digits", zoo.architecture("resnet20"), 32, optimizer, batch_size, epochs, seed, pixels=2
    )


def _classification(
    name: str,
    network: Architecture,
    size: int,
    optimizer: Optimizer,
    batch_size: int,
    epochs: int,
    seed: int,
    pixels: int,
) -> TrainingTask:
    images = Images(channels=1, size=size, classes=10)
    split = digits(size, seed=seed)
    return TrainingTask(
        name,
        partial(_inputs, images=images),
        partial(_layers, network=network, images=images),
        optimizer,
        split.train,
        split.test,
        batch_size,
        epochs,
        unit="images",
        transform=partial(shifted, pixels=pixels),
    )


def _inputs(helper: ModelHelper, batch_size: int, images: Images) -> None:
    helper.add_input("data", (batch_size, images.channels, images.size, images.size))
    helper.add_input("label", (batch_size,), INT32)


def _layers(helper: ModelHelper, network: Architecture, images: Images) -> Results:
    loss = network.add_training_layers(helper, "data", "label", images)
    return Results([loss], {"loss": "loss", "accuracy": "accuracy"})


def shifted(sample: Mapping[str, Array], generator: np.random.Generator, *, pixels: int) -> dict[str, Array]:
    """An image (C, H, W) moved by at most so many pixels in each direction; what is uncovered is 0."""
    image = sample["data"]
    down, right = generator.integers(-pixels, pixels + 1, 2)
    moved = np.zeros_like(image)
    height, width = image.shape[1:]
    moved[:, max(down, 0) : height + min(down, 0), max(right, 0) : width + min(right, 0)] = image[
        :, max(-down, 0) : height + min(-down, 0), max(-right, 0) : width + min(-right, 0)
    ]
    return {**sample, "data": moved}
