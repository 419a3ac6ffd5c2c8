"""Networks with a result for every place of an image: segmentation, detection and larger images."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import torch
from model_files import carried
from torch import nn
from torch.nn import functional

from families.cnn_old import image
from families.net import NEWER, OLDER, Net, Packaged

import torchvision  # isort: skip  # after its operators

_SIZE = 256


class _UNet(nn.Module):  # type: ignore[misc, unused-ignore]
    """Ronneberger et al. 2015 with a quarter of the channels: four times down and up, by transposed convolutions."""

    def __init__(self, widths: tuple[int, ...] = (16, 32, 64, 128, 256)) -> None:
        super().__init__()
        pairs = list(pairwise(widths))
        self.down = nn.ModuleList(_twice(before, after) for before, after in ((3, widths[0]), *pairs))
        self.up = nn.ModuleList(nn.ConvTranspose2d(after, before, 2, stride=2) for before, after in pairs[::-1])
        self.joined = nn.ModuleList(_twice(2 * before, before) for before, _ in pairs[::-1])
        self.last = nn.Conv2d(widths[0], 2, 1)

    def forward(self, x: Any) -> Any:
        kept = [x := self.down[0](x)]
        for layer in self.down[1:]:
            kept.append(x := layer(functional.max_pool2d(x, 2)))
        for up, joined, skipped in zip(self.up, self.joined, kept[-2::-1], strict=True):
            x = joined(torch.cat([skipped, up(x)], 1))
        return self.last(x)


def _twice(before: int, after: int) -> Any:
    parts = [[nn.Conv2d(n, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()] for n in (before, after)]
    return nn.Sequential(*parts[0], *parts[1])


def _espcn() -> Any:
    """Shi et al. 2016: three times the height and width, by a pixel shuffle at the end."""
    return nn.Sequential(
        nn.Conv2d(1, 64, 5, padding=2),
        nn.Tanh(),
        nn.Conv2d(64, 32, 3, padding=1),
        nn.Tanh(),
        nn.Conv2d(32, 9, 3, padding=1),
        nn.PixelShuffle(3),
    )


class _SsdLite(nn.Module):  # type: ignore[misc, unused-ignore]
    """The network of torchvision's SSDlite without the choice of boxes: classes and places for every anchor."""

    def __init__(self) -> None:
        super().__init__()
        whole = torchvision.models.detection.ssdlite320_mobilenet_v3_large(weights=None, weights_backbone=None)
        self.backbone, self.head = whole.backbone, whole.head

    def forward(self, x: Any) -> Any:
        found = self.head(list(self.backbone(x).values()))
        return found["cls_logits"], found["bbox_regression"]


def _segmenter(name: str, exporter: str) -> Net:
    build = partial(torchvision.models.get_model, name, weights=None, weights_backbone=None)
    return Net(
        name,
        build,
        partial(image, _SIZE),
        call=lambda module, x: module(x)["out"],
        exporter=exporter,
        settle=4,
    )


def _gray(rows: int) -> dict[str, Any]:
    return {"image": torch.rand((rows, 1, 180, 320), generator=torch.Generator().manual_seed(rows))}


def _photo(size: int, rows: int) -> dict[str, Any]:
    return {"images": carried.normal(rows, 3, size, size, scale=0.5)}


def _line(rows: int) -> dict[str, Any]:
    return {"x": carried.normal(rows, 3, 48, 320, scale=0.5)}


def nets() -> list[Net | Packaged]:
    return [
        _segmenter("deeplabv3_mobilenet_v3_large", NEWER),
        _segmenter("lraspp_mobilenet_v3_large", NEWER),
        _segmenter("fcn_resnet50", OLDER),
        Net("unet", _UNet, partial(image, _SIZE), exporter=NEWER, settle=4),
        Net("ssdlite_mobilenet_v3", _SsdLite, partial(image, 320), exporter=OLDER, settle=4),
        Net("espcn", _espcn, _gray, exporter=NEWER),
        Packaged("yolov8_nudenet", "nudenet.320n", partial(_photo, 320)),
        Packaged("pp_ocr_rec", "rapidocr-onnxruntime.ch_PP-OCRv4_rec_infer", _line),
    ]
