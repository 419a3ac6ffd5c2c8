"""Recurrent layers by kernels of our own: the products and kernels of each kind, and the arrays that they work on.

The sums of X are one product for all steps; each step then adds the product of the state in place and computes the
gates (`ops/kernels/gate_product.py`, `gate_kernels.py`). `recurrent_tables` makes the calls for all steps.
"""

from __future__ import annotations

from collections.abc import Sequence

from dagexec.ops.base.blocks import Array
from dagexec.ops.families.recurrent.layer import Recurrence
from dagexec.ops.kernels.gate_kernels import (
    GRU_OUTPUT,
    GRU_RESET_BEFORE,
    GRU_RESET_BEHIND,
    LSTM,
    RESET,
    RNN,
    STATE_BEFORE,
    Function,
    GateKernel,
)
from dagexec.ops.kernels.gate_product import GateProduct, Slot
from dagexec.platform.cached import cached_property
from dagexec.platform.records import dataclass

FLOAT = 4  # bytes


@dataclass(frozen=True)
class Stage:
    """A part of a step: a product with R, then a kernel.

    Attributes:
        gates: those of R.
        slots: of these gates' sums.
        source: the array that is multiplied with R.
        program: what the kernel computes.
    """

    gates: range
    slots: tuple[Slot, ...]
    source: str
    program: str

    def of(self, gates: Array) -> Array:
        """Those that are multiplied, of an array that begins with all gates."""
        return gates[self.gates.start : self.gates.stop]


@dataclass(frozen=True)
class Form:
    """How a kind of layer is computed: slots of a row of sums, and the stages of a step."""

    slots: int
    stages: tuple[Stage, ...]


def _added(*numbers: int) -> tuple[Slot, ...]:
    return tuple(Slot(number, adds=True) for number in numbers)


LSTM_FORM = Form(4, (Stage(range(4), _added(0, 1, 2, 3), STATE_BEFORE, LSTM),))
RNN_FORM = Form(1, (Stage(range(1), _added(0), STATE_BEFORE, RNN),))
GRU_FORM = Form(
    3,
    (
        Stage(range(2), _added(0, 1), STATE_BEFORE, GRU_RESET_BEFORE),
        Stage(range(2, 3), _added(2), RESET, GRU_OUTPUT),
    ),
)
LINEAR_GRU_FORM = Form(4, (Stage(range(3), (*_added(0, 1), Slot(3, adds=False)), STATE_BEFORE, GRU_RESET_BEHIND),))


@dataclass(frozen=True)
class Variation:
    """What may differ between layers of a form; see `GateKernel`.

    Attributes:
        functions: those of each direction.
    """

    functions: tuple[tuple[Function, ...], ...]
    clip: float = 0.0
    coupled: bool = False
    peepholes: bool = False
    masked: bool = False
    saves: bool = False


@dataclass(frozen=True)
class Arrays:
    """What a layer reads and writes.

    Attributes:
        x, y: inputs and outputs of all steps.
        sums: steps x batch x directions x slots x units rounded up to whole vectors.
        first: the state before the first step: hidden, cell; directions x batch x hidden each.
        last: likewise, behind the last step; None for what is not wanted.
        held: what is kept from step to step or stage to stage: three times directions x batch x hidden.
        running: steps x batch; see `RUNNING`.
        peepholes: directions x three vectors of units.
        cells: those of all steps, shaped as Y, where they are saved.
        resets: likewise, what the reset gate leaves of the state.
    """

    x: Array
    y: Array
    sums: Array
    first: Sequence[Array]
    last: Sequence[Array | None]
    held: Array
    running: Array | None = None
    peepholes: Array | None = None
    cells: Array | None = None
    resets: Array | None = None


