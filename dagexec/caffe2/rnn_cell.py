"""Layers that go through sequences of shape [T, N, D]."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from dagexec.caffe2 import brew
from dagexec.caffe2.model_helper import ModelHelper
from dagexec.caffe2.recurrent import recurrent_net
from dagexec.caffe2.references import BlobReference, ScopedName

__all__ = ["LSTM"]


def LSTM(
    model: ModelHelper,
    input_blob: Any,
    seq_lengths: Any,
    initial_states: Sequence[Any],
    dim_in: int,
    dim_out: int | Sequence[int],
    scope: str = "lstm",
    outputs_with_grads: Iterable[int] = (0,),
    return_params: bool = False,
    memory_optimization: bool = False,
    forget_bias: float = 0.0,
    forward_only: bool = False,
    drop_states: bool = False,
    return_last_layer_only: bool = True,
    static_rnn_unroll_size: int | None = None,
) -> tuple[BlobReference, ...]:
    """Layers of LSTM: of the last one all hidden states, the last, all cell states, the last; or of all layers.

    Gates are in the order input, forget, output, candidate. `seq_lengths`, int32 of shape [N], says how many steps each
    sequence has; None is as many as there are rows. `initial_states` are hidden and cell state of each layer, in turn.
    What is kept for the gradient does not depend on `memory_optimization`, nor does it on `static_rnn_unroll_size`.
    Raises ValueError for `return_params`, and for a number of states that is not two a layer.
    """
    sizes = [dim_out] if isinstance(dim_out, int) else list(dim_out)
    if return_params:
        raise ValueError("LSTM: return_params is not supported; parameters are those of the model")
    if len(initial_states) != 2 * len(sizes):
        raise ValueError(f"LSTM: expected {2 * len(sizes)} initial states, found {len(initial_states)}")
    results: list[BlobReference] = []
    above = input_blob
    for layer, size in enumerate(sizes):
        is_last = layer == len(sizes) - 1
        name = ScopedName(scope if len(sizes) == 1 else f"{scope}/layer_{layer}")
        found = _layer(
            model, above, seq_lengths, initial_states[2 * layer : 2 * layer + 2], dim_in, size, name,
            outputs_with_grads if is_last else (0,), forget_bias, forward_only, drop_states,
        )  # fmt: skip
        results += found
        above, dim_in = found[0], size
    return tuple(results[-4:] if return_last_layer_only else results)


def _layer(
    model: ModelHelper,
    input_blob: Any,
    seq_lengths: Any,
    states: Sequence[Any],
    dim_in: int,
    size: int,
    scope: str,
    outputs_with_grads: Iterable[int],
    forget_bias: float,
    forward_only: bool,
    drop_states: bool,
) -> tuple[BlobReference, ...]:
    def named(name: str) -> BlobReference:
        return BlobReference(f"{scope}/{name}", model.net)

    projected = brew.fc(model, input_blob, named("i2h"), dim_in, 4 * size, axis=2)
    step = ModelHelper(name=scope, param_model=model, arg_scope=model.arg_scope)
    row, timestep, hidden, cell = (named(name) for name in ("input_t", "timestep", "hidden_t_prev", "cell_t_prev"))
    step.net.AddExternalInput(row, timestep, hidden, cell)
    gates = brew.fc(step, hidden, named("gates_t"), size, 4 * size, axis=2)
    step.net.Sum([gates, row], gates)
    lengths = [] if seq_lengths is None else [seq_lengths]
    after = step.net.LSTMUnit(
        [hidden, cell, gates, *lengths, timestep],
        [named("hidden_state"), named("cell_state")],
        forget_bias=forget_bias,
        drop_states=drop_states,
        sequence_lengths=bool(lengths),
    )
    outputs, _ = recurrent_net(
        model.net,
        step.net,
        [(row, projected)],
        list(zip((hidden, cell), states, strict=True)),
        dict(zip((hidden, cell), after, strict=True)),
        timestep=timestep,
        scope=scope,
        outputs_with_grads=outputs_with_grads,
        forward_only=forward_only,
    )
    return outputs
