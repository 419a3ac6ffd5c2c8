"""LeNet and ResNet-50 in PyTorch, for `train.py`: the zoo's layers, SGD with momentum, softmax cross-entropy."""

from __future__ import annotations

from typing import Any

import numpy as np


def torch_step(model: str, batch: int, threads: int, *, channels_last: bool = False) -> tuple[Any, int]:
    """A callable that trains one step on random data and returns the loss, and the number of parameters.

    With `channels_last` images and filters have that memory format.
    Raises ImportError where PyTorch is not installed.
    """
    import torch
    from torch import nn

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    network: nn.Module
    if model == "lenet":
        network, shape, classes = _lenet(nn), (batch, 1, 28, 28), 10
    else:
        network, shape, classes = _resnet50(nn), (batch, 3, 64, 64), 1000
    optimizer = torch.optim.SGD(network.parameters(), lr=0.001, momentum=0.9, nesterov=True)
    criterion = nn.CrossEntropyLoss()
    rng = np.random.default_rng(0)
    data = torch.from_numpy(rng.standard_normal(shape, np.float32))
    label = torch.from_numpy(rng.integers(0, classes, batch))
    if channels_last:
        network = network.to(memory_format=torch.channels_last)
        data = data.to(memory_format=torch.channels_last)

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = criterion(network(data), label)
        loss.backward()
        optimizer.step()
        return float(loss.item())

    return step, sum(parameter.numel() for parameter in network.parameters())


def _lenet(nn: Any) -> Any:
    return nn.Sequential(
        nn.Conv2d(1, 20, 5),
        nn.MaxPool2d(2, 2),
        nn.Conv2d(20, 50, 5),
        nn.MaxPool2d(2, 2),
        nn.Flatten(),
        nn.Linear(800, 500),
        nn.ReLU(),
        nn.Linear(500, 10),
    )


def _resnet50(nn: Any) -> Any:
    class Bottleneck(nn.Module):  # type: ignore[misc]
        def __init__(self, dim_in: int, width: int, stride: int) -> None:
            super().__init__()
            dim_out = 4 * width
            self.branch = nn.Sequential(
                nn.Conv2d(dim_in, width, 1, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(inplace=True),
                nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(inplace=True),
                nn.Conv2d(width, dim_out, 1, bias=False),
                nn.BatchNorm2d(dim_out),
            )
            self.shortcut = (
                nn.Identity()
                if dim_in == dim_out
                else nn.Sequential(nn.Conv2d(dim_in, dim_out, 1, stride=stride, bias=False), nn.BatchNorm2d(dim_out))
            )
            self.relu = nn.ReLU(inplace=True)

        def forward(self, x: Any) -> Any:
            return self.relu(self.branch(x) + self.shortcut(x))

    layers: list[Any] = [
        nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    ]
    dim = 64
    for stage, (width, blocks) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3))):
        for block in range(blocks):
            layers.append(Bottleneck(dim, width, 2 if block == 0 and stage else 1))
            dim = 4 * width
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(dim, 1000)]
    return nn.Sequential(*layers)
