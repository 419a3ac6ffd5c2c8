"""The models whose training steps `train.py` measures, in dagexec; `train_torch.py` has the same ones in PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dagexec import zoo
from dagexec.building.fillers import gaussian
from dagexec.operators import INT32
from dagexec.training.model_helper import ModelHelper
from dagexec.training.optimizer import SGD, Adam
from dagexec.zoo.char_lstm import CharLSTM

Feeds = dict[str, npt.NDArray[np.generic]]


@dataclass(frozen=True)
class Sizes:
    """The sizes of a language model.

    Attributes:
        words: how many a text may choose from.
        steps: words of a text.
        width: numbers that stand for a word.
        hidden: size of the LSTM's state, or of the inner layer of a transformer's block.
        blocks: layers of a transformer.
        heads: of its attention.
    """

    words: int
    steps: int
    width: int
    hidden: int
    blocks: int = 0
    heads: int = 0


LSTM = Sizes(words=64, steps=64, width=32, hidden=128)
TRANSFORMER = Sizes(words=1000, steps=64, width=128, hidden=512, blocks=2, heads=4)
IMAGE_SIZES: Mapping[str, int | None] = {"lenet": None, "resnet20": None, "resnet18": 64, "resnet50": 64}
"""Height and width; None for the network's own."""


def build(model: str, batch: int, order: str) -> tuple[ModelHelper, Feeds]:
    """The net of a training step with its updates, and random data; SGD with momentum for images, Adam for texts."""
    rng = np.random.default_rng(0)
    if model in ("lstm", "transformer"):
        sizes = LSTM if model == "lstm" else TRANSFORMER
        helper = _lstm(batch) if model == "lstm" else _transformer(batch)
        helper.add_gradient_operators(["loss"])
        Adam(0.001).add_updates(helper)
        texts = (batch, sizes.steps)
        return helper, {name: rng.integers(0, sizes.words, texts).astype(np.int32) for name in helper.inputs}
    if model == "resnet18":
        helper = _resnet18(batch, order)
    else:
        helper = zoo.build_training(model, batch, image_size=IMAGE_SIZES[model], order=order)
    helper.add_gradient_operators(["loss"])
    SGD(0.001, momentum=0.9).add_updates(helper)
    shape = tuple(size or 0 for size in helper.inputs["data"].shape or ())
    classes = helper.parameters["pred_w"][0]
    label = rng.integers(0, classes, batch).astype(np.int32)
    return helper, {"data": rng.standard_normal(shape, np.float32), "label": label}


def _lstm(batch: int) -> ModelHelper:
    helper = ModelHelper("lstm", seed=1, training=True)
    texts = CharLSTM("".join(chr(32 + code) for code in range(LSTM.words)), LSTM.width, LSTM.hidden)
    texts.add_inputs(helper, batch, LSTM.steps)
    texts.add_layers(helper)
    return helper


def _transformer(batch: int) -> ModelHelper:
    """Blocks that normalize first, learned positions, every word reads all others of its text."""
    helper = ModelHelper("transformer", seed=1, training=True)
    size = TRANSFORMER
    words, target = (helper.add_input(name, (batch, size.steps), INT32) for name in ("words", "next"))
    places = helper.add_parameter("places_w", [size.steps, size.width], gaussian(0.02))
    x = helper.embedding(words, "embedded", size.words, size.width, weight_init=gaussian(0.02))
    x = helper.add_operator("Add", [x, places], ["placed"], broadcast=1, axis=1)
    x = helper.reshape(x, "rows", [-1, size.width])
    for block in range(size.blocks):
        x = helper.sum([x, _attention(helper, x, f"block{block}_attention", batch)], f"block{block}_attended")
        inner = helper.layer_norm(x, f"block{block}_norm", size.width)
        inner = helper.fc(inner, f"block{block}_inner", size.width, size.hidden)
        inner = helper.add_operator("Gelu", [inner], [f"block{block}_gelu"])
        inner = helper.fc(inner, f"block{block}_outer", size.hidden, size.width)
        x = helper.sum([x, inner], f"block{block}_out")
    scores = helper.fc(helper.layer_norm(x, "last_norm", size.width), "scores", size.width, size.words)
    helper.softmax_with_loss(scores, helper.reshape(target, "target", [-1]))
    return helper


def _attention(helper: ModelHelper, x: str, name: str, batch: int) -> str:
    size = TRANSFORMER
    part = size.width // size.heads
    x = helper.layer_norm(x, f"{name}_norm", size.width)
    split = {}
    for each in ("query", "key", "value"):
        rows = helper.fc(x, f"{name}_{each}", size.width, size.width)
        heads = helper.reshape(rows, f"{name}_{each}_split", [batch, size.steps, size.heads, part])
        split[each] = helper.transpose(heads, f"{name}_{each}_heads", [0, 2, 1, 3])
    products = helper.add_operator("BatchMatMul", [split["query"], split["key"]], [f"{name}_products"], trans_b=1)
    products = helper.add_operator("Scale", [products], [f"{name}_scaled"], scale=part**-0.5)
    shares = helper.add_operator("Softmax", [products], [f"{name}_shares"], axis=3)
    mixed = helper.add_operator("BatchMatMul", [shares, split["value"]], [f"{name}_mixed"])
    mixed = helper.transpose(mixed, f"{name}_words", [0, 2, 1, 3])
    rows = helper.reshape(mixed, f"{name}_joined", [-1, size.width])
    return helper.fc(rows, f"{name}_out", size.width, size.width)


def _resnet18(batch: int, order: str) -> ModelHelper:
    """He et al. 2015, table 1, for images of 64 x 64."""
    helper = ModelHelper("resnet18", seed=1, training=True, order=order)
    size = IMAGE_SIZES["resnet18"] or 0
    image = (3, size, size) if order == "NCHW" else (size, size, 3)
    x = helper.add_input("data", (batch, *image))
    label = helper.add_input("label", (batch,), INT32)

    def conv_bn(x: str, name: str, dim_in: int, dim_out: int, kernel: int, stride: int) -> str:
        x = helper.conv(x, name, dim_in, dim_out, kernel=kernel, stride=stride, pad=kernel // 2, bias=False)
        return helper.spatial_bn(x, f"{name}_bn", dim_out)

    x = conv_bn(x, "conv1", 3, 64, 7, 2)
    x = helper.max_pool(helper.relu(x, x), "pool1", kernel=3, stride=2, pad=1)
    dim = 64
    for stage, width in enumerate((64, 128, 256, 512)):
        for block in range(2):
            stride = 2 if stage and not block else 1
            name = f"res{stage}_{block}"
            branch = conv_bn(x, f"{name}_a", dim, width, 3, stride)
            branch = conv_bn(helper.relu(branch, branch), f"{name}_b", width, width, 3, 1)
            shortcut = x if dim == width else conv_bn(x, f"{name}_shortcut", dim, width, 1, stride)
            x = helper.sum([branch, shortcut], branch)
            x = helper.relu(x, x)
            dim = width
    x = helper.global_average_pool(x, "pool5")
    helper.softmax_with_loss(helper.fc(x, "pred", dim, 1000), label)
    return helper
