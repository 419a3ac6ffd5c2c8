"""SqueezeNet 1.1, and four of them side by side as an ensemble.

Iandola et al. 2016, "SqueezeNet: AlexNet-level accuracy with 50x fewer parameters"; 1.1 is the authors' later release,
which pools earlier and needs 2.4 times less computation.
"""

from __future__ import annotations

import math

from dagexec.building.fillers import gaussian
from dagexec.building.model_builder import ModelBuilder
from dagexec.zoo.architecture import Architecture, Images

_FEATURES = 512
_TOWERS = 4


def _one(builder: ModelBuilder, data: str, images: Images) -> str:
    """The convolutions and the classifier."""
    return _logits(builder, _features(builder, data, "", images), "", images)


def _towers(builder: ModelBuilder, data: str, images: Images) -> str:
    """Four networks with weights of their own on one input; the mean of their probabilities."""
    votes = []
    for number in range(_TOWERS):
        scope = f"tower{number}/"
        logits = _logits(builder, _features(builder, data, scope, images), scope, images)
        votes.append(builder.softmax(logits, f"{scope}softmax"))
    return builder.add_operator("Mean", votes, ["softmax"])


def _features(builder: ModelBuilder, data: str, scope: str, images: Images) -> str:
    x = builder.conv(data, f"{scope}conv1", images.channels, 64, kernel=3, stride=2)
    x = builder.relu(x, x)
    x = builder.max_pool(x, f"{scope}pool1", kernel=3, stride=2, ceil_mode=True)
    x = _fire(builder, x, f"{scope}fire2", 64, squeeze=16, expand=64)
    x = _fire(builder, x, f"{scope}fire3", 128, squeeze=16, expand=64)
    x = builder.max_pool(x, f"{scope}pool3", kernel=3, stride=2, ceil_mode=True)
    x = _fire(builder, x, f"{scope}fire4", 128, squeeze=32, expand=128)
    x = _fire(builder, x, f"{scope}fire5", 256, squeeze=32, expand=128)
    x = builder.max_pool(x, f"{scope}pool5", kernel=3, stride=2, ceil_mode=True)
    x = _fire(builder, x, f"{scope}fire6", 256, squeeze=48, expand=192)
    x = _fire(builder, x, f"{scope}fire7", 384, squeeze=48, expand=192)
    x = _fire(builder, x, f"{scope}fire8", 384, squeeze=64, expand=256)
    return _fire(builder, x, f"{scope}fire9", _FEATURES, squeeze=64, expand=256)


def _fire(builder: ModelBuilder, x: str, name: str, dim_in: int, *, squeeze: int, expand: int) -> str:
    """A fire module: a 1x1 squeeze layer feeding 1x1 and 3x3 expand layers, joined (section 3.1)."""
    squeezed = builder.conv(x, f"{name}/squeeze1x1", dim_in, squeeze, kernel=1)
    squeezed = builder.relu(squeezed, squeezed)
    narrow = builder.conv(squeezed, f"{name}/expand1x1", squeeze, expand, kernel=1)
    narrow = builder.relu(narrow, narrow)
    wide = builder.conv(squeezed, f"{name}/expand3x3", squeeze, expand, kernel=3, pad=1)
    wide = builder.relu(wide, wide)
    return builder.concat([narrow, wide], f"{name}/concat")


def _logits(builder: ModelBuilder, features: str, scope: str, images: Images) -> str:
    """The classifier: a 1x1 convolution to a map for each class, averaged over the image."""
    x = builder.dropout(features, f"{scope}drop9", ratio=0.5)
    weight_init = gaussian(math.sqrt(2 / _FEATURES))
    x = builder.conv(x, f"{scope}conv10", _FEATURES, images.classes, kernel=1, weight_init=weight_init)
    x = builder.relu(x, x)
    x = builder.global_average_pool(x, f"{scope}pool10")
    return builder.flatten(x, f"{scope}logits")


SQUEEZENET = Architecture("squeezenet", Images(3, 224, 1000), _one, least_size=31)
"""SqueezeNet 1.1; 1,235,496 parameters."""

SQUEEZENET_TOWERS = Architecture("squeezenet_towers", Images(3, 224, 1000), _towers, least_size=31, probabilities=True)
"""An ensemble of four SqueezeNets: independent of one another, work that a scheduler can spread over four workers."""
