"""The gradient of an LSTM whose element-wise parts are kernels of our own; the products are NumPy's.

64 steps of 32 rows with a state of 128: a training step of 14.2 ms (least of 150, beside other work, AVX-512) became
one of 11.8; with AVX2 there was no difference.
"""

from __future__ import annotations

from collections.abc import Callable

from dagexec.core.dtypes import FLOAT32
from dagexec.core.operator import Step
from dagexec.core.registry import operator
from dagexec.ops.kernels import elementary
from dagexec.ops.kernels.builder import Builder, Vector
from dagexec.ops.kernels.formulas import formula_step
from dagexec.ops.onednn.operator import OneDNNOperator
from dagexec.ops.onednn.primitive import Array
from dagexec.ops.recurrent import lstm_gradient

Read = Callable[[int], Vector]


def _of_input_and_cell(build: Builder, read: Read) -> list[Vector]:
    """Of i and g: the factors of dC in the gradients of their sums, i (1 - i) g and i (1 - g^2)."""
    i, g = read(0), read(1)
    return [i * (1.0 - i) * g, i * (1.0 - g * g)]


def _of_output_and_forget(build: Builder, read: Read) -> list[Vector]:
    """Of o, f and the cell: the factor of dH in the gradient of o's sum, f (1 - f), and that of dH in dC."""
    o, f, tanh = read(0), read(1), elementary.tanh(build, read(2))
    return [o * (1.0 - o) * tanh, f * (1.0 - f), o * (1.0 - tanh * tanh)]


def _last_step(build: Builder, read: Read) -> list[Vector]:
    """Of dC, the four factors, slope and f, and dH: the four gradients of sums, and the dC of the step before."""
    dc, dh = read(0), read(7)
    dc = build.fma(dh, read(5), dc)
    return [read(1) * dc, read(2) * dh, read(3) * dc, read(4) * dc, read(6) * dc]


def _step(build: Builder, read: Read) -> list[Vector]:
    """As `_last_step`, with dY to be added to dH."""
    dh = read(7) + read(8)
    return _last_step(build, lambda number: dh if number == 7 else read(number))


@operator(lstm_gradient.LSTMGradient.schema, engine="ONEDNN")
class LSTMGradient(OneDNNOperator, lstm_gradient.LSTMGradient):
    """Gradient of long short-term memory."""

    metas = (FLOAT32,)

    def prepare_primitive(self) -> Step:
        """The default engine's, with kernels where they serve."""
        return lstm_gradient.LSTMGradient.prepare(self)

    def needs_onednn(self) -> bool:
        """Never: NumPy does what the kernels do not."""
        return False

    def derivatives(self, gates: Array, sums: Array, cells: Array, tanhs: Array, slopes: Array) -> list[Step]:
        """Two passes; NumPy's without kernels."""
        hidden = slopes.shape[-1]
        i, o, f, g = (gates[:, :, gate * hidden : (gate + 1) * hidden] for gate in range(4))
        of_i, of_o, of_f, of_g = (sums[:, :, gate * hidden : (gate + 1) * hidden] for gate in range(4))
        machine, label = self.onednn.machine, self.label
        found = [
            formula_step(machine, _of_input_and_cell, [i, g], [of_i, of_g], label),
            formula_step(machine, _of_output_and_forget, [o, f, cells], [of_o, of_f, slopes], label),
        ]
        passes = [step for step in found if step is not None]
        return passes if len(passes) == len(found) else super().derivatives(gates, sums, cells, tanhs, slopes)

    def kernel(self, total: Array, dh: Array, dc: Array, slope: Array, forget: Array, dy: Array | None) -> Step | None:
        """One formula."""
        hidden = slope.shape[-1]
        factors = [total[:, gate * hidden : (gate + 1) * hidden] for gate in range(4)]
        given = [dc, *factors, slope, forget, dh, *([] if dy is None else [dy])]
        formula = _last_step if dy is None else _step
        return formula_step(self.onednn.machine, formula, given, [*factors, dc], self.label)
