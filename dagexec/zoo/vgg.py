"""VGG-19: Simonyan and Zisserman 2014, "Very deep convolutional networks", table 1, column E."""

from __future__ import annotations

from dagexec.core.model import Model
from dagexec.training.model_helper import ModelHelper

_STAGES = ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4))  # channels, convolutions


def vgg19(batch_size: int, seed: int) -> Model:
    """VGG-19 for 224x224 images; 143,667,240 parameters."""
    helper = ModelHelper("vgg19", seed=seed)
    x = helper.add_input("data", (batch_size, 3, 224, 224))
    dim = 3
    for stage, (channels, convolutions) in enumerate(_STAGES, start=1):
        for number in range(1, convolutions + 1):
            x = helper.conv(x, f"conv{stage}_{number}", dim, channels, kernel=3, pad=1)
            x = helper.relu(x, x)
            dim = channels
        x = helper.max_pool(x, f"pool{stage}", kernel=2, stride=2)
    size = dim * 7 * 7
    for name in ("fc6", "fc7"):
        x = helper.fc(x, name, size, 4096)
        x = helper.relu(x, x)
        x = helper.dropout(x, f"{name}_drop", ratio=0.5)
        size = 4096
    x = helper.fc(x, "pred", size, 1000)
    return helper.model([helper.softmax(x, "softmax")])
