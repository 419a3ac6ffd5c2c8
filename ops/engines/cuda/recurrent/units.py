"""LSTMUnit and GRUUnit with their gradients on CUDA: one kernel each."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from dagexec.core.operator import Step
from dagexec.ops.engines.cuda.base.expression import computed_scalar, elementwise
from dagexec.ops.engines.cuda.base.kinds import on_cuda
from dagexec.ops.engines.cuda.base.operator import Array, CudaOperator
from dagexec.ops.families.recurrent.units import GRUUnit, GRUUnitGradient, LSTMUnit, LSTMUnitGradient, Unit

_LSTM_GATES = """
    A opened = logistic(gate_i), kept = logistic(gate_f + forget_bias), given = logistic(gate_o), fresh = tanh(gate_g);
"""
_LSTM = """
    cell = ended ? (drops ? A(0) : cell_prev) : kept * cell_prev + opened * fresh;
    hidden = ended ? (drops ? A(0) : hidden_prev) : given * tanh(cell);
"""
_LSTM_GRADIENT = """
    A bent = tanh(cell), inner = (A(1) - bent * bent) * given * dh + dc;
    dh_prev = ended && !drops ? dh : A(0);
    dc_prev = ended ? (drops ? A(0) : dc) : inner * kept;
    of_i = ended ? A(0) : inner * fresh * (opened * (A(1) - opened));
    of_f = ended ? A(0) : inner * cell_prev * (kept * (A(1) - kept));
    of_o = ended ? A(0) : dh * bent * (given * (A(1) - given));
    of_g = ended ? A(0) : inner * opened * (A(1) - fresh * fresh);
"""
_GRU_GATES = "A update = logistic(gate_u), fresh = tanh(gate_o);\n"
_GRU = "hidden = ended ? (drops ? A(0) : hidden_prev) : (hidden_prev - fresh) * update + fresh;"
_GRU_GRADIENT = """
    dh_prev = ended ? (drops ? A(0) : dh) : dh * update;
    of_r = A(0);
    of_u = ended ? A(0) : (hidden_prev - fresh) * dh * (update * (A(1) - update));
    of_o = ended ? A(0) : (A(1) - update) * dh * (A(1) - fresh * fresh);
"""


class CudaUnit(CudaOperator):
    """Base of the units, mixed into classes made of the host's."""

    def of_batch(
        self, inputs: Mapping[str, int], gates: str, outputs: Mapping[str, Array], code: str, name: str
    ) -> Step:
        """The kernel over batch x hidden: `code` on the inputs (by number), and the gates, by letter; "-" is not read.

        `ended` is true where a sequence has ended, `drops` where its state is 0 then.
        """
        assert isinstance(self, Unit)
        arrays = {key: self.x(index)[0] for key, index in inputs.items()}
        sums = split(self.x(self.states)[0], len(gates))
        arrays |= {f"gate_{letter}": part for letter, part in zip(gates, sums, strict=True) if letter != "-"}
        first = next(iter(arrays.values()))
        scalars: dict[str, np.generic] = {"drops": np.bool_(self.arguments.bool("drop_states"))}
        if "forget_bias" in code:
            scalars["forget_bias"] = computed_scalar(first, self.arguments.float("forget_bias", 0.0))
        if self.arguments.bool("sequence_lengths", True):
            arrays["length"] = self.x(self.states + 1).reshape(-1, 1)
            arrays["timestep"] = self.x(self.states + 2).reshape(1, 1)
            code = f"const bool ended = length <= timestep; {code}"
        else:
            code = f"const bool ended = false; {code}"
        return elementwise(self, name, arrays, outputs, code, scalars)


def split(sums: Array, count: int) -> list[Array]:
    """The gates of batch x (count of hidden), as views."""
    hidden = sums.shape[1] // count
    return [sums[:, number * hidden : (number + 1) * hidden] for number in range(count)]


@on_cuda(LSTMUnit)
class CudaLSTMUnit(CudaUnit):
    """One step of long short-term memory."""

    def prepare(self) -> Step:
        inputs = {"hidden_prev": 0, "cell_prev": 1}
        outputs = {"hidden": self.y(0)[0], "cell": self.y(1)[0]}
        return self.of_batch(inputs, "ifog", outputs, _LSTM_GATES + _LSTM, "lstm_unit")


@on_cuda(LSTMUnitGradient)
class CudaLSTMUnitGradient(CudaUnit):
    """Gradient of one step of long short-term memory."""

    def prepare(self) -> Step:
        """One kernel, which computes the gates once more."""
        count = len(self.input_blobs)
        inputs = {"cell_prev": 1, "cell": count - 3, "dh": count - 2, "dc": count - 1}
        outputs = {"dh_prev": self.y(0)[0], "dc_prev": self.y(1)[0]}
        outputs |= dict(zip(("of_i", "of_f", "of_o", "of_g"), split(self.y(2)[0], 4), strict=True))
        return self.of_batch(inputs, "ifog", outputs, _LSTM_GATES + _LSTM_GRADIENT, "lstm_unit_gradient")


@on_cuda(GRUUnit)
class CudaGRUUnit(CudaUnit):
    """One step of gated recurrent units."""

    def prepare(self) -> Step:
        return self.of_batch({"hidden_prev": 0}, "-uo", {"hidden": self.y(0)[0]}, _GRU_GATES + _GRU, "gru_unit")


@on_cuda(GRUUnitGradient)
class CudaGRUUnitGradient(CudaUnit):
    """Gradient of one step of gated recurrent units."""

    def prepare(self) -> Step:
        """One kernel, which computes the gates once more."""
        inputs = {"hidden_prev": 0, "dh": len(self.input_blobs) - 1}
        outputs = {"dh_prev": self.y(0)[0]}
        outputs |= dict(zip(("of_r", "of_u", "of_o"), split(self.y(1)[0], 3), strict=True))
        return self.of_batch(inputs, "-uo", outputs, _GRU_GATES + _GRU_GRADIENT, "gru_unit_gradient")
