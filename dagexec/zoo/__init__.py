"""Well-known architectures: with synthetic weights for examples, tests and benchmarks, and ready to be trained.

Layers and sizes are those of the papers named in each module. `build` gives models for inference: their weights are not
trained but random, reproducible from a seed, and sized so that activations stay finite and the result is not saturated.
`build_training` gives model helpers, whose parameters start as a training needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagexec.core.model import Model
from dagexec.errors import ModelFormatError
from dagexec.ops.base.layout import NCHW
from dagexec.platform.lazy import LazyModule
from dagexec.zoo.architecture import Architecture

if not TYPE_CHECKING:
    difflib = LazyModule("difflib")
else:
    import difflib

    from dagexec.training.model_helper import ModelHelper


_ARCHITECTURES = {
    "densenet121": ("densenet", "DENSENET121"),
    "googlenet": ("googlenet", "GOOGLENET"),
    "inception_v3": ("inception_v3", "INCEPTION_V3"),
    "lenet": ("lenet", "LENET"),
    "lenet_digits": ("lenet", "LENET_DIGITS"),
    "mobilenet_v2": ("mobilenet", "MOBILENET_V2"),
    "nasnet_a": ("nasnet", "NASNET_A"),
    "resnet20": ("resnet_cifar", "RESNET20"),
    "resnet50": ("resnet", "RESNET50"),
    "squeezenet": ("squeezenet", "SQUEEZENET"),
    "squeezenet_towers": ("squeezenet", "SQUEEZENET_TOWERS"),
    "vgg19": ("vgg", "VGG19"),
}
"""The module of each, which is imported when somebody asks for it, and its name there."""

__all__ = ["architecture", "build", "build_training", "names"]


def names() -> list[str]:
    """The models `build` knows, sorted."""
    return sorted(_ARCHITECTURES)


def architecture(name: str) -> Architecture:
    """The network `name`. Raises ModelFormatError, suggesting close names, when there is none."""
    found = _ARCHITECTURES.get(name)
    if found is None:
        close = difflib.get_close_matches(name, _ARCHITECTURES, n=3)
        hint = f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(names())}"
        raise ModelFormatError(f"there is no zoo model {name!r}; {hint}")
    module, constant = found
    made: Architecture = getattr(LazyModule(f"{__name__}.{module}"), constant)
    return made


def build(name: str, batch_size: int | None = None, seed: int = 0) -> Model:
    """The model `name` with input `data` (batch_size x channels x height x width) and output `softmax`.

    With None a run may have any number of images; whoever needs one (compilation, `inspect`, a warm start) takes 1.
    Raises ModelFormatError, suggesting close names, when there is no such model, or for a batch size below 1.
    """
    found = architecture(name)
    if batch_size is not None:
        _check_batch_size(name, batch_size)
    return found.model(batch_size, seed)


def build_training(
    name: str,
    batch_size: int,
    seed: int = 0,
    *,
    classes: int | None = None,
    image_size: int | None = None,
    channels: int | None = None,
    order: str = NCHW,
) -> ModelHelper:
    """The model `name` for training, without gradients yet.

    Inputs are `data` (batch_size x channels x image_size x image_size) and `label` (batch_size, int32); `loss`,
    `accuracy` and `softmax` are computed from them. With `order` NHWC images, activations and filters have their
    channels last, which is the faster on processors. What is not given is as published.
    Raises ModelFormatError as `build` does, and for images that the network does not fit; SchemaError for another
    order.
    """
    found = architecture(name)
    _check_batch_size(name, batch_size)
    return found.training(batch_size, seed, channels=channels, size=image_size, classes=classes, order=order)


def _check_batch_size(name: str, batch_size: int) -> None:
    if batch_size < 1:
        raise ModelFormatError(f"zoo model {name!r}: the batch size must be at least 1, found {batch_size}")
