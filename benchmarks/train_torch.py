"""The models of `train_models.py` in PyTorch, for `train.py`, with the same optimizers and losses."""

from __future__ import annotations

from typing import Any

import numpy as np
from train_models import LSTM, TRANSFORMER, Sizes


def torch_step(model: str, batch: int, threads: int, *, channels_last: bool = False) -> tuple[Any, int]:
    """A callable that trains one step on random data and returns the loss, and the number of parameters.

    With `channels_last` images and filters have that memory format.
    Raises ImportError where PyTorch is not installed.
    """
    import torch
    from torch import nn

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    network: nn.Module
    optimizer: torch.optim.Optimizer
    if model in ("lstm", "transformer"):
        sizes = LSTM if model == "lstm" else TRANSFORMER
        network = _lstm(nn, sizes) if model == "lstm" else _transformer(nn, sizes)
        optimizer = torch.optim.Adam(network.parameters(), lr=0.001)
        data, label = (torch.from_numpy(rng.integers(0, sizes.words, (batch, sizes.steps))) for _ in range(2))
        if model == "lstm":
            label = label.transpose(0, 1)
        label = label.reshape(-1)
    else:
        make, shape, classes = _IMAGE_MODELS[model]
        network = make(nn)
        data = torch.from_numpy(rng.standard_normal((batch, *shape), np.float32))
        label = torch.from_numpy(rng.integers(0, classes, batch))
        if channels_last:
            network = network.to(memory_format=torch.channels_last)
            data = data.to(memory_format=torch.channels_last)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.001, momentum=0.9, nesterov=True)
    criterion = nn.CrossEntropyLoss()

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = criterion(network(data), label)
        loss.backward()
        optimizer.step()
        return float(loss.item())

    return step, sum(parameter.numel() for parameter in network.parameters())


def _lstm(nn: Any, sizes: Sizes) -> Any:
    class Texts(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(sizes.words, sizes.width)
            self.lstm = nn.LSTM(sizes.width, sizes.hidden)
            self.scores = nn.Linear(sizes.hidden, sizes.words)

        def forward(self, x: Any) -> Any:
            return self.scores(self.lstm(self.embedding(x.transpose(0, 1)))[0]).flatten(0, 1)

    return Texts()


def _transformer(nn: Any, sizes: Sizes) -> Any:
    import torch

    class Attention(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(sizes.width)
            self.parts = nn.Linear(sizes.width, 3 * sizes.width)
            self.out = nn.Linear(sizes.width, sizes.width)

        def forward(self, x: Any) -> Any:
            parts = self.parts(self.norm(x)).unflatten(-1, (3, sizes.heads, -1)).permute(2, 0, 3, 1, 4)
            mixed = nn.functional.scaled_dot_product_attention(*parts.unbind(0))
            return self.out(mixed.transpose(1, 2).flatten(2))

    class Texts(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(sizes.words, sizes.width)
            self.places = nn.Parameter(torch.zeros(sizes.steps, sizes.width))
            self.attention = nn.ModuleList(Attention() for _ in range(sizes.blocks))
            self.inner = nn.ModuleList(
                nn.Sequential(
                    nn.LayerNorm(sizes.width),
                    nn.Linear(sizes.width, sizes.hidden),
                    nn.GELU(),
                    nn.Linear(sizes.hidden, sizes.width),
                )
                for _ in range(sizes.blocks)
            )
            self.norm = nn.LayerNorm(sizes.width)
            self.scores = nn.Linear(sizes.width, sizes.words)

        def forward(self, x: Any) -> Any:
            x = self.embedding(x) + self.places
            for attention, inner in zip(self.attention, self.inner, strict=True):
                x = x + attention(x)
                x = x + inner(x)
            return self.scores(self.norm(x)).flatten(0, 1)

    return Texts()


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


def _resnet18(nn: Any) -> Any:
    class Block(nn.Module):  # type: ignore[misc]
        def __init__(self, dim_in: int, width: int, stride: int) -> None:
            super().__init__()
            self.branch = nn.Sequential(
                nn.Conv2d(dim_in, width, 3, stride=stride, padding=1, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(inplace=True),
                nn.Conv2d(width, width, 3, padding=1, bias=False),
                nn.BatchNorm2d(width),
            )
            self.shortcut = (
                nn.Identity()
                if dim_in == width
                else nn.Sequential(nn.Conv2d(dim_in, width, 1, stride=stride, bias=False), nn.BatchNorm2d(width))
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
    for stage, width in enumerate((64, 128, 256, 512)):
        for block in range(2):
            layers.append(Block(dim, width, 2 if stage and not block else 1))
            dim = width
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(dim, 1000)]
    return nn.Sequential(*layers)


def _resnet20(nn: Any) -> Any:
    class Block(nn.Module):  # type: ignore[misc]
        def __init__(self, dim_in: int, width: int) -> None:
            super().__init__()
            self.stride = width // dim_in
            self.more = (width - dim_in) // 2
            self.branch = nn.Sequential(
                nn.Conv2d(dim_in, width, 3, stride=self.stride, padding=1, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(inplace=True),
                nn.Conv2d(width, width, 3, padding=1, bias=False),
                nn.BatchNorm2d(width),
            )
            self.relu = nn.ReLU(inplace=True)

        def forward(self, x: Any) -> Any:
            shortcut = x
            if self.stride > 1:
                picked = x[:, :, :: self.stride, :: self.stride]
                shortcut = nn.functional.pad(picked, (0, 0, 0, 0, self.more, self.more))
            return self.relu(self.branch(x) + shortcut)

    layers: list[Any] = [nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True)]
    dim = 16
    for width in (16, 32, 64):
        for _ in range(3):
            layers.append(Block(dim, width))
            dim = width
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(dim, 10)]
    return nn.Sequential(*layers)


_IMAGE_MODELS = {
    "lenet": (_lenet, (1, 28, 28), 10),
    "resnet18": (_resnet18, (3, 64, 64), 1000),
    "resnet20": (_resnet20, (3, 32, 32), 10),
    "resnet50": (_resnet50, (3, 64, 64), 1000),
}
