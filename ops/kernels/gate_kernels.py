"""The gates of recurrent layers for one time step.

A kernel goes through the rows (sequences) of some units: from the sums of the gates, which `gate_product` leaves in
slots, and the state before the step, it computes the state behind it. Formulas and the order of gates are ONNX's
(operators LSTM, GRU, RNN). What goes on for long in one element, a tanh of what follows from other functions, is left
to a second pass over the row, so that the processor works on several vectors at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

from dagexec.ops.kernels.builder import BYTES, Builder, Mask, Scalar, Vector
from dagexec.ops.kernels.elementary import clip, elu, hard_sigmoid, leaky_relu, sigmoid, softplus, tanh
from dagexec.platform.records import dataclass

SUMS, CELL_BEFORE, CELL, OUTPUT, STATE_BEFORE, STATE, RUNNING, PEEPHOLES, RESET = (
    "sums",
    "cell before",
    "cell",
    "output",
    "state before",
    "state",
    "running",
    "peepholes",
    "reset",
)
"""Arrays of a kernel, each with a row for a sequence, but for the peepholes: three vectors of units.

`RUNNING` has a number for each sequence: 1, or 0 behind its end, where the state stays and the output is 0.
`RESET` is what the reset gate makes of the state, or with a linear product what it multiplies.
"""

Function = tuple[str, float, float]
"""One of FUNCTIONS, with ONNX's alpha and beta; 0 for one that it has not."""

FUNCTIONS: Mapping[str, Callable[[Builder, Vector, float, float], Vector]] = {
    "Sigmoid": lambda build, x, alpha, beta: sigmoid(build, x),
    "Tanh": lambda build, x, alpha, beta: tanh(build, x),
    "Relu": lambda build, x, alpha, beta: build.maximum(0.0, x),
    "Affine": lambda build, x, alpha, beta: x * alpha + beta,
    "LeakyRelu": lambda build, x, alpha, beta: leaky_relu(build, x, alpha),
    "ThresholdedRelu": lambda build, x, alpha, beta: build.select(build.less(x, alpha), 0.0, x),
    "ScaledTanh": lambda build, x, alpha, beta: tanh(build, x * beta) * alpha,
    "HardSigmoid": hard_sigmoid,
    "Elu": lambda build, x, alpha, beta: elu(build, x, alpha),
    "Softsign": lambda build, x, alpha, beta: x / (build.absolute(x) + 1.0),
    "Softplus": lambda build, x, alpha, beta: softplus(build, x),
}

_FIELDS = 2  # rows and units, before the addresses


@dataclass(frozen=True)
class GateKernel:
    """What a kernel computes.

    Attributes:
        program: the name of what it does, in `_PROGRAMS`.
        functions: in ONNX's order.
        lanes: float32 numbers in a vector.
        slot: bytes from a gate's sums to those of the next.
        sums_row: bytes from the sums of a row to those of the next.
        state_row: likewise, of arrays of the state.
        clip: sums are cut off at so much before the functions; 0 for never.
        masked: some sequences may have ended.
        gives_state: the state is written beside the output; so it is where sequences may have ended.
        peepholes: an LSTM with them.
        coupled: an LSTM whose forget gate is 1 less the input gate.
        saves: the gates are left in the slots, for the gradient.
    """

    program: str
    functions: tuple[Function, ...]
    lanes: int
    slot: int
    sums_row: int
    state_row: int
    clip: float = 0.0
    masked: bool = False
    gives_state: bool = False
    peepholes: bool = False
    coupled: bool = False
    saves: bool = False

    @property
    def arrays(self) -> tuple[str, ...]:
        """The arrays that it reads and writes, in the order of their addresses in `fields`."""
        found = _PROGRAMS[self.program].arrays
        added: tuple[str, ...] = (PEEPHOLES,) if self.peepholes else ()
        if OUTPUT in found:
            added += (STATE,) if self.gives_state or self.masked else ()
            added += (STATE_BEFORE, RUNNING) if self.masked else ()
        return tuple(dict.fromkeys((*found, *added)))

    def fields(self, rows: int, units: int, addresses: Mapping[str, int]) -> list[int]:
        """What a call for so many rows and units reads: numbers, and the addresses of the first elements."""
        return [rows, units, *(addresses[name] for name in self.arrays)]

    def function(self) -> int:
        """The address of a function of `fields`; 0 where it cannot run."""
        return _kernel(self) or 0

    def stride(self, name: str) -> int:
        """Bytes from a row of an array to the next."""
        return {SUMS: self.sums_row, RUNNING: BYTES, PEEPHOLES: 0}.get(name, self.state_row)


