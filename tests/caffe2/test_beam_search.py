"""Beam search against one in plain Python, in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from dagexec.caffe2 import brew, workspace
from dagexec.caffe2.model_helper import ModelHelper
from dagexec.caffe2.models.seq2seq.beam_search import BeamSearchForwardOnly

Array = npt.NDArray[Any]

BEAM, VOCABULARY, D, S, LENGTH = 3, 7, 4, 5, 6
EOS, GO = 2, 1


def _expected(
    values: dict[str, Array], penalty: float, rewards: Array, tokens: Array
) -> tuple[list[list[int]], list[list[int]], list[list[float]], list[Array]]:
    beam = [(0.0, GO, values["state"][0, place]) for place in range(BEAM)]
    all_tokens, all_hypo, all_scores, attention = [[GO] * BEAM], [[0] * BEAM], [[0.0] * BEAM], [np.zeros((BEAM, S))]
    for step in range(LENGTH):
        found = []
        states, weights = [], []
        for place, (score, token, state) in enumerate(beam):
            state = np.tanh(values["step_w"] @ state + values["step_b"] + values["embedding"][token])
            logits = values["out_w"] @ state + values["out_b"]
            log_probs = logits - np.log(np.exp(logits).sum())
            states.append(state)
            weights.append(values["attention_w"] @ state + values["attention_b"])
            score += penalty if token == EOS else 0.0
            if step or not place:
                best = np.argsort(-log_probs, kind="stable")[:BEAM]
                found += [(score + log_probs[one] + rewards[tokens[one]], place, int(tokens[one])) for one in best]
        found = sorted(found, key=lambda one: -one[0])[:BEAM]
        beam = [(score, token, states[place]) for score, place, token in found]
        all_scores.append([score for score, _, _ in found])
        all_hypo.append([place for _, place, _ in found])
        all_tokens.append([token for _, _, token in found])
        attention.append(np.array([weights[place] for _, place, _ in found]))
    return all_tokens, all_hypo, all_scores, attention


@pytest.mark.parametrize("with_rewards", [False, True])
def test_the_best_sequences(with_rewards: bool) -> None:
    workspace.ResetWorkspace()
    random = np.random.default_rng(7)
    model = ModelHelper(name="search")
    search = BeamSearchForwardOnly(BEAM, model, EOS, go_token_id=GO, post_eos_penalty=-0.5 if with_rewards else None)
    step = search.get_step_model()
    before = step.net.AddExternalInput("state_prev")
    embedded = step.net.Gather(["embedding", search.get_previous_tokens()], "embedded")
    state = brew.fc(step, before, "step", D, D, axis=2)
    state = step.net.Tanh(step.net.Sum([state, embedded], "sum"), "state_t")
    logits = brew.fc(step, state, "out", D, VOCABULARY, axis=2)
    log_probs = step.net.Log(step.net.Softmax(logits, "probs", axis=2), "log_probs")
    attention = brew.fc(step, state, "attention", D, S, axis=2)
    attention, _ = step.net.Reshape(attention, ["attentions", "attentions_shape"], shape=[BEAM, S, 1])
    link = search.LinkConfig
    outputs = search.apply(
        "source", "length", log_probs, attention, [search.StateConfig("state", link(before, 0, 1), link(state, 1, 1))],
        word_rewards="rewards" if with_rewards else None,
        possible_translation_tokens="possible" if with_rewards else None,
    )  # fmt: skip
    workspace.RunNetOnce(model.param_init_net)
    values = {name: random.normal(size=workspace.FetchBlob(name).shape) for name in map(str, model.params)}
    values["embedding"] = random.normal(size=(VOCABULARY, D))
    values["state"] = np.repeat(random.normal(size=(1, 1, D)), BEAM, axis=1)
    rewards, possible = random.normal(size=VOCABULARY), random.permutation(VOCABULARY)
    feeds = values | {"source": np.zeros((S, 1)), "rewards": rewards}
    for name, value in feeds.items():
        workspace.FeedBlob(name, value.astype(np.float32))
    workspace.FeedBlob("possible", possible.astype(np.int32))
    workspace.FeedBlob("length", np.array([LENGTH], np.int32))
    workspace.RunNetOnce(model.net)
    given = (-0.5, rewards, possible) if with_rewards else (0.0, np.zeros(VOCABULARY), np.arange(VOCABULARY))
    tokens, hypo, scores, weights = _expected(values, *given)
    found = [workspace.FetchBlob(blob) for blob in outputs]
    assert [one.dtype for one in found[:2]] == [np.int32] * 2
    np.testing.assert_array_equal(found[0][..., 0], tokens)
    np.testing.assert_array_equal(found[1][..., 0], hypo)
    np.testing.assert_allclose(found[2][..., 0], scores, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found[3], weights, rtol=1e-4, atol=1e-5)
