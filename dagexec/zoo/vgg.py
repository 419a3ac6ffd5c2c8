"""VGG-19: Simonyan and Zisserman 2014, "Very deep convolutional networks", table 1, column E."""

from __future__ import annotations

from dagexec.building.model_builder import ModelBuilder
from dagexec.zoo.architecture import Architecture, Images

_STAGES = ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4))  # channels, convolutions


def _layers(builder: ModelBuilder, x: str, images: Images) -> str:
    """Five stages of convolutions, each followed by pooling, and three fully connected layers."""
    dim = images.channels
    for stage, (channels, convolutions) in enumerate(_STAGES, start=1):
        for number in range(1, convolutions + 1):
            x = builder.conv(x, f"conv{stage}_{number}", dim, channels, kernel=3, pad=1)
            x = builder.relu(x, x)
            dim = channels
        x = builder.max_pool(x, f"pool{stage}", kernel=2, stride=2)
    size = dim * (images.size // 32) ** 2
    for name in ("fc6", "fc7"):
        x = builder.fc(x, name, size, 4096)
        x = builder.relu(x, x)
        x = builder.dropout(x, f"{name}_drop", ratio=0.5)
        size = 4096
    return builder.fc(x, "pred", size, images.classes)


VGG19 = Architecture("vgg19", Images(3, 224, 1000), _layers, least_size=32)
"""VGG-19; 143,667,240 parameters."""
