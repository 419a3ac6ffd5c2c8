"""LeNet as in Caffe's and Caffe2's MNIST tutorials, after LeCun et al. 1998, "Gradient-based learning"."""

from __future__ import annotations

from dagexec.building.fillers import gaussian, lecun_normal
from dagexec.building.model_builder import ModelBuilder
from dagexec.zoo.architecture import Architecture, Images


def _layers(builder: ModelBuilder, x: str, images: Images) -> str:
    """Two convolutions, each followed by pooling, and two fully connected layers."""
    return _classified(builder, x, images, kernel=5, pad=0, size=images.size // 4 - 3)


def _small_layers(builder: ModelBuilder, x: str, images: Images) -> str:
    """The same with padded 3x3 windows, which leave pixels of small images."""
    return _classified(builder, x, images, kernel=3, pad=1, size=images.size // 4)


def _classified(builder: ModelBuilder, x: str, images: Images, *, kernel: int, pad: int, size: int) -> str:
    """The layers. A training starts the convolutions with less than the builder would, as no ReLU follows them."""

    def conv(x: str, name: str, dim_in: int, dim_out: int) -> str:
        start = lecun_normal(dim_in * kernel**2) if builder.training else None
        return builder.conv(x, name, dim_in, dim_out, kernel=kernel, pad=pad, weight_init=start)

    x = conv(x, "conv1", images.channels, 20)
    x = builder.max_pool(x, "pool1", kernel=2, stride=2)
    x = conv(x, "conv2", 20, 50)
    x = builder.max_pool(x, "pool2", kernel=2, stride=2)
    x = builder.fc(x, "fc3", 50 * size**2, 500)
    x = builder.relu(x, x)
    return builder.fc(x, "pred", 500, images.classes, weight_init=gaussian(0.03))


LENET = Architecture("lenet", Images(1, 28, 10), _layers, least_size=16)
"""LeNet for gray images; 431,080 parameters."""

LENET_DIGITS = Architecture("lenet_digits", Images(1, 8, 10), _small_layers, least_size=4)
"""LeNet for the 8x8 digits of scikit-learn; 114,760 parameters."""
