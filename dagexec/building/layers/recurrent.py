"""Recurrent layers: LSTM and GRU over sequences, steps x batch x features."""

from __future__ import annotations

from collections.abc import Sequence

from dagexec.building.fillers import Filler, uniform
from dagexec.building.net_builder import BIAS, WEIGHT, NetBuilder
from dagexec.building.scopes import layer
from dagexec.core.arguments import ArgumentValue
from dagexec.errors import SchemaError
from dagexec.platform.records import dataclass


@dataclass(frozen=True)
class _Kind:
    """What sets one type of layer apart: its gates, the parts of its state, and what its gradient reads."""

    type: str
    gates: int
    states: tuple[str, ...]
    saved: tuple[str, ...]


_LSTM = _Kind("LSTM", 4, ("hidden", "cell"), ("gates", "cells"))
_GRU = _Kind("GRU", 3, ("hidden",), ("gates", "reset"))
_FORGET = 2  # the place of the forget gate among LSTM's four: input, output, forget, cell


class RecurrentLayers(NetBuilder):
    """LSTM and GRU."""

    @layer
    def lstm(
        self,
        blob_in: str,
        blob_out: str,
        dim_in: int,
        dim_out: int,
        *,
        bidirectional: bool = False,
        initial: Sequence[str] | None = None,
        lengths: str | None = None,
        forget_bias: float = 1.0,
        weight_init: Filler | None = None,
    ) -> tuple[str, str, str]:
        """Long short-term memory over `blob_in` (steps x batch x dim_in).

        `initial` names the hidden state and the cell before the first step (directions x batch x dim_out each, zeros by
        default), `lengths` the length of each sequence. Returns the names of the output (steps x batch x dim_out, twice
        as wide when `bidirectional`), of the last hidden state and of the last cell (`<out>_last_hidden`, `_cell`).

        Parameters are `<out>_w` (directions x 4 dim_out x dim_in) and `<out>_r` (directions x 4 dim_out x dim_out), by
        default uniform within 1 / sqrt(dim_out), and `<out>_b` (directions x 8 dim_out), which is zero but for the
        forget gates' `forget_bias` (Jozefowicz et al. 2015).
        """
        directions = 2 if bidirectional else 1
        gates = [forget_bias if gate == _FORGET else 0.0 for gate in range(2 * _LSTM.gates)]
        values = [value for _ in range(directions) for value in gates for _ in range(dim_out)]
        bias = Filler("GivenTensorFill", {"values": values})
        output, hidden, cell = self._recurrent(
            _LSTM, blob_in, blob_out, (dim_in, dim_out), directions, initial, lengths, weight_init, bias, {}
        )
        return output, hidden, cell

    @layer
    def gru(
        self,
        blob_in: str,
        blob_out: str,
        dim_in: int,
        dim_out: int,
        *,
        bidirectional: bool = False,
        initial: str | None = None,
        lengths: str | None = None,
        linear_before_reset: bool = False,
        weight_init: Filler | None = None,
    ) -> tuple[str, str]:
        """Gated recurrent units over `blob_in` (steps x batch x dim_in).

        Arguments, parameters and names are those of `lstm`, with three gates and a hidden state alone. With
        `linear_before_reset` the reset gate multiplies the product of the state instead of the state.
        """
        arguments: dict[str, ArgumentValue] = {"linear_before_reset": 1} if linear_before_reset else {}
        directions = 2 if bidirectional else 1
        states = None if initial is None else [initial]
        output, hidden = self._recurrent(
            _GRU, blob_in, blob_out, (dim_in, dim_out), directions, states, lengths, weight_init,
            self._initialization.bias, arguments,
        )  # fmt: skip
        return output, hidden

    def _recurrent(
        self,
        kind: _Kind,
        blob_in: str,
        blob_out: str,
        dims: tuple[int, int],
        directions: int,
        initial: Sequence[str] | None,
        lengths: str | None,
        weight_init: Filler | None,
        bias_init: Filler,
        arguments: dict[str, ArgumentValue],
    ) -> list[str]:
        """The layer, and its output with the directions beside each other. Raises SchemaError for a missing state."""
        if initial is not None and len(initial) != len(kind.states):
            raise SchemaError(
                f"{kind.type.lower()} {blob_out!r}: expected the initial {' and '.join(kind.states)}, "
                f"found {len(initial)} blobs"
            )
        dim_in, dim_out = dims
        width = kind.gates * dim_out
        filler = weight_init or uniform(-(dim_out**-0.5), dim_out**-0.5)
        inputs = [
            blob_in,
            self.add_parameter(f"{blob_out}_w", [directions, width, dim_in], filler, tags=(WEIGHT,)),
            self.add_parameter(f"{blob_out}_r", [directions, width, dim_out], filler, tags=(WEIGHT,)),
            self.add_parameter(f"{blob_out}_b", [directions, 2 * width], bias_init, tags=(BIAS,)),
        ]
        given: dict[str, ArgumentValue] = {"hidden_size": dim_out, "bias": 1, **arguments}
        if directions == 2:
            given["direction"] = "bidirectional"
        if lengths is not None:
            inputs.append(lengths)
            given["sequence_lengths"] = 1
        if initial is not None:
            inputs += initial
            given["initial_state"] = 1
        outputs = [f"_{blob_out}_directions", *(f"{blob_out}_last_{state}" for state in kind.states)]
        if self.training:
            outputs += [f"_{blob_out}_{name}" for name in kind.saved]
        apart = self.add_operator(kind.type, inputs, outputs, **given)
        last = list(self.net.op[-1].output[1 : 1 + len(kind.states)])
        if directions == 1:
            joined = self.add_operator("Squeeze", [apart], [blob_out], dims=[1])
        else:
            beside = self.add_operator("Transpose", [apart], [f"_{blob_out}_beside"], axes=[0, 2, 1, 3])
            shape = [0, 0, 2 * dim_out]
            joined = self.add_operator("Reshape", [beside], [blob_out, f"_{blob_out}_shape"], shape=shape)
        return [joined, *last]