@dataclass(frozen=True)
class _Place:
    """The vector, or the part of one, that a pass is written for; it reads and writes there.

    Attributes:
        build, kernel: what is written.
        running: the sequence has not ended; None where none may have.
    """

    build: Builder
    kernel: GateKernel
    running: Mask | None
    _addresses: Mapping[str, Scalar]
    _place: Scalar
    _mask: Mask | None

    def load(self, name: str, offset: int = 0) -> Vector:
        """Of array `name`, `offset` bytes on."""
        return self.build.load(self._addresses[name], self._place, offset, mask=self._mask)

    def store(self, value: Vector, name: str, offset: int = 0) -> None:
        """Write to array `name`."""
        self.build.store(value, self._addresses[name], self._place, offset, mask=self._mask)

    def slot(self, number: int) -> Vector:
        """The sums of a gate."""
        return self.load(SUMS, number * self.kernel.slot)

    def keep_slot(self, value: Vector, number: int) -> None:
        """Write in the place of the sums of a gate."""
        self.store(value, SUMS, number * self.kernel.slot)

    def save_slot(self, value: Vector, number: int) -> None:
        """The same for a gate that only the gradient reads."""
        if self.kernel.saves:
            self.keep_slot(value, number)

    def function(self, number: int, x: Vector) -> Vector:
        """Function `number` of x."""
        name, alpha, beta = self.kernel.functions[number]
        return FUNCTIONS[name](self.build, x, alpha, beta)

    def gate(self, number: int, sums: Vector) -> Vector:
        """Function `number` of sums, cut off before."""
        limit = self.kernel.clip
        return self.function(number, clip(self.build, sums, -limit, limit) if limit else sums)

    def unless_ended(self, new: Vector, before: Vector | float) -> Vector:
        """`before` where the sequence has ended."""
        return new if self.running is None else self.build.select(self.running, new, before)

    def finish(self, h: Vector) -> None:
        """Write the output, and the state if it is wanted."""
        self.store(self.unless_ended(h, 0.0), OUTPUT)
        if STATE in self._addresses:
            state = h if self.running is None else self.unless_ended(h, self.load(STATE_BEFORE))
            self.store(state, STATE)


def _lstm_cell(at: _Place) -> None:
    """The cell, and the output gate in its slot."""
    build, kernel = at.build, at.kernel
    i, o, f, g = (at.slot(number) for number in range(4))
    c = at.load(CELL_BEFORE)
    if kernel.peepholes:
        i = build.fma(at.load(PEEPHOLES), c, i)
        f = build.fma(at.load(PEEPHOLES, 2 * kernel.state_row), c, f)
    i, g = at.gate(0, i), at.gate(1, g)
    f = 1.0 - i if kernel.coupled else at.gate(0, f)
    new = build.fma(i, g, f * c)
    if kernel.peepholes:
        o = build.fma(at.load(PEEPHOLES, kernel.state_row), new, o)
    o = at.gate(0, o)
    at.store(at.unless_ended(new, c), CELL)
    at.keep_slot(o, 1)
    for value, number in ((i, 0), (f, 2), (g, 3)):
        at.save_slot(value, number)


def _lstm_output(at: _Place) -> None:
    """The state from the cell and the output gate."""
    at.finish(at.slot(1) * at.function(2, at.load(CELL)))


def _gru_reset_behind(at: _Place) -> None:
    """The update gate in its slot, and the sums of the candidate, to which slot 3 adds what the reset gate leaves."""
    r = at.gate(0, at.slot(1))
    at.keep_slot(at.build.fma(r, at.slot(3), at.slot(2)), 2)
    at.keep_slot(at.gate(0, at.slot(0)), 0)
    at.save_slot(r, 1)


def _gru_reset_before(at: _Place) -> None:
    """The update gate in its slot, and the state that the reset gate leaves, which the candidate's product reads."""
    r = at.gate(0, at.slot(1))
    at.store(r * at.load(STATE_BEFORE), RESET)
    at.keep_slot(at.gate(0, at.slot(0)), 0)
    at.save_slot(r, 1)


def _gru_output(at: _Place) -> None:
    """The mix of the candidate and the state before."""
    n = at.gate(1, at.slot(2))
    at.save_slot(n, 2)
    at.finish(at.build.fma(at.load(STATE_BEFORE) - n, at.slot(0), n))


def _rnn(at: _Place) -> None:
    """The function of the sums."""
    at.finish(at.gate(0, at.slot(0)))


@dataclass(frozen=True)
class _Program:
    """The arrays that a kernel reads and writes, and its passes over a row."""

    arrays: tuple[str, ...]
    passes: Sequence[Callable[[_Place], None]]


LSTM, RNN, GRU_RESET_BEHIND, GRU_RESET_BEFORE, GRU_OUTPUT = (
    "LSTM",
    "RNN",
    "GRU, reset gate behind the product",
    "GRU, reset gate before the product",
    "GRU, output",
)
"""Programs. A GRU whose reset gate is before the product has that of the candidate between two kernels."""

_PROGRAMS = {
    LSTM: _Program((SUMS, CELL_BEFORE, CELL, OUTPUT), (_lstm_cell, _lstm_output)),
    RNN: _Program((SUMS, OUTPUT), (_rnn,)),
    GRU_RESET_BEHIND: _Program((SUMS, STATE_BEFORE, OUTPUT), (_gru_reset_behind, _gru_output)),
    GRU_RESET_BEFORE: _Program((SUMS, STATE_BEFORE, RESET), (_gru_reset_before,)),
    GRU_OUTPUT: _Program((SUMS, STATE_BEFORE, OUTPUT), (_gru_output,)),
}


@lru_cache(maxsize=256)
def _kernel(kernel: GateKernel) -> int | None:
    """The address of a function of fields; None where it cannot run."""
    build = Builder(kernel.lanes)
    (fields,) = build.arguments(1)
    rows, units, *numbers = build.numbers(fields, _FIELDS + len(kernel.arrays))
    addresses = dict(zip(kernel.arrays, numbers, strict=True))
    with build.repeat(rows):
        running = None
        if RUNNING in addresses:
            running = build.less(0.0, build.broadcast(addresses[RUNNING]))
        for write in _PROGRAMS[kernel.program].passes:

            def body(
                place: Scalar,
                mask: Mask | None,
                write: Callable[[_Place], None] = write,
                running: Mask | None = running,
            ) -> None:
                write(_Place(build, kernel, running, addresses, place, mask))

            build.each(units, body)
        for name, address in addresses.items():
            address.set(address + kernel.stride(name))
    return build.function()
