"""Cells over sequences, and the gradients of their parameters and states, against formulas in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from dagexec.caffe2 import core, gru_cell, rnn_cell, workspace
from dagexec.caffe2.model_helper import ModelHelper
from dagexec.caffe2.rnn_cell import AttentionType

Array = npt.NDArray[Any]
Values = dict[str, Array]
Step = Callable[[Values, Array, list[Array]], list[Array]]
"""The states behind a step, from parameters, a row of the sequence and the states before."""

T, N, D, H, S, E = 3, 2, 2, 3, 4, 2
LENGTHS = np.array([2, 3], np.int32)
ENCODER_LENGTHS = np.array([4, 2], np.int32)


def _sigmoid(x: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-x)))


def _linear(values: Values, name: str, x: Array) -> Array:
    return np.asarray(x @ values[f"{name}_w"].T + values[f"{name}_b"])


def _lstm_unit(gates: Array, cell: Array) -> list[Array]:
    i, f, o, g = np.split(gates, 4, axis=-1)
    cell = _sigmoid(f + 0.5) * cell + _sigmoid(i) * np.tanh(g)
    return [_sigmoid(o) * np.tanh(cell), cell]


def _basic(values: Values, x: Array, states: list[Array]) -> list[Array]:
    return [np.maximum(_linear(values, "c/i2h", x) + _linear(values, "c/gates_t", states[0]), 0)]


def _lstm(values: Values, x: Array, states: list[Array], name: str = "c") -> list[Array]:
    gates = _linear(values, f"{name}/i2h", x) + _linear(values, f"{name}/gates_t", states[0])
    return _lstm_unit(gates, states[1])


def _layer_norm_lstm(values: Values, x: Array, states: list[Array]) -> list[Array]:
    gates = _linear(values, "c/i2h", x) + _linear(values, "c/gates_t", states[0])
    centered = gates - gates.mean(-1, keepdims=True)
    gates = centered / np.sqrt((centered**2).mean(-1, keepdims=True) + 1e-4)
    gates = gates * values["c/gates_t_norm_scale"] + values["c/gates_t_norm_bias"]
    return _lstm_unit(gates, states[1])


def _milstm(values: Values, x: Array, states: list[Array]) -> list[Array]:
    of_x, of_h = _linear(values, "c/i2h", x), _linear(values, "c/prev_t", states[0])
    gates = values["c/alpha"] * of_x * of_h + values["c/beta1"] * of_h + values["c/beta2"] * of_x + values["c/b"]
    return _lstm_unit(gates, states[1])


def _gru(values: Values, x: Array, states: list[Array], linear: bool = False) -> list[Array]:
    [h] = states
    of_reset, of_update, of_output = np.split(_linear(values, "c/i2h", x), 3, axis=-1)
    reset = _sigmoid(of_reset + _linear(values, "c/reset_gate_t", h))
    update = _sigmoid(of_update + _linear(values, "c/update_gate_t", h))
    kept = reset * _linear(values, "c/output_gate_t", h) if linear else _linear(values, "c/output_gate_t", reset * h)
    return [h * update + np.tanh(of_output + kept) * (1 - update)]


def _stack(values: Values, x: Array, states: list[Array]) -> list[Array]:
    """Three layers, of which the last adds its input."""
    behind: list[Array] = []
    for layer in range(3):
        behind += _lstm(values, x, states[2 * layer : 2 * layer + 2], f"layer_{layer}")
        x = behind[-2]
    return behind


def _attending(kind: AttentionType) -> Step:
    def step(values: Values, x: Array, states: list[Array]) -> list[Array]:
        encoder = values["encoder"]
        joined = np.concatenate([states[0], states[2]], axis=-1)
        gates = _linear(values, "c/decoder/i2h", x) + _linear(values, "c/decoder/gates_t", joined)
        hidden, cell = _lstm_unit(gates, states[1])
        decoder = _linear(values, "c/weighted_decoder_hidden_state", hidden)
        if kind is AttentionType.Dot:
            logits = (encoder * decoder).sum(-1)
        else:
            total = _linear(values, "c/weighted_encoder_outputs", encoder) + decoder
            if kind is AttentionType.Recurrent:
                total = total + _linear(values, "c/weighted_prev_attention_context", states[2])
            logits = _linear(values, "c/attention_logits", np.tanh(total))[..., 0]
        if kind is AttentionType.Recurrent:
            logits = np.where(np.arange(S)[:, None] < ENCODER_LENGTHS, logits, -np.inf)
        weights = np.exp(logits) / np.exp(logits).sum(0)
        return [hidden, cell, (weights[..., None] * encoder).sum(0)]

    return step


def _cells(kind: str) -> rnn_cell.RNNCell:
    settings: dict[str, Any] = {"input_size": D, "hidden_size": H, "forget_bias": 0.5}
    if kind == "stack":
        layers = [
            rnn_cell.LSTMCell(D if not layer else H, H, forget_bias=0.5, name=f"layer_{layer}") for layer in range(3)
        ]
        return rnn_cell.MultiRNNCell([*layers[:2], rnn_cell.DropoutCell(layers[2])], [2], name="c")
    plain = {
        "relu": lambda: rnn_cell.BasicRNNCell(**settings, activation="relu", name="c"),
        "lstm": lambda: rnn_cell.LSTMCell(**settings, name="c"),
        "layer norm": lambda: rnn_cell.LayerNormLSTMCell(**settings, name="c"),
        "milstm": lambda: rnn_cell.MILSTMCell(**settings, name="c"),
        "gru": lambda: gru_cell.GRUCell(**settings, name="c"),
        "linear gru": lambda: gru_cell.GRUCell(**settings, linear_before_reset=True, name="c"),
    }
    if kind in plain:
        return plain[kind]()
    lengths = "encoder_lengths" if kind == "Recurrent" else None
    return rnn_cell.LSTMWithAttentionCell(E, "encoder", lengths, D, H, "c", AttentionType[kind], forget_bias=0.5)


CASES: dict[str, tuple[Step, list[int]]] = {
    "relu": (_basic, [H]),
    "lstm": (_lstm, [H, H]),
    "layer norm": (_layer_norm_lstm, [H, H]),
    "milstm": (_milstm, [H, H]),
    "gru": (_gru, [H]),
    "linear gru": (lambda values, x, states: _gru(values, x, states, linear=True), [H]),
    "stack": (_stack, [H] * 6),
    **{kind.name: (_attending(kind), [H, H, E]) for kind in AttentionType},
}


def _outputs(kind: str, values: Values, lengths: Sequence[int] | None) -> list[Array]:
    """The sequence that the cell gives, and of each state all its values."""
    step, sizes = CASES[kind]
    states = [values[f"state{place}"][0] for place in range(len(sizes))]
    history: list[list[Array]] = []
    for t, x in enumerate(values["x"]):
        behind = step(values, x, states)
        if lengths is not None:
            on = (t < np.asarray(lengths))[:, None]
            behind = [np.where(on, new, old) for new, old in zip(behind, states, strict=True)]
        states = behind
        history.append(states)
    every = [np.stack(values) for values in zip(*history, strict=True)]
    if kind == "stack":
        return [every[4] + every[2], *every]
    return [np.concatenate([every[0], every[2]], axis=-1) if kind in AttentionType.__members__ else every[0], *every]


def _loss(kind: str, values: Values, lengths: Sequence[int] | None) -> float:
    return float(np.sin(_outputs(kind, values, lengths)[0]).sum())


@pytest.mark.parametrize("kind", CASES)
def test_cells(kind: str) -> None:
    workspace.ResetWorkspace()
    random = np.random.default_rng(3)
    lengths = LENGTHS if kind in ("lstm", "gru", "milstm") else None
    model = ModelHelper(name=f"model of {kind}")
    sizes = CASES[kind][1]
    feeds = {"x": random.normal(size=(T, N, D)), "encoder": random.normal(size=(S, N, E))}
    feeds |= {f"state{place}": random.normal(size=(1, N, size)) for place, size in enumerate(sizes)}
    names = [f"state{place}" for place in range(len(sizes))]
    cell = _cells(kind)
    output, results = cell.apply_over_sequence(model, "x", None if lengths is None else "lengths", names)
    model.net.SumElements(model.net.Sin(output, "sin"), "loss")
    gradients = model.AddGradientOperators(["loss"])
    workspace.RunNetOnce(model.param_init_net)
    for name in map(str, model.params):
        feeds[name] = random.normal(scale=0.7, size=workspace.FetchBlob(name).shape)
    for name, value in feeds.items():
        workspace.FeedBlob(name, value.astype(np.float32))
    workspace.FeedBlob("lengths", LENGTHS)
    workspace.FeedBlob("encoder_lengths", ENCODER_LENGTHS)
    workspace.RunNetOnce(model.net)
    expected = _outputs(kind, feeds, lengths)
    np.testing.assert_allclose(workspace.FetchBlob(output), expected[0], rtol=1e-4, atol=1e-5)
    for place, every in enumerate(expected[1:]):
        np.testing.assert_allclose(workspace.FetchBlob(results[2 * place]), every, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(workspace.FetchBlob(results[2 * place + 1]), every[-1:], rtol=1e-4, atol=1e-5)
    wanted = [name for name in feeds if name != "encoder" or kind in AttentionType.__members__]
    direction = {name: random.normal(size=feeds[name].shape) for name in wanted}
    for name in wanted:
        sides = [feeds | {name: feeds[name] + sign * 1e-6 * direction[name]} for sign in (1, -1)]
        slope = (_loss(kind, sides[0], lengths) - _loss(kind, sides[1], lengths)) / 2e-6
        found = workspace.FetchBlob(gradients[name])
        assert found.shape == feeds[name].shape
        assert (found * direction[name]).sum() == pytest.approx(slope, rel=2e-4, abs=2e-5), name


def test_layers_give_the_states_of_the_last_one() -> None:
    workspace.ResetWorkspace()
    model = ModelHelper(name="two")
    with core.NameScope("outer"):
        last = gru_cell.GRU(model, "x", "lengths", ["h0", "h1"], D, [H, H], scope="gru", forward_only=True)
        every = gru_cell.GRU(
            model, "x", "lengths", ["h0", "h1"], D, [H, H], scope="again", forward_only=True,
            return_last_layer_only=False, drop_states=True,
        )  # fmt: skip
    assert (len(last), len(every)) == (2, 4)
    assert {str(param).split("/")[0] for param in model.params} == {"outer"}
    workspace.RunNetOnce(model.param_init_net)
    for name in ("h0", "h1"):
        workspace.FeedBlob(f"outer/{name}", np.ones((N, H), np.float32))
    workspace.FeedBlob("outer/x", np.ones((T, N, D), np.float32))
    workspace.FeedBlob("outer/lengths", LENGTHS)
    workspace.RunNetOnce(model.net)
    hidden, end = (workspace.FetchBlob(blob) for blob in last)
    np.testing.assert_array_equal(end, hidden[-1:])
    np.testing.assert_array_equal(hidden[1:, 0], hidden[1:2, 0].repeat(2, axis=0))
    assert not workspace.FetchBlob(every[2])[2, 0].any()


def test_settings_that_do_not_fit_are_refused() -> None:
    model = ModelHelper(name="refused")
    with pytest.raises(ValueError, match="expected 2 initial states"):
        rnn_cell.LSTM(model, "x", None, ["h"], D, H, scope="r")
    with pytest.raises(ValueError, match="return_params is not supported"):
        rnn_cell.LSTM(model, "x", None, ["h", "c"], D, H, scope="r", return_params=True)
    with pytest.raises(ValueError, match="tanh or relu"):
        rnn_cell.BasicRNNCell(D, H, activation="cos")
    with pytest.raises(ValueError, match="the first adds nothing"):
        rnn_cell.MultiRNNCell([rnn_cell.LSTMCell(D, H)], [0])
