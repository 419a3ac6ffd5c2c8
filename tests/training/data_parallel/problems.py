"""Small models and data, in float32 or float64, for training on several devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.building.fillers import Filler, constant
from dagexec.core.arguments import make_argument
from dagexec.core.dtypes import FLOAT32, FLOAT64, INT32, INT64, TypeMeta
from dagexec.core.proto import OperatorDef
from dagexec.training.data_parallel import ParallelModel, parallelize
from dagexec.training.model_helper import ModelHelper
from dagexec.training.optimizer import SGD, Optimizer

Array = npt.NDArray[Any]
Forward = Callable[[ModelHelper], Sequence[str] | str]


class DoubleHelper(ModelHelper):
    """A model helper whose parameters are float64."""

    def _fill(self, name: str, shape: Sequence[int], filler: Filler, dtype: TypeMeta = FLOAT32) -> None:
        super()._fill(name, shape, filler, dtype)
        if dtype is FLOAT32:
            single = f"{name}_single"
            self.init_net.op[-1].output[0] = single
            cast = OperatorDef(type="Cast", input=[single], output=[name])
            cast.device_option.CopyFrom(self.init_net.op[-1].device_option)
            cast.arg.append(make_argument("to", FLOAT64.number))
            self.init_net.op.append(cast)


def images(helper: ModelHelper, dtype: TypeMeta = FLOAT32) -> None:
    """The inputs of a classifier of 8x8 images."""
    helper.add_input("data", (None, 1, 8, 8), dtype)
    helper.add_input("label", (None,), INT32)


def lenet(helper: ModelHelper) -> list[str]:
    """Two convolutions and two fully connected layers."""
    x = helper.conv("data", "conv1", 1, 4, kernel=3, pad=1)
    x = helper.max_pool(x, "pool1", 2, stride=2)
    x = helper.conv(x, "conv2", 4, 6, kernel=3, pad=1)
    x = helper.relu(x, x)
    x = helper.relu(helper.fc(x, "fc1", 6 * 4 * 4, 12), "relu1")
    x = helper.fc(x, "pred", 12, 10)
    _, loss = helper.softmax_with_loss(x, "label")
    return [loss]


def normalized(helper: ModelHelper) -> list[str]:
    """Convolutions with batch normalization and a shortcut."""
    x = helper.conv("data", "conv1", 1, 4, kernel=3, pad=1, bias=False)
    x = helper.relu(helper.spatial_bn(x, "bn1", 4), "relu1")
    y = helper.spatial_bn(helper.conv(x, "conv2", 4, 4, kernel=3, pad=1, bias=False), "bn2", 4)
    x = helper.relu(helper.sum([y, x], "sum"), "relu2")
    x = helper.global_average_pool(x, "pool")
    x = helper.fc(x, "pred", 4, 10)
    _, loss = helper.softmax_with_loss(x, "label")
    return [loss]


def dropping(helper: ModelHelper) -> list[str]:
    """Two fully connected layers and dropout between them."""
    x = helper.dropout(helper.fc("data", "fc1", 64, 20), "drop", ratio=0.5)
    _, loss = helper.softmax_with_loss(helper.fc(x, "pred", 20, 10), "label")
    return [loss]


def image_batch(count: int, dtype: npt.DTypeLike = np.float32, seed: int = 0) -> dict[str, Array]:
    """Random images and labels."""
    random = np.random.default_rng(seed)
    return {
        "data": random.standard_normal((count, 1, 8, 8)).astype(dtype),
        "label": random.integers(0, 10, count).astype(np.int32),
    }


def words(helper: ModelHelper) -> None:
    """The inputs of `embedded`."""
    helper.add_input("word", (None,), INT64)
    helper.add_input("label", (None,), INT32)


def embedded(helper: ModelHelper) -> list[str]:
    """A table of 12 words, of which a batch reads some rows; its gradient is sparse."""
    helper.add_parameter("table", (12, 5), Filler("UniformFill", {"min": -1.0, "max": 1.0}))
    x = helper.add_operator("Gather", ["table", "word"], ["embedded"])
    x = helper.fc(x, "pred", 5, 10)
    _, loss = helper.softmax_with_loss(x, "label")
    return [loss]


def word_batch(count: int, seed: int = 0) -> dict[str, Array]:
    """Random words, some more than once, and labels."""
    random = np.random.default_rng(seed)
    return {
        "word": random.integers(0, 12, count).astype(np.int64),
        "label": random.integers(0, 10, count).astype(np.int32),
    }


def dyadic(helper: ModelHelper) -> list[str]:
    """A linear model with a squared loss, whose numbers are small multiples of powers of two: all sums are exact."""
    helper.add_parameter("w", (1, 4), constant(0.5))
    helper.add_parameter("b", (1,), constant(-0.25))
    x = helper.add_operator("FC", ["x", "w", "b"], ["y"])
    distance = helper.add_operator("SquaredL2Distance", [x, "target"], ["distance"])
    return [helper.add_operator("AveragedLoss", [distance], ["loss"])]


def numbers(helper: ModelHelper, dtype: TypeMeta = FLOAT32) -> None:
    """The inputs of `dyadic`."""
    helper.add_input("x", (None, 4), dtype)
    helper.add_input("target", (None, 1), dtype)


def number_batch(count: int, dtype: npt.DTypeLike = np.float32) -> dict[str, Array]:
    """Small integers."""
    random = np.random.default_rng(3)
    return {
        "x": random.integers(-2, 3, (count, 4)).astype(dtype),
        "target": random.integers(-2, 3, (count, 1)).astype(dtype),
    }


def parallel_images(
    forward: Forward,
    devices: Sequence[str],
    *,
    double: bool = False,
    optimizer: Optimizer | None = None,
    inputs: Callable[[ModelHelper, TypeMeta], None] = images,
    **options: Any,
) -> ParallelModel:
    """`forward` over images on these devices, by default with momentum."""
    make = DoubleHelper if double else ModelHelper
    return parallelize(
        partial(inputs, dtype=FLOAT64 if double else FLOAT32),  # type: ignore[call-arg]
        forward,
        optimizer or SGD(0.125, momentum=0.5),
        devices=devices,
        make_helper=partial(make, "tiny", seed=1, training=True),
        **options,
    )


def trained(model: ParallelModel, batches: Sequence[dict[str, Array]]) -> tuple[list[float], dict[str, Array]]:
    """The losses of a step on each batch, and the parameters after them. Closes the model."""
    with model:
        losses = [sum(model.step(batch).values()) for batch in batches]
        return losses, model.state()


def largest_difference(one: dict[str, Array], other: dict[str, Array]) -> float:
    """The largest difference between two states, relative to the largest number of the tensor."""
    assert one.keys() == other.keys()
    return max(
        float(
            np.max(np.abs(one[name] - other[name]), initial=0.0) / max(np.max(np.abs(other[name]), initial=0.0), 1e-3)
        )
        for name in one
    )


def same_bytes(one: dict[str, Array], other: dict[str, Array]) -> list[str]:
    """The names of the tensors whose bytes differ."""
    assert one.keys() == other.keys()
    return [name for name in one if one[name].tobytes() != other[name].tobytes()]
