"""Cells: steps of recurrent layers, which `apply_over_sequence` runs along sequences of shape [T, N, D].

A cell names its states and computes those behind a step from those before it. What of the input needs no state it
computes for all steps at once (`prepare_input`). Cells with other cells inside pass on what these do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from dagexec.caffe2 import brew
from dagexec.caffe2.attention import (
    AttentionType,
    apply_dot_attention,
    apply_recurrent_attention,
    apply_regular_attention,
)
from dagexec.caffe2.cells import Extra, GatedCell, RNNCell, States, layers_of
from dagexec.caffe2.model_helper import ModelHelper
from dagexec.caffe2.modeling.initializers import Initializer
from dagexec.caffe2.references import BlobReference, ScopedName

__all__ = [
    "LSTM",
    "MILSTM",
    "AttentionCell",
    "AttentionType",
    "BasicRNN",
    "BasicRNNCell",
    "DropoutCell",
    "LSTMCell",
    "LSTMWithAttention",
    "LSTMWithAttentionCell",
    "LayerNormLSTM",
    "LayerNormLSTMCell",
    "MILSTMCell",
    "MILSTMWithAttentionCell",
    "MultiRNNCell",
    "RNNCell",
]  # fmt: skip


class BasicRNNCell(GatedCell):
    """tanh(W x + U h + b), or Relu."""

    state_names = ("hidden_t",)

    def __init__(self, *args: Any, activation: str = "tanh", **kwargs: Any) -> None:
        """`activation` is tanh or relu. Raises ValueError for another one."""
        super().__init__(*args, **kwargs)
        if activation not in ("tanh", "relu"):
            raise ValueError(f"expected activation tanh or relu, found {activation!r}")
        self.activation = activation

    def _apply(
        self, model: ModelHelper, input_t: Any, seq_lengths: Any, states: States, timestep: Any,
        extra_inputs: Extra = (),
    ) -> list[BlobReference]:  # fmt: skip
        gates = self._of_hidden(model, states[0], "gates_t", extra_inputs)
        gates = model.net.Sum([gates, input_t], gates)
        layer = model.net.Tanh if self.activation == "tanh" else model.net.Relu
        return [layer(gates, self.scope("hidden_t"))]


class LSTMCell(GatedCell):
    """Long short-term memory, with gates in the order input, forget, output, candidate."""

    gates = 4
    state_names = ("hidden_t", "cell_t")

    def _apply(
        self, model: ModelHelper, input_t: Any, seq_lengths: Any, states: States, timestep: Any,
        extra_inputs: Extra = (),
    ) -> list[BlobReference]:  # fmt: skip
        gates = self._gates(model, input_t, states[0], extra_inputs)
        return self._unit(model, "LSTMUnit", states, gates, seq_lengths, timestep)

    def _gates(self, model: ModelHelper, input_t: Any, hidden: Any, extra_inputs: Extra) -> Any:
        gates = self._of_hidden(model, hidden, "gates_t", extra_inputs)
        return model.net.Sum([gates, input_t], gates)


class LayerNormLSTMCell(LSTMCell):
    """LSTM whose gates are normalized over all of them (Ba et al., 2016)."""

    def _gates(self, model: ModelHelper, input_t: Any, hidden: Any, extra_inputs: Extra) -> Any:
        gates = super()._gates(model, input_t, hidden, extra_inputs)
        return brew.layer_norm(model, gates, self.scope("gates_t_norm"), dim_in=4 * self.hidden_size, axis=-1)[0]


class MILSTMCell(LSTMCell):
    """LSTM with multiplicative integration (Wu et al., 2016): a * x * h + b1 * h + b2 * x + b in place of x + h."""

    def _gates(self, model: ModelHelper, input_t: Any, hidden: Any, extra_inputs: Extra) -> Any:
        of_hidden = self._of_hidden(model, hidden, "prev_t", extra_inputs)

        def vector(name: str, value: float) -> Any:
            filled = Initializer("ConstantFill", value=value)
            return model.create_param(self.scope(name), [4 * self.hidden_size], filled)

        factor = model.net.ElementwiseLinear(
            [input_t, vector("alpha", 1.0), vector("beta1", 1.0)], self.scope("alpha_by_input_t_plus_beta_h"), axis=2
        )
        product = model.net.Mul([factor, of_hidden], self.scope("alpha_by_input_t_plus_beta_h_by_prev_t"))
        rest = model.net.ElementwiseLinear(
            [input_t, vector("beta2", 1.0), vector("b", 0.0)], self.scope("beta_i_by_input_t_plus_b"), axis=2
        )
        return model.net.Sum([product, rest], self.scope("gates_t"))


class _Around(RNNCell):
    """Base of cells that have another one inside, and its states."""

    def __init__(self, internal_cell: RNNCell, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.internal_cell = internal_cell

    def get_state_names(self) -> list[str]:
        """Those of the cell inside."""
        return self.internal_cell.get_state_names()

    def get_output_state_index(self) -> int:
        """That of the cell inside."""
        return self.internal_cell.get_output_state_index()

    def get_output_dim(self) -> int:
        """That of the cell inside."""
        return self.internal_cell.get_output_dim()

    def outputs_with_grads(self) -> list[int]:
        """Those of the cell inside."""
        return self.internal_cell.outputs_with_grads()

    def prepare_input(self, model: ModelHelper, input_blob: Any) -> Any:
        """What the cell inside needs."""
        return self.internal_cell.prepare_input(model, input_blob)


class DropoutCell(_Around):
    """A cell whose outputs, but not its states, have elements dropped while it is trained."""

    def __init__(self, internal_cell: RNNCell, dropout_ratio: float | None = None, **kwargs: Any) -> None:
        """Elements of the outputs of `internal_cell` are dropped with probability `dropout_ratio`."""
        kwargs.pop("use_cudnn", None)
        super().__init__(internal_cell, **kwargs)
        self.dropout_ratio = dropout_ratio
        self._masks = 0

    def _apply(self, model: ModelHelper, *args: Any, **kwargs: Any) -> list[BlobReference]:
        return self.internal_cell._apply(model, *args, **kwargs)

    def _prepare_output(self, model: ModelHelper, states: States) -> Any:
        return self._dropped(model, self.internal_cell._prepare_output(model, states))

    def _prepare_output_sequence(self, model: ModelHelper, state_outputs: States) -> Any:
        return self._dropped(model, self.internal_cell._prepare_output_sequence(model, state_outputs))

    def _dropped(self, model: ModelHelper, output: Any) -> Any:
        if not self.dropout_ratio or self.forward_only:
            return output
        self._masks += 1
        names = [BlobReference(f"{output}_with_dropout{suffix}{self._masks - 1}") for suffix in ("", "_mask")]
        return model.net.Dropout(output, names, ratio=float(self.dropout_ratio), is_test=0)[0]


class MultiRNNCell(RNNCell):
    """Cells in turn, each on the outputs of the one before."""

    def __init__(self, cells: Sequence[RNNCell], residual_output_layers: Iterable[int] | None = None, **kwargs: Any):
        """To the outputs of the layers `residual_output_layers` their inputs are added. The first cannot be one."""
        super().__init__(**kwargs)
        self.cells = list(cells)
        self.residual_output_layers = frozenset(residual_output_layers or ())
        if 0 in self.residual_output_layers or not self.cells:
            raise ValueError("expected cells, of which the first adds nothing to its outputs")
        self._into_last: Any = None

    def get_state_names(self) -> list[str]:
        """Those of all cells, in turn."""
        return [name for cell in self.cells for name in cell.get_state_names()]

    def get_output_state_index(self) -> int:
        """That of the last cell."""
        before = sum(len(cell.get_state_names()) for cell in self.cells[:-1])
        return before + self.cells[-1].get_output_state_index()

    def get_output_dim(self) -> int:
        """That of the last cell."""
        return self.cells[-1].get_output_dim()

    def outputs_with_grads(self) -> list[int]:
        """Those of the last cell, and of cells that are added to its outputs."""
        places: list[int] = []
        before = 0
        for layer, cell in enumerate(self.cells):
            if layer not in self.residual_output_layers:
                places = []
            places += [before + place for place in cell.outputs_with_grads()]
            before += 2 * len(cell.get_state_names())
        return places

    def prepare_input(self, model: ModelHelper, input_blob: Any) -> Any:
        """What the first cell needs."""
        return self.cells[0].prepare_input(model, input_blob)

    def _apply(
        self, model: ModelHelper, input_t: Any, seq_lengths: Any, states: States, timestep: Any,
        extra_inputs: Extra = (),
    ) -> list[BlobReference]:  # fmt: skip
        behind: list[BlobReference] = []
        layer_input = input_t
        for layer, cell in enumerate(self.cells):
            own = states[len(behind) : len(behind) + len(cell.get_state_names())]
            prepared = cell.prepare_input(model, layer_input) if layer else input_t
            made = cell._apply(model, prepared, seq_lengths, own, timestep, extra_inputs if not layer else ())
            behind += made
            self._into_last = layer_input
            if layer < len(self.cells) - 1:
                layer_input = self._with_input(model, layer, cell._prepare_output(model, made), layer_input)
        return behind

    def _with_input(self, model: ModelHelper, layer: int, output: Any, layer_input: Any) -> Any:
        if layer not in self.residual_output_layers:
            return output
        return model.net.Sum([output, layer_input], self.scope(f"residual_output_{layer}"))

    def _prepare_output(self, model: ModelHelper, states: States) -> Any:
        own = states[-len(self.cells[-1].get_state_names()) :]
        output = self.cells[-1]._prepare_output(model, own)
        return self._with_input(model, len(self.cells) - 1, output, self._into_last)

    def _prepare_output_sequence(self, model: ModelHelper, state_outputs: States) -> Any:
        outputs: Any = None
        taken = 0
        for layer, cell in enumerate(self.cells):
            count = 2 * len(cell.get_state_names())
            needed = layer == len(self.cells) - 1 or self.residual_output_layers
            if needed:
                made = cell._prepare_output_sequence(model, state_outputs[taken : taken + count])
                name = ScopedName(self.scope(f"residual_output_{layer}_all"))
                is_residual = layer in self.residual_output_layers
                outputs = model.net.Sum([made, outputs], BlobReference(name)) if is_residual else made
            taken += count
        return outputs


class AttentionCell(RNNCell):
    """A decoder's cell that reads, beside its input, a weighted sum of an encoder's outputs, and gives both.

    The sum behind a step is a state, and is read in the next.
    """

    def __init__(
        self,
        encoder_output_dim: int,
        encoder_outputs: Any,
        encoder_lengths: Any,
        decoder_cell: RNNCell,
        decoder_state_dim: int,
        attention_type: AttentionType,
        weighted_encoder_outputs: Any = None,
        attention_memory_optimization: bool = False,
        **kwargs: Any,
    ) -> None:
        """`encoder_outputs` are of shape [S, N, encoder_output_dim], of which each example has `encoder_lengths`."""
        super().__init__(**kwargs)
        self.encoder_output_dim = encoder_output_dim
        self.encoder_outputs = encoder_outputs
        self.encoder_lengths = encoder_lengths
        self.decoder_cell = decoder_cell
        self.decoder_state_dim = decoder_state_dim
        self.attention_type = AttentionType(attention_type)
        self.weighted_encoder_outputs = weighted_encoder_outputs
        self.attention_weights_3d: Any = None
        self._transposed: Any = None
        self._hidden: Any = None

    def get_state_names(self) -> list[str]:
        """Those of the decoder's cell, and the weighted sum."""
        return [*self.decoder_cell.get_state_names(), self.scope("attention_weighted_encoder_context_t")]

    def get_output_state_index(self) -> int:
        """That of the decoder's cell."""
        return self.decoder_cell.get_output_state_index()

    def get_output_dim(self) -> int:
        """Both sizes."""
        return self.decoder_state_dim + self.encoder_output_dim

    def outputs_with_grads(self) -> list[int]:
        """Those of the decoder's cell, and the weighted sum."""
        return [*self.decoder_cell.outputs_with_grads(), 2 * len(self.decoder_cell.get_state_names())]

    def prepare_input(self, model: ModelHelper, input_blob: Any) -> Any:
        """What the decoder's cell needs; and of the encoder's outputs what all steps do."""
        if self._transposed is None:
            self._transposed = model.net.Transpose(
                self.encoder_outputs, self.scope("encoder_outputs_transposed"), axes=[1, 2, 0]
            )
            if self.weighted_encoder_outputs is None and self.attention_type is not AttentionType.Dot:
                self.weighted_encoder_outputs = brew.fc(
                    model, self.encoder_outputs, self.scope("weighted_encoder_outputs"),
                    dim_in=self.encoder_output_dim, dim_out=self.encoder_output_dim, axis=2,
                )  # fmt: skip
        return self.decoder_cell.prepare_input(model, input_blob)

    def _apply(
        self, model: ModelHelper, input_t: Any, seq_lengths: Any, states: States, timestep: Any,
        extra_inputs: Extra = (),
    ) -> list[BlobReference]:  # fmt: skip
        *decoder_states, context = states
        extra = [(context, self.encoder_output_dim), *extra_inputs]
        behind = self.decoder_cell._apply(model, input_t, seq_lengths, decoder_states, timestep, extra)
        self._hidden = self.decoder_cell._prepare_output(model, behind)
        shared: dict[str, Any] = {
            "model": model,
            "encoder_output_dim": self.encoder_output_dim,
            "encoder_outputs_transposed": self._transposed,
            "decoder_hidden_state_t": self._hidden,
            "decoder_hidden_state_dim": self.decoder_state_dim,
            "scope": self.name or "attention",
            "encoder_lengths": self.encoder_lengths,
        }
        weighted = {"weighted_encoder_outputs": self.weighted_encoder_outputs}
        if self.attention_type is AttentionType.Regular:
            made = apply_regular_attention(**shared, **weighted)
        elif self.attention_type is AttentionType.Recurrent:
            made = apply_recurrent_attention(**shared, **weighted, attention_weighted_encoder_context_t_prev=context)
        else:
            made = apply_dot_attention(**shared)
        after, self.attention_weights_3d = made
        return [*behind, after]

    def get_attention_weights(self) -> Any:
        """The weights of the last step that was built, of shape [N, S, 1]."""
        return self.attention_weights_3d

    def _prepare_output(self, model: ModelHelper, states: States) -> Any:
        return self._joined(model, self._hidden, states[-1], "states_and_context_combination")

    def _prepare_output_sequence(self, model: ModelHelper, state_outputs: States) -> Any:
        decoder = self.decoder_cell._prepare_output_sequence(model, state_outputs[:-2])
        return self._joined(model, decoder, state_outputs[-2], "states_and_context_combination_all")

    def _joined(self, model: ModelHelper, output: Any, context: Any, name: str) -> Any:
        names = [self.scope(name), self.scope(f"_{name}_concat_dims")]
        return model.net.Concat([output, context], names, axis=2)[0]


