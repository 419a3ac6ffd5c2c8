"""LSTMs and GRUs for tests: their inputs, and what they give, computed sequence by sequence in float64."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from dagexec.core.arguments import ArgumentValue
from tests.ops.running import Array

DIRECTIONS = ["forward", "reverse", "bidirectional"]


@dataclass(frozen=True)
class Layer:
    """A layer; its arrays are made from `seed`. `shorter` are steps that each sequence lacks, None for no lengths."""

    op_type: str = "LSTM"
    steps: int = 4
    batch: int = 3
    features: int = 5
    hidden: int = 6
    direction: str = "forward"
    bias: bool = True
    state: bool = True
    shorter: tuple[int, ...] | None = None
    linear: bool = False
    seed: int = 0

    @property
    def directions(self) -> int:
        return 2 if self.direction == "bidirectional" else 1

    @property
    def gates(self) -> int:
        return 4 if self.op_type == "LSTM" else 3

    @property
    def states(self) -> int:
        return 2 if self.op_type == "LSTM" else 1

    @property
    def results(self) -> int:
        """Outputs that are results: Y and the last states. Two more are for the gradient."""
        return 1 + self.states

    @property
    def lengths(self) -> Array:
        missing = self.shorter or (0,)
        return np.array([max(0, self.steps - missing[n % len(missing)]) for n in range(self.batch)], np.int32)

    def inputs(self, dtype: type = np.float32) -> list[Array]:
        rng, d, h, g = np.random.default_rng(self.seed), self.directions, self.hidden, self.gates
        shapes = [(self.steps, self.batch, self.features), (d, g * h, self.features), (d, g * h, h)]
        shapes += [(d, 2 * g * h)] * self.bias + [(d, self.batch, h)] * self.states * self.state
        arrays = [rng.uniform(-1, 1, shape).astype(dtype) for shape in shapes]
        if self.shorter is not None:
            arrays.insert(3 + self.bias, self.lengths)
        return arrays

    def arguments(self) -> dict[str, ArgumentValue]:
        found: dict[str, ArgumentValue] = {
            "direction": self.direction,
            "bias": int(self.bias),
            "initial_state": int(self.state),
            "sequence_lengths": int(self.shorter is not None),
        }
        return found if self.op_type == "LSTM" else found | {"linear_before_reset": int(self.linear)}

    def expected(self) -> tuple[Array, ...]:
        """Y and the last states in float64, one sequence after the other."""
        x, w, r, *rest = (array.astype(np.float64) for array in self.inputs())
        b = rest.pop(0) if self.bias else np.zeros((self.directions, 2 * self.gates * self.hidden))
        if self.shorter is not None:
            rest.pop(0)
        first = rest or [np.zeros((self.directions, self.batch, self.hidden))] * self.states
        y = np.zeros((self.steps, self.directions, self.batch, self.hidden))
        last = [np.array(state) for state in first]
        for d in range(self.directions):
            for n, length in enumerate(self.lengths):
                state = [one[d, n] for one in first]
                for t in sorted(range(length), reverse=self.direction == "reverse" or d == 1):
                    state = self._step(x[t, n], state, w[d], r[d], *np.split(b[d], 2))
                    y[t, d, n] = state[0]
                for one, found in zip(last, state, strict=True):
                    one[d, n] = found
        return (y, *last)

    def _step(self, x: Array, state: list[Array], w: Array, r: Array, wb: Array, rb: Array) -> list[Array]:
        h = state[0]
        if self.op_type == "LSTM":
            i, o, f, g = np.split(w @ x + r @ h + wb + rb, 4)
            c = state[1] / (1 + np.exp(-f)) + np.tanh(g) / (1 + np.exp(-i))
            return [np.tanh(c) / (1 + np.exp(-o)), c]
        (xz, xr, xn), (hz, hr, hn) = np.split(w @ x + wb, 3), np.split(r @ h + rb, 3)
        z, reset = 1 / (1 + np.exp(-xz - hz)), 1 / (1 + np.exp(-xr - hr))
        if not self.linear:
            hn = r[2 * self.hidden :] @ (reset * h) + rb[2 * self.hidden :]
        return [(1 - z) * np.tanh(xn + (reset * hn if self.linear else hn)) + z * h]


layers = st.builds(
    Layer,
    op_type=st.sampled_from(["LSTM", "GRU"]),
    steps=st.integers(0, 5),
    batch=st.integers(0, 4),
    features=st.integers(0, 9),
    hidden=st.integers(1, 20),
    direction=st.sampled_from(DIRECTIONS),
    bias=st.booleans(),
    state=st.booleans(),
    shorter=st.none() | st.lists(st.integers(0, 5), min_size=1, max_size=4).map(tuple),
    linear=st.booleans(),
    seed=st.integers(0, 99),
)
