"""Beam search: of a decoder that runs step by step, the sequences of tokens with the best scores.

In each step the beam's hypotheses are each continued by their best tokens, and the best of all are the beam of the next
step. The whole search is one RecurrentNetwork, whose states are tokens, scores, where each hypothesis comes from, the
attention, and those of the decoder.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from dagexec.caffe2.core import DataType
from dagexec.caffe2.model_helper import ModelHelper
from dagexec.caffe2.models.seq2seq.seq2seq_util import GO_ID
from dagexec.caffe2.references import BlobReference

__all__ = ["BeamSearchForwardOnly"]

_NEVER = -1e9
"""What the hypotheses but the first have in the first step, in which all are the same."""


class LinkConfig(NamedTuple):
    """A blob of the step, as `window` rows of a state from so many rows behind that of the step on."""

    blob: Any
    offset: int
    window: int


class StateConfig(NamedTuple):
    """A state of the decoder: its first value, what the step reads of it, and what the step gives."""

    initial_value: Any
    state_prev_link: LinkConfig
    state_link: LinkConfig


StateConfigs = Sequence[StateConfig]


class BeamSearchForwardOnly:
    """A search with a beam of so many hypotheses; the decoder's step is built in `get_step_model()`."""

    LinkConfig = LinkConfig
    StateConfig = StateConfig

    def __init__(
        self,
        beam_size: int,
        model: ModelHelper,
        eos_token_id: int,
        go_token_id: int = GO_ID,
        post_eos_penalty: float | None = None,
    ) -> None:
        """`post_eos_penalty` is added to the scores of tokens behind `eos_token_id`; sequences begin with the other."""
        self.beam_size = beam_size
        self.model = model
        self.eos_token_id = eos_token_id
        self.go_token_id = go_token_id
        self.post_eos_penalty = post_eos_penalty
        self.step_model = ModelHelper(name="step_model", param_model=model)
        names = ["timestep", "scores_t_prev", "tokens_t_prev", "hypo_t_prev", "attention_t_prev"]
        self.timestep, self.scores_t_prev, self.tokens_t_prev, self.hypo_t_prev, self.attention_t_prev = (
            self.step_model.net.AddExternalInputs(*names)
        )
        tokens = self.step_model.net.Cast(self.tokens_t_prev, "tokens_t_prev_int32", to=DataType.INT32)
        self._tokens, _ = self.step_model.net.Reshape(
            tokens, ["tokens_t_prev_flat", "tokens_t_prev_shape"], shape=[1, -1]
        )

    def get_step_model(self) -> ModelHelper:
        """The model to build the decoder's step in."""
        return self.step_model

    def get_previous_tokens(self) -> Any:
        """The last token of each hypothesis, int32 of shape [1, beam]."""
        return self._tokens

    def get_timestep(self) -> Any:
        """The number of the step."""
        return self.timestep

    def apply(
        self,
        inputs: Any,
        length: Any,
        log_probs: Any,
        attentions: Any,
        state_configs: StateConfigs,
        data_dependencies: Iterable[Any] = (),
        word_rewards: Any = None,
        possible_translation_tokens: Any = None,
        go_token_id: int | None = None,
    ) -> tuple[BlobReference, BlobReference, BlobReference, BlobReference]:
        """Append the search to the net; returns tokens, hypotheses that they continue, scores, and attention.

        Each has a row for the start and one for each step: int32, int32 and float of shape [length + 1, beam, 1], and
        the attention [length + 1, beam, S].

        Args:
            inputs: the source, of S rows.
            length: how many steps there are, one int32 or int64 of shape [1].
            log_probs: what the step gives for each token of the vocabulary, [beam, V] or [1, beam, V].
            attentions: what the step gives for each of the source's rows, [beam, S, 1].
            state_configs: the decoder's states, [1, beam, D] each.
            data_dependencies: blobs that must be there before the search begins.
            word_rewards: is added to the scores of tokens, [V].
            possible_translation_tokens: the tokens that `log_probs` are of, where they are not all.
            go_token_id: what sequences begin with, if not what the class was told.
        """
        step = self.step_model.net
        scores, tokens, hypo = self._continued(log_probs, word_rewards, possible_translation_tokens)
        attention = step.Gather([attentions, hypo], "attention_of_hypo")
        attention, _ = step.Reshape(attention, ["attention_t", "attention_t_shape"], shape=[1, self.beam_size, -1])
        of_beam = []
        for name, blob in (("scores_t", scores), ("tokens_t", tokens), ("hypo_t", hypo)):
            blob = step.Cast(blob, f"{name}_float", to=DataType.FLOAT)
            of_beam.append(step.Reshape(blob, [name, f"{name}_shape"], shape=[1, self.beam_size, 1])[0])
        start = self.go_token_id if go_token_id is None else go_token_id
        states = [
            ("scores", self._filled("initial_scores", 0.0), self.scores_t_prev, of_beam[0]),
            ("tokens", self._filled("initial_tokens", float(start)), self.tokens_t_prev, of_beam[1]),
            ("hypo", self._filled("initial_hypo", 0.0), self.hypo_t_prev, of_beam[2]),
            ("attention", self._no_attention(inputs), self.attention_t_prev, attention),
        ]
        links: list[tuple[Any, str, int, int]] = []
        for name, _, before, after in states:
            links += [(before, f"beam_{name}", 0, 1), (after, f"beam_{name}", 1, 1)]
        initial = [first for _, first, _, _ in states]
        for place, config in enumerate(state_configs):
            before, given = config.state_prev_link, config.state_link
            chosen = step.BatchGather([given.blob, hypo], f"{given.blob}_of_hypo")
            links.append((before.blob, f"beam_state_{place}", before.offset, before.window))
            links.append((chosen, f"beam_state_{place}", given.offset, given.window))
            initial.append(config.initial_value)
        return self._searched(length, links, initial, list(data_dependencies))

    def _filled(self, name: str, value: float, shape: Sequence[int] | None = None, **arguments: Any) -> Any:
        shape = [1, self.beam_size, 1] if shape is None else list(shape)
        return self.model.param_init_net.ConstantFill([], name, shape=shape, value=value, **arguments)

    def _no_attention(self, inputs: Any) -> Any:
        net = self.model.net
        sizes = net.Cast(net.Shape(inputs, "beam_source_shape"), "beam_source_sizes", to=DataType.INT32)
        rows = net.Slice(sizes, "beam_source_rows", starts=[0], ends=[1])
        front = self.model.param_init_net.GivenTensorIntFill([], "beam_shape", shape=[2], values=[1, self.beam_size])
        shape, _ = net.Concat([front, rows], ["initial_attention_shape", "_initial_attention_parts"], axis=0)
        return net.ConstantFill(shape, "initial_attention", input_as_shape=1, value=0.0)

    def _continued(self, log_probs: Any, rewards: Any, possible: Any) -> tuple[Any, Any, Any]:
        """The best scores, [beam], and for each the token and the hypothesis that it continues, int32."""
        net, beam = self.step_model.net, self.beam_size
        zero = self._filled("beam_zero", 0, [1], dtype=DataType.INT32)
        first = net.Cast(net.EQ([self.timestep, zero], "on_initial_step"), "on_initial_step_float", to=DataType.FLOAT)
        log_probs, _ = net.Reshape(log_probs, ["log_probs_of_beam", "log_probs_shape"], shape=[beam, -1])
        scores, _ = net.Reshape(self.scores_t_prev, ["scores_of_beam", "scores_of_beam_shape"], shape=[beam])
        others = self.model.param_init_net.GivenTensorFill(
            [], "beam_other_hypotheses", shape=[beam], values=[0.0, *[_NEVER] * (beam - 1)]
        )
        scores = net.Add([scores, net.Mul([others, first], "beam_others_now", broadcast=1)], "scores_of_hypotheses")
        if self.post_eos_penalty is not None:
            eos = self._filled("beam_eos", self.eos_token_id, [1], dtype=DataType.INT32)
            flat, _ = net.Reshape(self._tokens, ["tokens_of_beam", "tokens_of_beam_shape"], shape=[beam])
            ended = net.Cast(net.EQ([flat, eos], "is_ended", broadcast=1), "is_ended_float", to=DataType.FLOAT)
            penalty = net.Scale(ended, "post_eos_penalties", scale=float(self.post_eos_penalty))
            scores = net.Add([scores, penalty], "scores_with_penalties")
        best, best_tokens = net.TopK(log_probs, ["best_scores_per_hypo", "best_tokens_per_hypo"], k=beam)
        total = net.Add([best, scores], "output_scores", broadcast=1, axis=0)
        if possible is not None:
            best_tokens = net.Gather([possible, best_tokens], "best_possible_tokens")
        if rewards is not None:
            total = net.Add([total, net.Gather([rewards, best_tokens], "best_rewards")], "output_scores_with_rewards")
        flat, _ = net.Reshape(total, ["output_scores_flat", "output_scores_shape"], shape=[-1])
        chosen, places = net.TopK(flat, ["best_scores", "best_places"], k=beam)
        flat, _ = net.Reshape(best_tokens, ["best_tokens_flat", "best_tokens_shape"], shape=[-1])
        tokens = net.Gather([flat, places], "chosen_tokens")
        size = self._filled("beam_size", beam, [1], dtype=DataType.INT64)
        hypo = net.Cast(net.Div([places, size], "chosen_hypo_int64", broadcast=1), "chosen_hypo", to=DataType.INT32)
        return chosen, tokens, hypo

    def _searched(
        self, length: Any, links: list[tuple[Any, str, int, int]], initial: list[Any], dependencies: list[Any]
    ) -> tuple[BlobReference, BlobReference, BlobReference, BlobReference]:
        net, proto = self.model.net, self.step_model.net.Proto()
        steps = net.Cast(length, "beam_steps", to=DataType.INT32)
        ones = self.model.param_init_net.GivenTensorIntFill([], "beam_ones", shape=[2], values=[1, 1])
        shape, _ = net.Concat([steps, ones], ["beam_sequence_shape", "_beam_sequence_parts"], axis=0)
        sequence = net.ConstantFill(shape, "beam_sequence", input_as_shape=1, value=0.0)
        names = list(dict.fromkeys(external for _, external, _, _ in links))
        written = {blob for one in proto.op for blob in one.output}
        inside = {*written, str(self.timestep), *(str(internal) for internal, _, _, _ in links)}
        read = dict.fromkeys(blob for one in proto.op for blob in one.input if blob not in inside)
        kinds = ("scores", "tokens", "hypo", "attention")
        made = net.RecurrentNetwork(
            [sequence, *initial, *map(BlobReference, read), *dependencies],
            [*(f"beam_{kind}_all" for kind in kinds), "beam_step_workspaces"],
            step_net=proto,
            timestep=str(self.timestep),
            recurrent_states=names,
            initial_recurrent_state_ids=[1 + place for place in range(len(initial))],
            link_internal=[str(internal) for internal, _, _, _ in links],
            link_external=[external for _, external, _, _ in links],
            link_offset=[offset for _, _, offset, _ in links],
            link_window=[window for _, _, _, window in links],
            alias_src=[f"beam_{kind}" for kind in kinds],
            alias_dst=[f"beam_{kind}_all" for kind in kinds],
            alias_offset=[0] * len(kinds),
            outputs_with_grads=[],
        )
        scores, tokens, hypo, attention, _ = made
        tokens = net.Cast(tokens, "output_token_beam_list", to=DataType.INT32)
        hypo = net.Cast(hypo, "output_prev_index_beam_list", to=DataType.INT32)
        scores = net.Copy(scores, "output_score_beam_list")
        return tokens, hypo, scores, net.Copy(attention, "output_attention_weights_beam_list")