class LSTMWithAttentionCell(AttentionCell):
    """AttentionCell of an LSTM."""

    decoder: type[LSTMCell] = LSTMCell

    def __init__(
        self,
        encoder_output_dim: int,
        encoder_outputs: Any,
        encoder_lengths: Any,
        decoder_input_dim: int,
        decoder_state_dim: int,
        name: str | None = None,
        attention_type: AttentionType = AttentionType.Regular,
        weighted_encoder_outputs: Any = None,
        forget_bias: float = 0.0,
        lstm_memory_optimization: bool = False,
        attention_memory_optimization: bool = False,
        forward_only: bool = False,
    ) -> None:
        """Sizes, the encoder's outputs, and how attention is computed."""
        inner = self.decoder(
            input_size=decoder_input_dim, hidden_size=decoder_state_dim, forget_bias=forget_bias,
            name=f"{name}/decoder" if name else "decoder", forward_only=forward_only,
        )  # fmt: skip
        super().__init__(
            encoder_output_dim, encoder_outputs, encoder_lengths, inner, decoder_state_dim, attention_type,
            weighted_encoder_outputs, name=name, forward_only=forward_only,
        )  # fmt: skip


class MILSTMWithAttentionCell(LSTMWithAttentionCell):
    """AttentionCell of an LSTM with multiplicative integration."""

    decoder = MILSTMCell


