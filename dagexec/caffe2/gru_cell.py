"""Gated recurrent units."""

from __future__ import annotations

from typing import Any

from dagexec.caffe2 import brew
from dagexec.caffe2.cells import Extra, GatedCell, States, layers_of
from dagexec.caffe2.model_helper import ModelHelper
from dagexec.caffe2.references import BlobReference
from dagexec.caffe2.rnn_cell import MultiRNNCell

__all__ = ["GRU", "GRUCell"]


class GRUCell(GatedCell):
    """A gated recurrent unit, with gates in the order reset, update, output."""

    gates = 3
    state_names = ("hidden_t",)

    def __init__(self, *args: Any, linear_before_reset: bool = False, **kwargs: Any) -> None:
        """With `linear_before_reset` the reset gate multiplies the product with the state, as in cuDNN."""
        super().__init__(*args, **kwargs)
        self.linear_before_reset = linear_before_reset

    def _apply(
        self, model: ModelHelper, input_t: Any, seq_lengths: Any, states: States, timestep: Any,
        extra_inputs: Extra = (),
    ) -> list[BlobReference]:  # fmt: skip
        net, [hidden] = model.net, states
        names = [self.scope(f"input_t_{gate}") for gate in ("reset", "update", "output")]
        of_reset, of_update, of_output = net.Split(input_t, names, axis=2)
        reset = self._of_hidden(model, hidden, "reset_gate_t", extra_inputs, gates=1)
        update = self._of_hidden(model, hidden, "update_gate_t", extra_inputs, gates=1)
        reset = net.Sum([reset, of_reset], reset)
        opened = net.Sigmoid(reset, self.scope("reset_gate_t_sigmoid"))
        if self.linear_before_reset:
            output = self._of_hidden(model, hidden, "output_gate_t", extra_inputs, gates=1)
            output = net.Mul([opened, output], self.scope("output_gate_t_mul"))
        else:
            kept = net.Mul([opened, hidden], self.scope("modified_hidden_t"))
            output = self._of_hidden(model, kept, "output_gate_t", extra_inputs, gates=1)
        update = net.Sum([update, of_update], update)
        output = net.Sum([output, of_output], self.scope("output_gate_t_summed"))
        gates = brew.concat(model, [reset, update, output], self.scope("gates_t"), axis=2)
        return self._unit(model, "GRUUnit", states, gates, seq_lengths, timestep)


GRU = layers_of(GRUCell, 1, "Layers of GRU. Gates are in the order reset, update, output.", MultiRNNCell)
