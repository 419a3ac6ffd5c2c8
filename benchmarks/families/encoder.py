"""Transformers that read: sentences of 64 or 128 tokens, images of 224 x 224."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from model_files.torch_export import integers

from families.cnn_old import classifier, image
from families.net import NEWER, OLDER, Net

import transformers  # isort: skip  # after torchvision's operators

_VOCABULARY, _PADDING = 30522, 9


def sentences(tokens: int, segments: bool, rows: int) -> dict[str, Any]:
    """Tokens and a mask, in which the end of each row but the first is padding."""
    mask = torch.ones((rows, tokens), dtype=torch.int64)
    mask[1:, -_PADDING:] = 0
    run = {"input_ids": 2 + integers(_VOCABULARY - 2, rows, tokens, seed=rows), "attention_mask": mask}
    return run | ({"token_type_ids": integers(2, rows, tokens)} if segments else {})


def transformer(kind: str, config: str, attention: str = "eager", **options: Any) -> Callable[[], Any]:
    """Makes a network of transformers; `attention` is how it writes attention out: "eager" or "sdpa"."""

    def build() -> Any:
        settings = getattr(transformers, config)(**options)
        settings._attn_implementation = attention
        return getattr(transformers, kind)(settings)

    return build


def _encoder(name: str, build: Callable[[], Any], tokens: int, *, segments: bool, exporter: str = NEWER) -> Net:
    inputs = partial(sentences, tokens, segments)
    names = tuple(inputs(1))
    return Net(
        name,
        build,
        inputs,
        call=lambda module, *given: module(**dict(zip(names, given, strict=True)), return_dict=False)[0],
        dynamic=dict.fromkeys(names, (0, 1)),
        exporter=exporter,
    )


_MINILM: dict[str, Any] = {
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
}
_T5_SMALL: dict[str, Any] = {"d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_heads": 8}
_DEIT_TINY: dict[str, Any] = {
    "hidden_size": 192,
    "num_hidden_layers": 12,
    "num_attention_heads": 3,
    "intermediate_size": 768,
}


def nets() -> list[Net]:
    return [
        _encoder("minilm", transformer("BertModel", "BertConfig", **_MINILM), 64, segments=True, exporter=OLDER),
        _encoder("bert_base", transformer("BertModel", "BertConfig"), 128, segments=True),
        classifier("vit_b_16", NEWER),
        _encoder("distilbert", transformer("DistilBertModel", "DistilBertConfig", "sdpa"), 128, segments=False),
        classifier("swin_t", OLDER),
        _encoder("t5_encoder", transformer("T5EncoderModel", "T5Config", **_T5_SMALL), 128, segments=False),
        Net(
            "deit_tiny",
            transformer("ViTForImageClassification", "ViTConfig", num_labels=1000, **_DEIT_TINY),
            partial(image, 224),
            call=lambda module, images: module(pixel_values=images, return_dict=False)[0],
            exporter=OLDER,
        ),
    ]
