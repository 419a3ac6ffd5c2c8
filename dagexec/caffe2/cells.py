"""What cells have in common: how they run along sequences, and layers of them as functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from dagexec.caffe2 import brew
from dagexec.caffe2.model_helper import ModelHelper
from dagexec.caffe2.recurrent import recurrent_net
from dagexec.caffe2.references import BlobReference, ScopedName

States = Sequence[BlobReference]
Extra = Sequence[tuple[Any, int]]
"""Further inputs of a step, each with its size."""


class RNNCell:
    """Base of cells.

    Attributes:
        name: what names of its blobs begin with.
        forward_only: whether the gradient is left out.
        hidden_size: the size of its output.
        state_names: of its states, without the name of the cell.
    """

    hidden_size: int
    state_names: tuple[str, ...]

    def __init__(self, name: str | None = None, forward_only: bool = False, initializer: Any = None) -> None:
        """`initializer` has `create_states(model)`, for a sequence that is given no initial states."""
        self.name = name
        self.forward_only = forward_only
        self.initializer = initializer

    def scope(self, name: str) -> str:
        """The name within the cell."""
        return name if self.name is None else f"{self.name}/{name}"

    def get_state_names(self) -> list[str]:
        """The names of its states."""
        return [self.scope(name) for name in self.state_names]

    def get_output_state_index(self) -> int:
        """The place of the state that is its output."""
        return 0

    def get_output_dim(self) -> int:
        """The size of its output."""
        return self.hidden_size

    def outputs_with_grads(self) -> list[int]:
        """The places, among what `apply_over_sequence` gives of the states, of what its outputs are made of."""
        return [2 * self.get_output_state_index()]

    def prepare_input(self, model: ModelHelper, input_blob: Any) -> Any:
        """What all steps need of the sequence."""
        return input_blob

    def _prepare_output(self, model: ModelHelper, states: States) -> Any:
        """The output of a step."""
        return states[self.get_output_state_index()]

    def _prepare_output_sequence(self, model: ModelHelper, state_outputs: States) -> Any:
        """The outputs of all steps; `state_outputs` are of each state all its values, then the last."""
        return state_outputs[2 * self.get_output_state_index()]

    def _apply(
        self,
        model: ModelHelper,
        input_t: Any,
        seq_lengths: Any,
        states: States,
        timestep: Any,
        extra_inputs: Extra = (),
    ) -> list[BlobReference]:
        """The states behind a step."""
        raise NotImplementedError

    def apply(
        self, model: ModelHelper, input_t: Any, seq_lengths: Any, states: States, timestep: Any
    ) -> tuple[Any, list[BlobReference]]:
        """One step in the net of `model`: its output, and the states behind it."""
        prepared = self.prepare_input(model, input_t)
        behind = self._apply(model, prepared, seq_lengths, states, timestep)
        return self._prepare_output(model, behind), behind

    def apply_over_sequence(
        self,
        model: ModelHelper,
        inputs: Any,
        seq_lengths: Any = None,
        initial_states: Sequence[Any] | None = None,
        outputs_with_grads: Iterable[int] | None = None,
    ) -> tuple[Any, tuple[BlobReference, ...]]:
        """The outputs of all steps of a sequence; and of each state all its values, then the last.

        `seq_lengths`, int32 of shape [N], says how many steps each sequence has; None is as many as there are rows.
        `outputs_with_grads` are places of the results that a loss depends on, by default that of the outputs. Raises
        ValueError for another number of initial states than that of states.
        """
        if initial_states is None and self.initializer is not None:
            initial_states = self.initializer.create_states(model)
        names = [ScopedName(name) for name in self.get_state_names()]
        if len(initial_states or ()) != len(names):
            raise ValueError(f"expected {len(names)} initial states, of {names}, found {len(initial_states or ())}")
        prepared = self.prepare_input(model, inputs)
        step = ModelHelper(name=self.name or type(self).__name__, param_model=model, arg_scope=model.arg_scope)
        row, timestep = (BlobReference(ScopedName(self.scope(name))) for name in ("input_t", "timestep"))
        before = [BlobReference(f"{name}_prev") for name in names]
        step.net.AddExternalInput(row, timestep, *before)
        behind = self._apply(step, row, seq_lengths, before, timestep)
        outputs, _ = recurrent_net(
            model.net,
            step.net,
            [(row, prepared)],
            list(zip(before, initial_states or (), strict=True)),
            dict(zip(before, behind, strict=True)),
            timestep=timestep,
            scope=ScopedName(step.net.Name()),
            outputs_with_grads=self.outputs_with_grads() if outputs_with_grads is None else outputs_with_grads,
            forward_only=self.forward_only,
        )
        return self._prepare_output_sequence(model, outputs), outputs


class GatedCell(RNNCell):
    """Base of cells whose input is projected to a number of gates, to which they add what the states give."""

    gates = 1

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        forget_bias: float = 0.0,
        memory_optimization: bool = False,
        drop_states: bool = False,
        **kwargs: Any,
    ) -> None:
        """`memory_optimization` changes nothing: only states are kept for the gradient."""
        super().__init__(**kwargs)
        self.input_size = input_size
        self.hidden_size = hidden_size
        self.forget_bias = forget_bias
        self.drop_states = drop_states

    def prepare_input(self, model: ModelHelper, input_blob: Any) -> Any:
        """The input's part of the gates, of all steps."""
        return brew.fc(
            model, input_blob, self.scope("i2h"), dim_in=self.input_size, dim_out=self.gates * self.hidden_size, axis=2
        )

    def _of_hidden(
        self, model: ModelHelper, hidden: Any, name: str, extra_inputs: Extra = (), gates: int | None = None
    ) -> Any:
        """The part of gates that comes from the hidden state before, and from further inputs."""
        size = self.hidden_size
        if extra_inputs:
            blobs = [hidden, *(blob for blob, _ in extra_inputs)]
            hidden = brew.concat(model, blobs, self.scope("gates_concatenated_input_t"), axis=2)
            size += sum(width for _, width in extra_inputs)
        dim_out = (self.gates if gates is None else gates) * self.hidden_size
        return brew.fc(model, hidden, self.scope(name), dim_in=size, dim_out=dim_out, axis=2)

    def _unit(
        self, model: ModelHelper, op_type: str, states: States, gates: Any, seq_lengths: Any, timestep: Any
    ) -> list[BlobReference]:
        lengths = [] if seq_lengths is None else [seq_lengths]
        outputs = [self.scope(name) for name in ("hidden_state", "cell_state")[: len(states)]]
        made = getattr(model.net, op_type)(
            [*states, gates, *lengths, timestep], outputs,
            forget_bias=self.forget_bias, drop_states=self.drop_states, sequence_lengths=bool(lengths),
        )  # fmt: skip
        return list(made) if len(states) > 1 else [made]


