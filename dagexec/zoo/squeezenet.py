"""SqueezeNet 1.1, and four of them side by side as an ensemble.

Iandola et al. 2016, "SqueezeNet: AlexNet-level accuracy with 50x fewer parameters"; 1.1 is the authors' later release,
which pools earlier and needs 2.4 times less computation.
"""

from __future__ import annotations

import math

from dagexec.training.fillers import gaussian
from dagexec.training.model_helper import ModelHelper
from dagexec.zoo.architecture import Architecture, Images

_FEATURES = 512
_TOWERS = 4


def _one(helper: ModelHelper, data: str, images: Images) -> str:
    """The convolutions and the classifier."""
    return _logits(helper, _features(helper, data, "", images), "", images)


def _towers(helper: ModelHelper, data: str, images: Images) -> str:
    """Four networks with weights of their own on one input; the mean of their probabilities."""
    votes = []
    for number in range(_TOWERS):
        scope = f"tower{number}/"
        logits = _logits(helper, _features(helper, data, scope, images), scope, images)
        votes.append(helper.softmax(logits, f"{scope}softmax"))
    return helper.add_operator("Mean", votes, ["softmax"])


def _features(helper: ModelHelper, data: str, scope: str, images: Images) -> str:
    x = helper.conv(data, f"{scope}conv1", images.channels, 64, kernel=3, stride=2)
    x = helper.relu(x, x)
    x = helper.max_pool(x, f"{scope}pool1", kernel=3, stride=2, ceil_mode=True)
    x = _fire(helper, x, f"{scope}fire2", 64, squeeze=16, expand=64)
    x = _fire(helper, x, f"{scope}fire3", 128, squeeze=16, expand=64)
    x = helper.max_pool(x, f"{scope}pool3", kernel=3, stride=2, ceil_mode=True)
    x = _fire(helper, x, f"{scope}fire4", 128, squeeze=32, expand=128)
    x = _fire(helper, x, f"{scope}fire5", 256, squeeze=32, expand=128)
    x = helper.max_pool(x, f"{scope}pool5", kernel=3, stride=2, ceil_mode=True)
    x = _fire(helper, x, f"{scope}fire6", 256, squeeze=48, expand=192)
    x = _fire(helper, x, f"{scope}fire7", 384, squeeze=48, expand=192)
    x = _fire(helper, x, f"{scope}fire8", 384, squeeze=64, expand=256)
    return _fire(helper, x, f"{scope}fire9", _FEATURES, squeeze=64, expand=256)


def _fire(helper: ModelHelper, x: str, name: str, dim_in: int, *, squeeze: int, expand: int) -> str:
    """A fire module: a 1x1 squeeze layer feeding 1x1 and 3x3 expand layers, joined (section 3.1)."""
    squeezed = helper.conv(x, f"{name}/squeeze1x1", dim_in, squeeze, kernel=1)
    squeezed = helper.relu(squeezed, squeezed)
    narrow = helper.conv(squeezed, f"{name}/expand1x1", squeeze, expand, kernel=1)
    narrow = helper.relu(narrow, narrow)
    wide = helper.conv(squeezed, f"{name}/expand3x3", squeeze, expand, kernel=3, pad=1)
    wide = helper.relu(wide, wide)
    return helper.concat([narrow, wide], f"{name}/concat")


def _logits(helper: ModelHelper, features: str, scope: str, images: Images) -> str:
    """The classifier: a 1x1 convolution to a map for each class, averaged over the image."""
    x = helper.dropout(features, f"{scope}drop9", ratio=0.5)
    weight_init = gaussian(math.sqrt(2 / _FEATURES))
    x = helper.conv(x, f"{scope}conv10", _FEATURES, images.classes, kernel=1, weight_init=weight_init)
    x = helper.relu(x, x)
    x = helper.global_average_pool(x, f"{scope}pool10")
    return helper.flatten(x, f"{scope}logits")


SQUEEZENET = Architecture("squeezenet", Images(3, 224, 1000), _one, least_size=31)
"""SqueezeNet 1.1; 1,235,496 parameters."""

SQUEEZENET_TOWERS = Architecture("squeezenet_towers", Images(3, 224, 1000), _towers, least_size=31, probabilities=True)
"""An ensemble of four SqueezeNets: independent of one another, work that a scheduler can spread over four workers."""
