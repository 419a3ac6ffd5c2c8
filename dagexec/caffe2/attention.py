"""Attention of a decoder's step to what an encoder gave for each step of its sequence, as nodes of the step net.

Shapes: encoder outputs are [S, N, E], for S steps, N examples and E numbers each, and [N, E, S] transposed; a decoder's
state is [1, N, D]; weights are [N, S, 1], and the context, the weighted sum of encoder outputs, is [1, N, E].
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

from dagexec.caffe2 import brew
from dagexec.caffe2.model_helper import ModelHelper

__all__ = ["AttentionType", "apply_dot_attention", "apply_recurrent_attention", "apply_regular_attention"]


class AttentionType(IntEnum):
    """How the weight of an encoder output follows from it and the decoder's state.

    v . tanh(W e + U d), with the context before added in there for Recurrent; or the product e . d for Dot.
    """

    Regular = 0
    Recurrent = 1
    Dot = 2


def apply_regular_attention(
    model: ModelHelper,
    encoder_output_dim: int,
    encoder_outputs_transposed: Any,
    weighted_encoder_outputs: Any,
    decoder_hidden_state_t: Any,
    decoder_hidden_state_dim: int,
    scope: str,
    encoder_lengths: Any = None,
) -> tuple[Any, Any]:
    """The context and the weights, by a sum of both sides; the encoder's side of it is `weighted_encoder_outputs`."""
    decoder = _projected(
        model, decoder_hidden_state_t, decoder_hidden_state_dim, encoder_output_dim,
        f"{scope}/weighted_decoder_hidden_state",
    )  # fmt: skip
    return _by_sum(
        model, encoder_output_dim, encoder_outputs_transposed, weighted_encoder_outputs, decoder, scope, encoder_lengths
    )


def apply_recurrent_attention(
    model: ModelHelper,
    encoder_output_dim: int,
    encoder_outputs_transposed: Any,
    weighted_encoder_outputs: Any,
    decoder_hidden_state_t: Any,
    decoder_hidden_state_dim: int,
    attention_weighted_encoder_context_t_prev: Any,
    scope: str,
    encoder_lengths: Any = None,
) -> tuple[Any, Any]:
    """The context and the weights, by a sum of both sides and of the context before."""
    before = _projected(
        model, attention_weighted_encoder_context_t_prev, encoder_output_dim, encoder_output_dim,
        f"{scope}/weighted_prev_attention_context",
    )  # fmt: skip
    decoder = _projected(
        model, decoder_hidden_state_t, decoder_hidden_state_dim, encoder_output_dim,
        f"{scope}/weighted_decoder_hidden_state",
    )  # fmt: skip
    both = model.net.Add([before, decoder], f"{scope}/prev_context_decoder_sum")
    return _by_sum(
        model, encoder_output_dim, encoder_outputs_transposed, weighted_encoder_outputs, both, scope, encoder_lengths
    )


def apply_dot_attention(
    model: ModelHelper,
    encoder_output_dim: int,
    encoder_outputs_transposed: Any,
    decoder_hidden_state_t: Any,
    decoder_hidden_state_dim: int,
    scope: str,
    encoder_lengths: Any = None,
) -> tuple[Any, Any]:
    """The context and the weights, by products; the decoder's state is brought to the encoder's size where need be."""
    if decoder_hidden_state_dim != encoder_output_dim:
        decoder = _projected(
            model, decoder_hidden_state_t, decoder_hidden_state_dim, encoder_output_dim,
            f"{scope}/weighted_decoder_hidden_state",
        )  # fmt: skip
    else:
        decoder = model.net.Squeeze(decoder_hidden_state_t, f"{scope}/squeezed_decoder_hidden_state", dims=[0])
    column = model.net.ExpandDims(decoder, f"{scope}/decoder_column", dims=[2])
    logits = model.net.BatchMatMul(
        [encoder_outputs_transposed, column], f"{scope}/attention_logits_transposed", trans_a=1
    )
    return _context(model, encoder_output_dim, encoder_outputs_transposed, logits, scope, encoder_lengths)


def _projected(model: ModelHelper, blob: Any, dim_in: int, dim_out: int, name: str) -> Any:
    """A fully connected layer on [1, N, dim_in], without the first axis."""
    made = brew.fc(model, blob, name, dim_in=dim_in, dim_out=dim_out, axis=2)
    return model.net.Squeeze(made, f"{name}_squeezed", dims=[0])


def _by_sum(
    model: ModelHelper, dim: int, transposed: Any, encoder: Any, decoder: Any, scope: str, lengths: Any
) -> tuple[Any, Any]:
    total = model.net.Add([encoder, decoder], f"{scope}/decoder_hidden_encoder_outputs_sum", broadcast=1)
    total = model.net.Tanh(total, f"{scope}/decoder_hidden_encoder_outputs_tanh")
    logits = brew.fc(model, total, f"{scope}/attention_logits", dim_in=dim, dim_out=1, axis=2)
    logits = model.net.Transpose(logits, f"{scope}/attention_logits_transposed", axes=[1, 0, 2])
    return _context(model, dim, transposed, logits, scope, lengths)


def _context(model: ModelHelper, dim: int, transposed: Any, logits: Any, scope: str, lengths: Any) -> tuple[Any, Any]:
    if lengths is not None:
        logits = model.net.SequenceMask([logits, lengths], f"{scope}/masked_attention_logits", mode="sequence")
    weights = model.net.Softmax(logits, f"{scope}/attention_weights_3d", axis=1)
    context = model.net.BatchMatMul([transposed, weights], f"{scope}/attention_weighted_encoder_context_column")
    names = [f"{scope}/attention_weighted_encoder_context", f"{scope}/attention_weighted_encoder_context_shape"]
    return model.net.Reshape(context, names, shape=[1, -1, dim])[0], weights
