"""torchvision's compiled operators for exporting, in Python, where its own do not load.

The torchvision that package indexes serve is compiled for CUDA, and its library does not load beside the PyTorch for
processors alone; then `import torchvision` fails. Exporters need no more of these operators than results of the right
shapes and sizes while they trace: what they write is ONNX's NonMaxSuppression and RoiAlign.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch

_SUPPRESS = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_ALIGN = (
    "(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width, "
    "int sampling_ratio, bool aligned) -> Tensor"
)


@functools.cache
def provide() -> None:
    """Make `import torchvision` work. Call it before the import; another call does nothing."""
    if _loads():
        return
    for name, signature in (("nms", _SUPPRESS), ("qnms", _SUPPRESS), ("roi_align", _ALIGN)):
        torch.library.define(f"torchvision::{name}", signature)
    torch.library.impl("torchvision::nms", "CPU")(_suppressed)
    torch.library.impl("torchvision::roi_align", "CPU")(_aligned)
    torch.library.register_fake("torchvision::roi_align")(_aligned)
    importlib.import_module("torchvision")
    for module in ("boxes", "roi_align"):
        vars(sys.modules[f"torchvision.ops.{module}"]).update({"_assert_has_ops": _agree, "_has_ops": _agree})


def _loads() -> bool:
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("torchvision is not installed")
    try:
        torch.ops.load_library(Path(spec.origin).with_name("_C.so"))
    except OSError:
        return False
    return True


def _agree() -> bool:
    """The operators are there. TorchScript compiles this too."""
    return True


def _suppressed(dets: Any, scores: Any, iou_threshold: float) -> Any:
    """All boxes by falling score: nothing that is written depends on which are kept."""
    del dets, iou_threshold
    return scores.argsort(descending=True)


def _aligned(
    image: Any,
    rois: Any,
    spatial_scale: float,
    pooled_height: int,
    pooled_width: int,
    sampling_ratio: int,
    aligned: bool,
) -> Any:
    """The number in the middle of each part of a region, where the operator takes a mean of several."""
    del sampling_ratio
    corners = rois[:, 1:] * spatial_scale - (0.5 if aligned else 0.0)
    columns = _middles(corners[:, 0], corners[:, 2], pooled_width, image.shape[3])
    rows = _middles(corners[:, 1], corners[:, 3], pooled_height, image.shape[2])
    channels = torch.arange(image.shape[1])[:, None, None]
    return image[rois[:, 0].long()[:, None, None, None], channels, rows[:, None, :, None], columns[:, None, None, :]]


def _middles(first: Any, last: Any, parts: int, size: int) -> Any:
    places = (torch.arange(parts) + 0.5) / parts
    return (first[:, None] + (last - first)[:, None] * places).long().clamp(0, size - 1)
