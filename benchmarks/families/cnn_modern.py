"""Convolutional networks with depthwise or grouped layers, squeeze-and-excite and newer activations."""

from __future__ import annotations

from families.cnn_old import classifier
from families.net import NEWER, OLDER, Net

_NAMES = {
    "mobilenet_v3_small": NEWER,
    "efficientnet_b0": NEWER,
    "convnext_tiny": NEWER,
    "resnext50_32x4d": OLDER,
    "mobilenet_v2": OLDER,
    "regnet_y_400mf": NEWER,
    "shufflenet_v2_x1_0": OLDER,
    "mnasnet1_0": NEWER,
}


def nets() -> list[Net]:
    return [classifier(name, exporter) for name, exporter in _NAMES.items()]
