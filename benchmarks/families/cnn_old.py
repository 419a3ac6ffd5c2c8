"""Convolutional networks up to 2017, for images of 224 x 224 (Inception v3: 299 x 299)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from model_files import compiled_operators
from model_files.torch_export import normal

from families.net import NEWER, OLDER, Net

compiled_operators.provide()
import torchvision  # noqa: E402

_SIZE = 224


def image(size: int, rows: int) -> dict[str, Any]:
    """Pixels with mean 0 and variance 1, as they are given to trained nets."""
    return {"image": normal(rows, 3, size, size, seed=rows)}


def classifier(name: str, exporter: str, size: int = _SIZE, **options: Any) -> Net:
    """A network of torchvision."""
    build = partial(torchvision.models.get_model, name, weights=None, **options)
    return Net(name, build, partial(image, size), exporter=exporter, settle=4)


def _plain(name: str) -> Net:
    """One without normalization, whose values would vanish with its own initial weights."""
    net = classifier(name, OLDER if name == "squeezenet1_1" else NEWER)

    def build() -> Any:
        made = net.build()
        for part in made.modules():
            if isinstance(part, torch.nn.Conv2d | torch.nn.Linear):
                torch.nn.init.kaiming_normal_(part.weight, nonlinearity="relu")
        return made

    return replace(net, build=build)


def nets() -> list[Net]:
    auxiliary: Mapping[str, Any] = {"init_weights": True, "aux_logits": False}
    return [
        *map(_plain, ("alexnet", "vgg16", "squeezenet1_1")),
        classifier("resnet50", NEWER),
        classifier("densenet121", OLDER),
        classifier("googlenet", OLDER, **auxiliary),
        classifier("inception_v3", NEWER, 299, **auxiliary),
    ]
