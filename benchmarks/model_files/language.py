"""transformers in small configurations: language, speech, images and both, with random weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from model_files import compiled_operators
from model_files.recipe import Recipe
from model_files.torch_export import Exported, Tensors, integers, normal

compiled_operators.provide()
import transformers  # noqa: E402

FAMILY = "language"

_VOCABULARY, _WIDTH, _LAYERS, _HEADS = 100, 32, 2, 4
_SMALL = {
    "vocab_size": _VOCABULARY,
    "hidden_size": _WIDTH,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": _HEADS,
    "intermediate_size": 2 * _WIDTH,
    "max_position_embeddings": 64,
}
_T5 = {"vocab_size": _VOCABULARY, "d_model": _WIDTH, "d_kv": 8, "d_ff": 64, "num_layers": _LAYERS, "num_heads": _HEADS}
_IMAGES = {
    "hidden_size": _WIDTH,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": _HEADS,
    "intermediate_size": 2 * _WIDTH,
    "image_size": 32,
    "patch_size": 8,
}
_SHAPES = ((2, 7), (1, 7), (3, 12))


def recipes() -> list[Recipe]:
    return [recipe for name, exported in _nets().items() for recipe in exported.recipes(FAMILY, name)]


def _model(kind: str, config: str, **options: Any) -> Callable[[], Any]:
    """Makes a network of a class of transformers, whose attention is written out in the graph."""

    def build() -> Any:
        settings = getattr(transformers, config)(**options)
        settings._attn_implementation = "eager"
        return getattr(transformers, kind)(settings)

    return build


def _encoder(kind: str, config: str, *, segments: bool = False, **options: Any) -> Exported:
    """A network of tokens with a mask of which are padding, and with `segments`, of which sentence each is of."""
    names = ("input_ids", "attention_mask", *(("token_type_ids",) if segments else ()))
    return Exported(
        _model(kind, config, **{**_SMALL, **options}),
        partial(_sentences, segments),
        call=lambda module, *inputs: module(**dict(zip(names, inputs, strict=True)), return_dict=False)[0],
        dynamic=dict.fromkeys(names, (0, 1)),
    )


def _sentences(segments: bool) -> Sequence[Tensors]:
    runs = []
    for shape in _SHAPES:
        mask = torch.ones(shape, dtype=torch.int64)
        mask[-1, -2:] = 0
        run = {"input_ids": 2 + integers(_VOCABULARY - 2, *shape), "attention_mask": mask}
        runs.append(run | ({"token_type_ids": integers(2, *shape)} if segments else {}))
    return runs


def _decoder(kind: str, config: str, *, key_heads: int = _HEADS, **options: Any) -> Exported:
    """A generating network: tokens, a mask, and the keys and values of what was read before; returns the new ones."""
    return Exported(
        _model(kind, config, **options),
        partial(_continuations, key_heads),
        call=_continue,
        dynamic={
            "input_ids": (0, 1),
            "attention_mask": (0, 1),
            **{f"past.{layer}.{part}": (0, 2) for layer in range(_LAYERS) for part in ("key", "value")},
        },
    )


def _continuations(key_heads: int) -> Sequence[Tensors]:
    runs = []
    for rows, tokens, past in ((2, 3, 5), (1, 1, 9), (3, 4, 2)):
        run = {
            "input_ids": integers(_VOCABULARY, rows, tokens),
            "attention_mask": torch.ones(rows, past + tokens, dtype=torch.int64),
        }
        for layer in range(_LAYERS):
            for number, part in enumerate(("key", "value")):
                run[f"past.{layer}.{part}"] = normal(rows, key_heads, past, _WIDTH // _HEADS, seed=2 * layer + number)
        runs.append(run)
    return runs


def _continue(module: Any, tokens: Any, mask: Any, *past: Any) -> list[Any]:
    cache = transformers.DynamicCache(list(zip(past[::2], past[1::2], strict=True)))
    found = module(input_ids=tokens, attention_mask=mask, past_key_values=cache, use_cache=True)
    kept = found.past_key_values
    return [found.logits, *(tensor for layer in kept.layers for tensor in (layer.keys, layer.values))]


def _translator(kind: str, config: str, **options: Any) -> Exported:
    """An encoder and a decoder in one file."""

    def runs() -> Sequence[Tensors]:
        return [
            {
                "input_ids": integers(_VOCABULARY, *shape),
                "decoder_input_ids": integers(_VOCABULARY, shape[0], 4 + shape[0]),
            }
            for shape in _SHAPES
        ]

    return Exported(
        _model(kind, config, **options),
        runs,
        call=lambda module, read, written: module(input_ids=read, decoder_input_ids=written, use_cache=False).logits,
        dynamic={"input_ids": (0, 1), "decoder_input_ids": (0, 1)},
    )


def _whisper() -> Exported:
    build = _model(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        vocab_size=_VOCABULARY,
        d_model=_WIDTH,
        encoder_layers=_LAYERS,
        decoder_layers=_LAYERS,
        encoder_attention_heads=_HEADS,
        decoder_attention_heads=_HEADS,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        num_mel_bins=16,
        max_source_positions=30,
        max_target_positions=30,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )

    def runs() -> Sequence[Tensors]:
        return [
            {"input_features": normal(rows, 16, 60), "decoder_input_ids": integers(_VOCABULARY, rows, tokens)}
            for rows, tokens in ((2, 4), (1, 7))
        ]

    return Exported(
        build,
        runs,
        call=lambda module, heard, written: (
            module(
                input_features=heard,
                decoder_input_ids=written,
                decoder_attention_mask=torch.ones_like(written),
                use_cache=False,
            ).logits
        ),
        dynamic={"input_features": (0,), "decoder_input_ids": (0, 1)},
    )


def _images(kind: str, config: str, **options: Any) -> Exported:
    """A network of images of one size."""
    return Exported(
        _model(kind, config, **options),
        lambda: [{"pixel_values": normal(rows, 3, 32, 32)} for rows in (2, 1)],
        call=lambda module, images: module(pixel_values=images, return_dict=False)[0],
        dynamic={"pixel_values": (0,)},
    )


def _clip() -> Exported:
    text = {**_SMALL, "projection_dim": 16, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}

    def build() -> Any:
        settings = transformers.CLIPConfig(
            text_config=text, vision_config={**_IMAGES, "projection_dim": 16}, projection_dim=16
        )
        settings._attn_implementation = "eager"
        return transformers.CLIPModel(settings)

    def runs() -> Sequence[Tensors]:
        return [
            {**run, "pixel_values": normal(images, 3, 32, 32)}
            for run, images in zip(_sentences(segments=False), (3, 1, 2), strict=True)
        ]

    def call(module: Any, tokens: Any, mask: Any, images: Any) -> Sequence[Any]:
        found = module(input_ids=tokens, attention_mask=mask, pixel_values=images)
        return found.logits_per_image, found.text_embeds, found.image_embeds

    return Exported(
        build, runs, call=call, dynamic={"input_ids": (0, 1), "attention_mask": (0, 1), "pixel_values": (0,)}
    )


def _speech() -> Exported:
    build = _model(
        "Wav2Vec2ForCTC",
        "Wav2Vec2Config",
        **{**_SMALL, "conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_conv_pos_embeddings": 8},
        num_conv_pos_embedding_groups=2,
        num_feat_extract_layers=2,
    )
    return Exported(
        build,
        lambda: [{"input_values": normal(*shape)} for shape in ((2, 400), (1, 555))],
        call=lambda module, wave: module(input_values=wave).logits,
        dynamic={"input_values": (0, 1)},
    )


def _nets() -> dict[str, Exported]:
    grouped = {**_SMALL, "num_key_value_heads": 2, "head_dim": _WIDTH // _HEADS}
    return {
        "bert": _encoder("BertForSequenceClassification", "BertConfig", segments=True),
        "roberta": _encoder("RobertaForMaskedLM", "RobertaConfig"),
        "distilbert": _encoder(
            "DistilBertModel", "DistilBertConfig", dim=_WIDTH, n_layers=_LAYERS, n_heads=_HEADS, hidden_dim=64
        ),
        "albert": _encoder("AlbertModel", "AlbertConfig", segments=True, embedding_size=16),
        "deberta": _encoder("DebertaV2Model", "DebertaV2Config", relative_attention=True, pos_att_type=["p2c", "c2p"]),
        "gpt2": _decoder(
            "GPT2LMHeadModel",
            "GPT2Config",
            vocab_size=_VOCABULARY,
            n_embd=_WIDTH,
            n_layer=_LAYERS,
            n_head=_HEADS,
            n_positions=64,
        ),
        "gpt_neox": _decoder("GPTNeoXForCausalLM", "GPTNeoXConfig", **_SMALL),
        "llama": _decoder("LlamaForCausalLM", "LlamaConfig", key_heads=2, **grouped),
        "qwen2": _decoder("Qwen2ForCausalLM", "Qwen2Config", key_heads=2, **grouped),
        "t5": _translator("T5ForConditionalGeneration", "T5Config", **_T5),
        "bart": _translator(
            "BartForConditionalGeneration",
            "BartConfig",
            vocab_size=_VOCABULARY,
            d_model=_WIDTH,
            encoder_layers=_LAYERS,
            decoder_layers=_LAYERS,
            encoder_attention_heads=_HEADS,
            decoder_attention_heads=_HEADS,
            encoder_ffn_dim=64,
            decoder_ffn_dim=64,
            max_position_embeddings=64,
        ),
        "whisper": _whisper(),
        "wav2vec2": _speech(),
        "vit": _images("ViTForImageClassification", "ViTConfig", **_IMAGES),
        "swin": _images(
            "SwinModel",
            "SwinConfig",
            image_size=32,
            patch_size=2,
            embed_dim=16,
            depths=[2, 2],
            num_heads=[2, 4],
            window_size=4,
        ),
        "convnext": _images("ConvNextModel", "ConvNextConfig", hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 2, 1]),
        "segformer": _images(
            "SegformerForSemanticSegmentation",
            "SegformerConfig",
            hidden_sizes=[8, 16, 24, 32],
            depths=[1, 1, 1, 1],
            num_attention_heads=[1, 2, 3, 4],
            decoder_hidden_size=16,
        ),
        "clip": _clip(),
    }