@dataclass(frozen=True)
class Layer:
    """The products and kernels of a layer.

    Attributes:
        sizes: of the layer.
        form: how it is computed.
        variation: what is particular to it.
        lanes: float32 numbers in a vector.
    """

    sizes: Recurrence
    form: Form
    variation: Variation
    lanes: int

    @property
    def vectors(self) -> int:
        """Vectors of units, the last of which may be partly unused."""
        return -(-self.sizes.hidden // self.lanes)

    @property
    def sums_shape(self) -> tuple[int, ...]:
        """The shape of `Arrays.sums`."""
        sizes = self.sizes
        return (sizes.steps, sizes.batch, sizes.directions, self.form.slots, self.vectors * self.lanes)

    @cached_property
    def input_product(self) -> GateProduct:
        """That of X, which sets the slots of the gates."""
        return self._product(
            self.sizes.features, tuple(Slot(gate, adds=False) for gate in range(self.sizes.kind.gates))
        )

    @cached_property
    def products(self) -> list[GateProduct]:
        """Those of the stages, with R."""
        return [self._product(self.sizes.hidden, stage.slots) for stage in self.form.stages]

    @property
    def grain(self) -> int:
        """Vectors of units that threads do not share."""
        return max(product.vectors for product in (self.input_product, *self.products))

    def kernel(self, stage: Stage, direction: int, *, gives_state: bool) -> GateKernel:
        """What computes the gates of a stage."""
        variation = self.variation
        return GateKernel(
            stage.program,
            variation.functions[direction],
            self.lanes,
            self._slot,
            self._sums_row,
            FLOAT * self.sizes.hidden,
            variation.clip,
            variation.masked,
            gives_state,
            variation.peepholes,
            variation.coupled,
            variation.saves,
        )

    @property
    def _slot(self) -> int:
        """Bytes from the sums of a gate to those of the next."""
        return FLOAT * self.lanes * self.vectors

    @property
    def _sums_row(self) -> int:
        """Bytes from a row of sums to the next, of the same direction."""
        return self.sizes.directions * self.form.slots * self._slot

    def _product(self, inner: int, slots: tuple[Slot, ...]) -> GateProduct:
        return GateProduct(inner, self.sizes.hidden, slots, self.lanes, FLOAT * inner, self._slot, self._sums_row)

    @property
    def packed_shapes(self) -> list[tuple[int, int]]:
        """Directions and float32 elements of what each product reads, that of X first."""
        return [(self.sizes.directions, one.packed_elements) for one in (self.input_product, *self.products)]

    @property
    def packing(self) -> str:
        """All that `pack` does with W, R and B, as text."""
        stages = [[(slot.number, slot.adds) for slot in stage.slots] for stage in self.form.stages]
        return f"{self.sizes.kind.gates} gates of {self.sizes.hidden} as {stages}, vectors of {self.lanes}"

    def pack(self, product: int, weights: Array, bias: Array | None, packed: Array) -> None:
        """Set `packed`, all zeros at first, to what a product reads of B and, the first, W, any other R."""
        sizes = self.sizes
        gates = (sizes.directions, sizes.kind.gates, sizes.hidden)
        weights = weights.reshape(*gates, -1)
        both = None if bias is None else bias.reshape(sizes.directions, 2, *gates[1:])
        for number, target in enumerate(packed):
            if product:
                stage = self.form.stages[product - 1]
                own = None if both is None else stage.of(both[number, 1])
                self.products[product - 1].pack(stage.of(weights[number]), own, target)
            else:
                self.input_product.pack(weights[number], None if both is None else self._summed(both[number]), target)

    def _summed(self, both: Array) -> Array:
        """The biases of W, with those of R where a step adds to the sums of X."""
        total: Array = both[0].copy()
        for stage in self.form.stages:
            added = [slot.number for slot in stage.slots if slot.adds]
            total[added] += both[1, added]
        return total

    def unpack_input(self, packed: Sequence[Array], w: Array) -> None:
        """Write W to an array of its shape."""
        for product, source, target in zip([self.input_product] * len(w), packed[0], w, strict=True):
            product.unpack(source, target.reshape(self.sizes.kind.gates, self.sizes.hidden, -1))

    def unpack_state(self, packed: Sequence[Array], r: Array) -> None:
        """Write R to an array of its shape."""
        gates = r.reshape(self.sizes.directions, self.sizes.kind.gates, self.sizes.hidden, -1)
        for stage, product, source in zip(self.form.stages, self.products, packed[1:], strict=True):
            for number in range(len(r)):
                product.unpack(source[number], stage.of(gates[number]))
