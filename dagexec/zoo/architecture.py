"""What an architecture is to the zoo: layers from images to scores; models for inference and training are made of it.

The layers are the same for both, and so are the names of blobs. Models for inference have synthetic parameters, sized
so that activations stay finite and results are not saturated; a training starts from neutral ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from dagexec.building.fillers import Filler
from dagexec.building.model_builder import ModelBuilder
from dagexec.core.dtypes import INT32
from dagexec.core.model import Model
from dagexec.errors import ModelFormatError
from dagexec.ops.base.layout import NCHW
from dagexec.platform.lazy import LazyModule
from dagexec.platform.records import dataclass

if not TYPE_CHECKING:
    model_helper = LazyModule("dagexec.training.model_helper")
else:
    from dagexec.training import model_helper

Batch = TypeVar("Batch", int, int | None)


@dataclass(frozen=True)
class Images:
    """What a network classifies: images of `channels` x `size` x `size`, in so many classes; `order` NCHW or NHWC."""

    channels: int
    size: int
    classes: int
    order: str = NCHW

    def axes(self, batch: Batch, channels: int, height: int, width: int) -> tuple[Batch, int, int, int]:
        """Something of each axis, as the order has them."""
        if self.order == NCHW:
            return batch, channels, height, width
        return batch, height, width, channels


@dataclass(frozen=True)
class Architecture:
    """A network of the zoo.

    Attributes:
        name: in the zoo.
        images: those it was published for.
        layers: adds the layers to a builder, from the blob of the images on, and returns that of the classes' scores.
        least_size: the smallest images that every layer has a pixel of.
        probabilities: what `layers` returns is probabilities instead of scores.
    """

    name: str
    images: Images
    layers: Callable[[ModelBuilder, str, Images], str]
    least_size: int = 1
    probabilities: bool = False

    def model(self, batch_size: int | None, seed: int) -> Model:
        """For inference: from `data` (batch_size x channels x size x size) to `softmax`, with synthetic parameters.

        A `batch_size` of None leaves it to each run.
        """
        builder = ModelBuilder(self.name, seed=seed)
        scores = self.layers(builder, self._data(builder, batch_size, self.images), self.images)
        return builder.model([scores if self.probabilities else builder.softmax(scores, "softmax")])

    def training(
        self,
        batch_size: int,
        seed: int,
        *,
        channels: int | None = None,
        size: int | None = None,
        classes: int | None = None,
        order: str = NCHW,
    ) -> model_helper.ModelHelper:
        """For training: from `data` and `label` (batch_size, int32) to `softmax`, `loss` and `accuracy`.

        With `order` NHWC images, activations and filters have their channels last. What is not given is as published.
        Raises ModelFormatError for images that the network does not fit, and SchemaError for another order.
        """
        given = {"channels": channels, "size": size, "classes": classes}
        images = replace(
            self.images, order=order, **{name: value for name, value in given.items() if value is not None}
        )
        self._check(images)
        helper = model_helper.ModelHelper(self.name, seed=seed, order=order, training=True)
        data = self._data(helper, batch_size, images)
        self.add_training_layers(helper, data, helper.add_input("label", (batch_size,), INT32), images)
        return helper

    def add_training_layers(self, builder: ModelBuilder, data: str, label: str, images: Images) -> str:
        """Add the layers with loss and accuracy to a builder; returns the loss."""
        scores = self.layers(builder, data, images)
        if self.probabilities:
            softmax, loss = scores, builder.averaged_loss(builder.label_cross_entropy(scores, label, "cross_entropy"))
        else:
            softmax, loss = builder.softmax_with_loss(scores, label)
        builder.accuracy(softmax, label)
        return loss

    def _check(self, images: Images) -> None:
        if min(images.channels, images.classes) < 1:
            raise ModelFormatError(f"zoo model {self.name!r}: channels and classes must be at least 1, found {images}")
        if images.size < self.least_size:
            raise ModelFormatError(
                f"zoo model {self.name!r}: images must be at least {self.least_size} pixels high, found {images.size}"
            )

    def _data(self, builder: ModelBuilder, batch_size: int | None, images: Images) -> str:
        return builder.add_input("data", images.axes(batch_size, images.channels, images.size, images.size))


def stand_in(builder: ModelBuilder, filler: Filler, start: Filler | None = None) -> Filler | None:
    """`filler` for a model with synthetic parameters; for training `start`, by default what the builder begins with."""
    return start if builder.training else filler