def layers_of(
    cell_class: Callable[..., RNNCell], states: int, doc: str, several: Callable[..., RNNCell]
) -> Callable[..., Any]:
    """A function: a layer, or several, of such a cell over a sequence; `several` makes one cell of them."""

    def layers(
        model: ModelHelper,
        input_blob: Any,
        seq_lengths: Any,
        initial_states: Sequence[Any] | None,
        dim_in: int,
        dim_out: int | Sequence[int],
        scope: str | None = None,
        outputs_with_grads: Iterable[int] = (0,),
        return_params: bool = False,
        memory_optimization: bool = False,
        forget_bias: float = 0.0,
        forward_only: bool = False,
        drop_states: bool = False,
        return_last_layer_only: bool = True,
        static_rnn_unroll_size: int | None = None,
        **cell_kwargs: Any,
    ) -> tuple[Any, ...]:
        if return_params:
            raise ValueError("return_params is not supported; parameters are those of the model")
        sizes = [dim_out] if isinstance(dim_out, int) else list(dim_out)
        cells = [
            cell_class(
                input_size=before, hidden_size=size, forget_bias=forget_bias, forward_only=forward_only,
                drop_states=drop_states, memory_optimization=memory_optimization,
                name=scope if len(sizes) == 1 else f"{scope}/layer_{layer}" if scope else f"layer_{layer}",
                **cell_kwargs,
            )
            for layer, (before, size) in enumerate(zip([dim_in, *sizes], sizes, strict=False))
        ]  # fmt: skip
        cell = cells[0] if len(cells) == 1 else several(cells, name=scope, forward_only=forward_only)
        behind = 2 * states * (len(cells) - 1)
        wanted = [behind + place for place in outputs_with_grads] if return_last_layer_only else outputs_with_grads
        _, results = cell.apply_over_sequence(model, input_blob, seq_lengths, initial_states, wanted)
        return results[behind:] if return_last_layer_only else results

    layers.__doc__ = f"""{doc}

    Of the last layer, or with `return_last_layer_only` false of all, each state's values in all steps, then the last;
    `outputs_with_grads` are places among these. `dim_out` is the size of the layer, or of several in turn;
    `initial_states` are those of each layer. `seq_lengths`, int32 of shape [N], says how many steps each sequence has;
    None is as many as there are rows. Neither `memory_optimization` nor `static_rnn_unroll_size` change anything.
    Raises ValueError for `return_params`, and for another number of states than the layers have.
    """
    return layers
