"""What parameters start from: filler operators, described so that a model builder can make them for any shape.

Sources: Glorot and Bengio 2010 (Xavier), He et al. 2015, "Delving deep into rectifiers" (He normal, over the fan-in).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import field

from dagexec.core.arguments import ArgumentValue
from dagexec.platform.records import dataclass

__all__ = [
    "CAFFE2",
    "HE",
    "SYNTHETIC",
    "Filler",
    "Initialization",
    "constant",
    "gaussian",
    "he_normal",
    "lecun_normal",
    "uniform",
    "xavier",
]


@dataclass(frozen=True)
class Filler:
    """A filler operator: its type and the arguments beside the shape."""

    type: str
    arguments: Mapping[str, ArgumentValue] = field(default_factory=dict)


def constant(value: float) -> Filler:
    """Every element is `value`."""
    return Filler("ConstantFill", {"value": float(value)})


def uniform(low: float, high: float) -> Filler:
    """Uniform in [low, high)."""
    return Filler("UniformFill", {"min": float(low), "max": float(high)})


def gaussian(std: float, mean: float = 0.0) -> Filler:
    """Normal with this mean and standard deviation."""
    return Filler("GaussianFill", {"mean": float(mean), "std": float(std)})


def he_normal(fan_in: int) -> Filler:
    """Normal with variance 2 / fan_in: keeps the size of activations through ReLU layers (He et al. 2015, eq. 10)."""
    return gaussian(math.sqrt(2 / fan_in))


def lecun_normal(fan_in: int) -> Filler:
    """Normal with variance 1 / fan_in: the same for a layer that no ReLU follows."""
    return gaussian(math.sqrt(1 / fan_in))


def xavier(_fan_in: int) -> Filler:
    """Caffe2's XavierFill, which finds the fan-in from the shape."""
    return Filler("XavierFill")


@dataclass(frozen=True)
class Initialization:
    """The fillers a model builder uses where a layer names none of its own.

    Attributes:
        weight: filler of convolution and fully connected weights, from their fan-in.
        bias: of their biases.
        scale, shift: of batch normalization's learned parameters.
        mean, variance: of its statistics.
    """

    weight: Callable[[int], Filler]
    bias: Filler
    scale: Filler
    shift: Filler
    mean: Filler
    variance: Filler


CAFFE2 = Initialization(
    weight=xavier,
    bias=constant(0),
    scale=constant(1),
    shift=constant(0),
    mean=constant(0),
    variance=constant(1),
)
"""What Caffe2's brew starts a training from: activations keep their size where no ReLU follows."""

HE = Initialization(
    weight=he_normal,
    bias=constant(0),
    scale=constant(1),
    shift=constant(0),
    mean=constant(0),
    variance=constant(1),
)
"""What a training starts from by default: weights for layers that a ReLU follows, all else neutral.

Where none follows, activations grow from layer to layer: LeNet at Caffe2's learning rate of 0.1 diverges.
"""

SYNTHETIC = Initialization(
    weight=he_normal,
    bias=gaussian(0.01),
    scale=uniform(0.5, 1.5),
    shift=gaussian(0.1),
    mean=gaussian(0.1),
    variance=uniform(0.5, 1.5),
)
"""Stand-ins for trained values: no parameter is neutral, so that a wrong use of any of them changes the result."""