LSTM = layers_of(LSTMCell, 2, "Layers of LSTM. Gates are in the order input, forget, output, candidate.", MultiRNNCell)
LayerNormLSTM = layers_of(LayerNormLSTMCell, 2, "Layers of LSTM whose gates are normalized.", MultiRNNCell)
MILSTM = layers_of(MILSTMCell, 2, "Layers of LSTM with multiplicative integration.", MultiRNNCell)
BasicRNN = layers_of(BasicRNNCell, 1, "Layers of tanh(W x + U h + b), or with `activation` relu.", MultiRNNCell)


def LSTMWithAttention(
    model: ModelHelper,
    decoder_inputs: Any,
    decoder_input_lengths: Any,
    initial_decoder_hidden_state: Any,
    initial_decoder_cell_state: Any,
    initial_attention_weighted_encoder_context: Any,
    encoder_output_dim: int,
    encoder_outputs: Any,
    encoder_lengths: Any,
    decoder_input_dim: int,
    decoder_state_dim: int,
    scope: str,
    attention_type: AttentionType = AttentionType.Regular,
    outputs_with_grads: Iterable[int] = (0, 4),
    weighted_encoder_outputs: Any = None,
    lstm_memory_optimization: bool = False,
    attention_memory_optimization: bool = False,
    forget_bias: float = 0.0,
    forward_only: bool = False,
) -> tuple[BlobReference, ...]:
    """An LSTM that attends to an encoder's outputs: of hidden state, cell and context all values, then the last."""
    cell = LSTMWithAttentionCell(
        encoder_output_dim, encoder_outputs, encoder_lengths, decoder_input_dim, decoder_state_dim, scope,
        attention_type, weighted_encoder_outputs, forget_bias, forward_only=forward_only,
    )  # fmt: skip
    states = [initial_decoder_hidden_state, initial_decoder_cell_state, initial_attention_weighted_encoder_context]
    return cell.apply_over_sequence(model, decoder_inputs, decoder_input_lengths, states, outputs_with_grads)[1]
