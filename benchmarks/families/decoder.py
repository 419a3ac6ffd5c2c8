"""Transformers that write: one token after others whose keys and values are given, or a prompt at once."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from model_files.torch_export import integers, normal

from families.encoder import transformer
from families.net import NEWER, OLDER, Net

import transformers  # isort: skip  # after torchvision's operators

_PAST, _PROMPT = 255, 128
_READ = 128
"""Tokens, or frames, that an encoder has read for the decoders of T5 and Whisper."""


def _step(name: str, build: Any, vocabulary: int, cache: tuple[int, int, int], exporter: str = NEWER) -> Net:
    """One token after _PAST; `cache` is the number of layers, of heads of keys, and the size of a head."""
    layers, heads, size = cache

    def inputs(rows: int) -> dict[str, Any]:
        given = {
            "input_ids": integers(vocabulary, rows, 1, seed=rows),
            "attention_mask": torch.ones((rows, _PAST + 1), dtype=torch.int64),
        }
        return given | _kept("past", layers, rows, heads, _PAST, size)

    past = dict.fromkeys(_kept_names("past", layers), (0, 2))
    return Net(name, build, inputs, _continue, {"input_ids": (0,), "attention_mask": (0, 1), **past}, exporter=exporter)


def _kept_names(prefix: str, layers: int) -> list[str]:
    return [f"{prefix}.{layer}.{part}" for layer in range(layers) for part in ("key", "value")]


def _kept(prefix: str, layers: int, *shape: int) -> dict[str, Any]:
    """Keys and values: layers of [rows, heads, tokens, size]."""
    return {name: normal(*shape, seed=number) for number, name in enumerate(_kept_names(prefix, layers))}


def _cache(kept: Any) -> Any:
    return transformers.DynamicCache(list(zip(kept[::2], kept[1::2], strict=True)))


def _tensors(cache: Any) -> list[Any]:
    return [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]


def _continue(module: Any, tokens: Any, mask: Any, *past: Any) -> list[Any]:
    found = module(input_ids=tokens, attention_mask=mask, past_key_values=_cache(past), use_cache=True)
    return [found.logits, *_tensors(found.past_key_values)]


def _read_prompt(module: Any, tokens: Any, mask: Any) -> list[Any]:
    found = module(input_ids=tokens, attention_mask=mask, use_cache=True)
    return [found.logits, *_tensors(found.past_key_values)]


def _prompt(vocabulary: int, rows: int) -> dict[str, Any]:
    return {
        "input_ids": integers(vocabulary, rows, _PROMPT, seed=rows),
        "attention_mask": torch.ones((rows, _PROMPT), dtype=torch.int64),
    }


def _crossing_step(name: str, build: Any, vocabulary: int, cache: tuple[int, int, int], width: int, read: int) -> Net:
    """One token of a decoder that also looks at what an encoder has read, whose keys and values are given as well."""
    layers, heads, size = cache

    def inputs(rows: int) -> dict[str, Any]:
        return {
            "decoder_input_ids": integers(vocabulary, rows, 1, seed=rows),
            **_kept("past", layers, rows, heads, _PAST, size),
            **_kept("read", layers, rows, heads, read, size),
        }

    def call(module: Any, token: Any, *kept: Any) -> list[Any]:
        own, other = _cache(kept[: 2 * layers]), _cache(kept[2 * layers :])
        both = transformers.EncoderDecoderCache(own, other)
        unread = torch.zeros((token.shape[0], read, width))  # its keys and values are in the cache
        found = module(
            encoder_outputs=(unread,), decoder_input_ids=token, past_key_values=both, use_cache=True, return_dict=True
        )
        return [found.logits, *_tensors(found.past_key_values.self_attention_cache)]

    dynamic = {
        "decoder_input_ids": (0,),
        **dict.fromkeys(_kept_names("past", layers), (0, 2)),
        **dict.fromkeys(_kept_names("read", layers), (0,)),
    }
    return Net(name, build, inputs, call, dynamic)


_LLAMA: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
}
_QWEN2 = _LLAMA | {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 8,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
}
_OPT: dict[str, Any] = {"num_hidden_layers": 12, "dropout": 0.0}
_T5_SMALL: dict[str, Any] = {"d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_heads": 8}
_WHISPER_TINY: dict[str, Any] = {"d_model": 384, "encoder_layers": 4, "decoder_layers": 4, "encoder_ffn_dim": 1536} | {
    "decoder_ffn_dim": 1536,
    "encoder_attention_heads": 6,
    "decoder_attention_heads": 6,
}


def nets() -> list[Net]:
    llama = transformer("LlamaForCausalLM", "LlamaConfig", **_LLAMA)
    return [
        _step("gpt2_step", transformer("GPT2LMHeadModel", "GPT2Config"), 50257, (12, 12, 64)),
        _step("llama_step", llama, 32000, (12, 4, 64)),
        Net(
            "llama_prefill",
            llama,
            partial(_prompt, 32000),
            _read_prompt,
            dict.fromkeys(("input_ids", "attention_mask"), (0, 1)),
        ),
        _step("qwen2_step", transformer("Qwen2ForCausalLM", "Qwen2Config", **_QWEN2), 32000, (8, 2, 64), OLDER),
        _step("opt_step", transformer("OPTForCausalLM", "OPTConfig", **_OPT), 50272, (12, 12, 64)),
        _crossing_step(
            "t5_step",
            transformer("T5ForConditionalGeneration", "T5Config", **_T5_SMALL),
            32128,
            (6, 8, 64),
            512,
            _READ,
        ),
        _crossing_step(
            "whisper_step",
            transformer("WhisperForConditionalGeneration", "WhisperConfig", **_WHISPER_TINY),
            51865,
            (4, 6, 64),
            384,
            1500,
        ),
    ]
