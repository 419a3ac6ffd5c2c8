"""torchvision's networks: classification, detection and segmentation, with random weights and small images."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from model_files import compiled_operators
from model_files.recipe import Recipe
from model_files.torch_export import OLDER, Exported, Tensors

compiled_operators.provide()
import torchvision  # noqa: E402

FAMILY = "vision"

CLASSIFIERS: dict[str, int] = {
    "alexnet": 224,
    "squeezenet1_1": 64,
    "densenet121": 64,
    "googlenet": 64,
    "inception_v3": 96,
    "resnet18": 64,
    "resnet50": 64,
    "resnext50_32x4d": 64,
    "shufflenet_v2_x1_0": 64,
    "mobilenet_v2": 64,
    "mobilenet_v3_small": 64,
    "mnasnet1_0": 64,
    "efficientnet_b0": 64,
    "efficientnet_v2_s": 64,
    "regnet_y_400mf": 64,
    "convnext_tiny": 64,
    "swin_t": 64,
    "swin_v2_t": 64,
}
"""Name of the network to the height and width of its images."""
TRANSFORMERS: dict[str, Callable[[], Any]] = {
    "vit_small": lambda: torchvision.models.VisionTransformer(
        image_size=64, patch_size=16, num_layers=4, num_heads=4, hidden_dim=64, mlp_dim=128
    ),
    "maxvit_small": lambda: torchvision.models.MaxVit(
        input_size=(64, 64),
        stem_channels=16,
        partition_size=2,
        block_channels=[16, 32],
        block_layers=[1, 1],
        head_dim=8,
        stochastic_depth_prob=0.0,
    ),
}
DETECTORS: dict[str, int] = {
    "fasterrcnn_resnet50_fpn": 128,
    "fasterrcnn_mobilenet_v3_large_320_fpn": 128,
    "maskrcnn_resnet50_fpn": 128,
    "keypointrcnn_resnet50_fpn": 128,
    "ssd300_vgg16": 300,
    "ssdlite320_mobilenet_v3_large": 320,
    "retinanet_resnet50_fpn": 128,
    "fcos_resnet50_fpn": 128,
}
_OUTPUTS = {
    r"fpn\.inner_blocks\.\d+\.0": 5.0,
    r"cls_score|cls_logits|classification_head\.module_list\.\d+(\.1)?|mask_fcn_logits|kps_score_lowres": 5.0,
    r"bbox_pred|bbox_reg|regression_head\.module_list\.\d+(\.1)?": 1.0,
}
"""The layers of a detector that read what may have vanished, or decide on results, and how large outputs become."""
SEGMENTERS = ("fcn_resnet50", "deeplabv3_resnet50", "deeplabv3_mobilenet_v3_large", "lraspp_mobilenet_v3_large")
_SEGMENTED = 65  # pixels a side


def recipes() -> list[Recipe]:
    nets = {name: _classifier(partial(_built, name), size) for name, size in CLASSIFIERS.items()}
    nets |= {name: _classifier(build, 64) for name, build in TRANSFORMERS.items()}
    nets |= {name: _detector(name, size) for name, size in DETECTORS.items()}
    nets |= {name: _segmenter(name) for name in SEGMENTERS}
    return [recipe for name, exported in nets.items() for recipe in exported.recipes(FAMILY, name)]


def _built(name: str, **options: Any) -> Any:
    """The network with weights that keep its values in range."""
    if name in ("googlenet", "inception_v3"):
        options |= {"init_weights": True, "aux_logits": False}
    net = torchvision.models.get_model(name, weights=None, **options)
    if name == "inception_v3":  # with its own initial weights values grow to 1e9
        for part in net.modules():
            if isinstance(part, torch.nn.Conv2d):
                torch.nn.init.kaiming_normal_(part.weight)
    return net


def _image(seed: int, *shape: int) -> Any:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def _classifier(build: Callable[[], Any], size: int) -> Exported:
    runs = lambda: [{"image": _image(0, count, 3, size, size)} for count in (1, 3)]  # noqa: E731
    return Exported(build, runs, dynamic={"image": (0,)})


def _segmenter(name: str) -> Exported:
    return Exported(
        partial(_built, name, weights_backbone=None),
        lambda: [{"image": _image(0, *shape)} for shape in ((1, 3, _SEGMENTED, _SEGMENTED), (2, 3, 80, 96))],
        call=lambda module, image: module(image)["out"],
        dynamic={"image": (0, 2, 3)},
    )


def _detector(name: str, size: int) -> Exported:
    """A detector of one image; its results are boxes, labels and scores, and masks or keypoints.

    Random weights give features of 1e-7 or logits of 1e7, and with that equal scores in an order that is up to
    rounding: some layers are scaled. The newer exporter takes none of these networks: how many boxes suppression keeps
    depends on values.
    """
    several = "box_detections_per_img" if "rcnn" in name else "detections_per_img"
    options = {several: 20} | ({} if name.startswith("ssd") else {"min_size": size, "max_size": 2 * size})

    def build() -> Any:
        return _scaled(_built(name, weights_backbone=None, **options), _image(0, 3, size, size))

    def call(module: Any, image: Any) -> Sequence[Any]:
        return tuple(module([image])[0].values())

    def runs() -> Sequence[Tensors]:
        shapes = ((size, size), (size, size * 5 // 4))
        return [{"image": _image(seed, 3, *shape)} for seed, shape in enumerate(shapes)]

    return Exported(build, runs, call=call, dynamic={"image": (1, 2)}, exporters=(OLDER,))


def _scaled(net: Any, image: Any) -> Any:
    """The network with weights by which outputs of some layers for the image, less bias, have given sizes."""
    hooks = [
        part.register_forward_hook(partial(_scale, set(), size))
        for pattern, size in _OUTPUTS.items()
        for name, part in net.named_modules()
        if re.search(rf"({pattern})$", name) and hasattr(part, "weight")
    ]
    with torch.no_grad():
        net.eval()([image])
    for hook in hooks:
        hook.remove()
    return net


def _scale(scaled: set[Any], size: float, part: Any, _inputs: Any, output: Any) -> Any:
    """Of a layer that is called for several maps, the first decides."""
    if part in scaled:
        return output
    scaled.add(part)
    bias = part.bias if output.dim() == 2 else part.bias[:, None, None]
    factor = size / (output - bias).abs().max()
    part.weight.data *= factor
    return (output - bias) * factor + bias
