"""What LSTM and GRU share: sizes, optional inputs, padding, and the product for the inputs of all steps.

A layer of G gates and a state of H computes, for every step, G * H sums of products in the order of its gates. Those of
X are one matrix product for all steps and directions; those of the state are one a step. A sigmoid is computed as
(1 + tanh(x / 2)) / 2: weights and biases of sigmoid gates are halved first, and one pass of tanh serves all gates.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from dagexec.core.dtypes import FLOAT32, FLOAT_TYPES, INT32, INT64, TypeMeta
from dagexec.core.operator import Operator, Step, nothing_to_do
from dagexec.core.rows_call import RowsCall
from dagexec.core.schema import Cost, OperatorCall, TensorType
from dagexec.core.traits import Rows
from dagexec.errors import ArgumentError, ShapeError
from dagexec.ops.base.blocks import Array, compute_dtype, convert, is_narrow
from dagexec.ops.base.row_products import row_product
from dagexec.platform.records import dataclass

DIRECTIONS = ("forward", "reverse", "bidirectional")

LAYER_ARGS = {
    "direction": "forward, reverse or bidirectional (default forward)",
    "hidden_size": "size of the state (default: R's)",
    "bias": "1: the input behind R is B, the biases of W and those of R (default 0)",
    "sequence_lengths": "1: the next input is how many steps of each sequence count, int32 or int64 (default 0: all)",
    "initial_state": "1: the next inputs are the state before the first step (default 0: zeros)",
}


@dataclass(frozen=True)
class RecurrentKind:
    """What sets one kind of layer apart.

    Attributes:
        type: of the operator.
        gates: how many sums a state element has.
        sigmoids: how many of them, the first ones, go through a sigmoid; the others through tanh.
        functions: the names of its activations in a direction, in ONNX's order.
        states: the names of the arrays that are the state.
        saved: the outputs behind Y and the last states, which the gradient reads, and how often each has the size of
            the state: steps x batch x directions x so many hidden; 0 for the shape of Y.
    """

    type: str
    gates: int
    sigmoids: int
    functions: tuple[str, ...]
    states: tuple[str, ...]
    saved: tuple[tuple[str, int], ...]

    @property
    def results(self) -> int:
        """Outputs that are results: Y and the last states."""
        return 1 + len(self.states)

    @property
    def outputs(self) -> int:
        """Outputs with those that the gradient reads."""
        return self.results + len(self.saved)

    def input_names(self) -> tuple[str, ...]:
        """The names of the inputs, for help."""
        states = (f"initial_{name}, with initial_state=1" for name in self.states)
        return ("X", "W", "R", "B, with bias=1", "sequence_lens, with sequence_lengths=1", *states)


@dataclass(frozen=True)
class Recurrence:
    """The sizes of a layer, and where its optional inputs are.

    Attributes:
        kind: LSTM's or GRU's.
        steps, batch, features: of X.
        directions: 1, or 2 of a bidirectional one.
        hidden: size of the state.
        reversed: for each direction, whether it goes from the last step to the first.
        bias, lengths, state: the numbers of the inputs B, sequence lengths, and initial state; None where absent.
        inputs: the number of inputs.
    """

    kind: RecurrentKind
    steps: int
    batch: int
    features: int
    directions: int
    hidden: int
    reversed: tuple[bool, ...]
    bias: int | None
    lengths: int | None
    state: int | None
    inputs: int

    @property
    def width(self) -> int:
        """Sums of one direction for a batch element."""
        return self.kind.gates * self.hidden

    @property
    def rows(self) -> int:
        """Batch elements of all steps."""
        return self.steps * self.batch

    def order(self, direction: int) -> list[int]:
        """The steps in the order in which a direction goes through them."""
        order = list(range(self.steps))
        return order[::-1] if self.reversed[direction] else order


def read_recurrence(call: OperatorCall, kind: RecurrentKind, behind: int = 0) -> Recurrence:
    """The sizes that arguments and inputs agree on; `behind` inputs follow those of the layer.

    Raises ArgumentError or ShapeError.
    """
    direction = call.arguments.string("direction", "forward")
    if direction not in DIRECTIONS:
        raise ArgumentError(f"{call.label}: argument 'direction' must be one of {DIRECTIONS}, found {direction!r}")
    bias, with_lengths, with_state = (
        call.arguments.bool(name) for name in ("bias", "sequence_lengths", "initial_state")
    )
    lengths, state = 3 + bias, 3 + bias + with_lengths
    count = state + len(kind.states) * with_state
    if len(call.inputs) != count + behind:
        chosen = f"bias={bias:d}, sequence_lengths={with_lengths:d} and initial_state={with_state:d}"
        raise call.fail(f"with {chosen} expected {count + behind} inputs, found {len(call.inputs)}")
    steps, batch, features = call.require_rank(0, 3)
    hidden = call.require_rank(2, 3)[2]
    wanted = call.arguments.int("hidden_size", hidden)
    if wanted != hidden:
        raise call.fail(f"argument 'hidden_size' is {wanted}, R has a state of {hidden}")
    backward = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}[direction]
    sizes = Recurrence(
        kind,
        steps,
        batch,
        features,
        len(backward),
        hidden,
        backward,
        bias=3 if bias else None,
        lengths=lengths if with_lengths else None,
        state=state if with_state else None,
        inputs=count,
    )
    _require_shapes(call, sizes)
    return sizes


def _require_shapes(call: OperatorCall, sizes: Recurrence) -> None:
    directions, gates, width = sizes.directions, sizes.kind.gates, sizes.width
    call.require_shape(1, (directions, width, sizes.features), f"directions, {gates} gates of the state, features of X")
    call.require_shape(2, (directions, width, sizes.hidden), f"directions, {gates} gates of the state, the state")
    if sizes.bias is not None:
        call.require_shape(sizes.bias, (directions, 2 * width), f"directions, {gates} gates for W and {gates} for R")
    if sizes.lengths is not None:
        call.require_types(sizes.lengths, INT32, INT64)
        call.require_shape(sizes.lengths, (sizes.batch,), "a number of steps for each sequence of the batch")
    if sizes.state is not None:
        for index in range(sizes.state, sizes.inputs):
            call.require_shape(index, (directions, sizes.batch, sizes.hidden), "directions, batch, the state")


def require_floats(call: OperatorCall, sizes: Recurrence) -> TypeMeta:
    """The element type of X, which all inputs of the layer but the sequence lengths share. Raises ShapeError."""
    call.require_types(0, *FLOAT_TYPES)
    return call.require_same_type(*(index for index in range(sizes.inputs) if index != sizes.lengths))


def infer_layer(call: OperatorCall, kind: RecurrentKind) -> list[TensorType]:
    """Y of all steps, the last states, and what the gradient reads."""
    sizes = read_recurrence(call, kind)
    meta = require_floats(call, sizes)
    count = len(call.definition.output)
    if kind.results < count < kind.outputs:
        names = " and ".join(name for name, _ in kind.saved)
        raise call.fail(
            f"expected up to {kind.results} outputs, or {kind.outputs} with {names} for the gradient, found {count}"
        )
    state = TensorType((sizes.directions, sizes.batch, sizes.hidden), meta)
    sequence = TensorType((sizes.steps, *state.shape), meta)
    return [sequence, *[state] * len(kind.states), *saved_types(sizes, meta)][:count]


def saved_types(sizes: Recurrence, meta: TypeMeta) -> list[TensorType]:
    """The types of what the gradient reads, in the type to compute in."""
    like_y = (sizes.steps, sizes.directions, sizes.batch, sizes.hidden)
    work = FLOAT32 if is_narrow(meta.numpy) else meta
    return [
        TensorType((sizes.steps, sizes.batch, sizes.directions, times * sizes.hidden) if times else like_y, work)
        for _, times in sizes.kind.saved
    ]


def layer_cost(call: OperatorCall, outputs: Sequence[TensorType], kind: RecurrentKind, behind: int = 0) -> Cost:
    """Cost of the products for X and the state, and of the gates."""
    sizes = read_recurrence(call, kind, behind)
    flops = 2 * outputs[0].elements * kind.gates * (sizes.features + sizes.hidden) + 30 * outputs[0].elements
    return Cost(flops, sum(one.nbytes for one in call.inputs), sum(one.nbytes for one in outputs))


class WorkArrays:
    """Inputs and outputs of an operator as arrays of the type to compute in.

    Attributes:
        dtype: that type: X's, or float32 for 16-bit floats.
        before, after: the conversions of inputs, and of outputs.
    """

    def __init__(self, owner: Operator) -> None:
        self.owner = owner
        self.dtype = compute_dtype(owner.x(0).dtype)
        self.before: list[Step] = []
        self.after: list[Step] = []
        self._wide: dict[int, Array] = {}
        self._wide_outputs: dict[int, Array] = {}
        self._nothing: Array | None = None

    def x(self, index: int) -> Array:
        """Input `index`."""
        array = self.owner.x(index)
        if not is_narrow(array.dtype):
            return array
        if index not in self._wide:
            self._wide[index] = self.scratch(array.shape)
            self.before.append(convert(array, self._wide[index]))
        return self._wide[index]

    def y(self, index: int) -> Array:
        """Output `index`."""
        array = self.owner.y(index)
        if not is_narrow(array.dtype):
            return array
        if index not in self._wide_outputs:
            self._wide_outputs[index] = self.scratch(array.shape)
            self.after.append(convert(self._wide_outputs[index], array))
        return self._wide_outputs[index]

    def scratch(self, shape: Sequence[int]) -> Array:
        """Memory of the step."""
        return self.owner.scratch(shape, self.dtype)

    def first_states(self, sizes: Recurrence, number: int) -> list[Array]:
        """The state of direction `number` before its first step."""
        if sizes.state is not None:
            return [self.x(sizes.state + index)[number] for index in range(len(sizes.kind.states))]
        if self._nothing is None:
            self._nothing = self.scratch((sizes.batch, sizes.hidden))
            self._nothing.fill(0)
        return [self._nothing] * len(sizes.kind.states)


def shortest_length(lengths: Array, steps: int, label: str) -> int:
    """The least of the lengths, one at least. Raises ShapeError, naming the operator, unless all are in [0, steps]."""
    shortest, longest = int(lengths.min()), int(lengths.max())
    if shortest < 0 or longest > steps:
        wrong = shortest if shortest < 0 else longest
        raise ShapeError(f"{label}: a sequence length must be in [0, {steps}], found {wrong}")
    return shortest


class Padding:
    """Which sequences of a batch have ended before each step.

    Attributes:
        full: steps of the shortest sequence: before step `full` none has ended.
        ended, running: steps x batch x 1, for each step and sequence.
    """

    def __init__(self, owner: Operator, sizes: Recurrence) -> None:
        self.full = sizes.steps
        self._steps = sizes.steps
        self._label = owner.label
        self._lengths = None if sizes.lengths is None else owner.x(sizes.lengths)
        self._numbers = np.arange(sizes.steps).reshape(-1, 1, 1)
        shape = (0 if sizes.lengths is None else sizes.steps, sizes.batch, 1)
        self.ended, self.running = owner.scratch(shape, np.bool_), owner.scratch(shape, np.bool_)

    @property
    def is_possible(self) -> bool:
        """True when the layer is given sequence lengths."""
        return self._lengths is not None

    def read(self) -> None:
        """Read the lengths, if there are any. Raises ShapeError for one that is negative or above the steps."""
        lengths = self._lengths
        if lengths is None or lengths.size == 0:
            return
        self.full = shortest_length(lengths, self._steps, self._label)
        np.less(self._numbers, lengths.reshape(1, -1, 1), out=self.running)
        np.logical_not(self.running, out=self.ended)


class Weights:
    """W, R and B of a layer as its steps use them: turned, and halved for the gates that go through a sigmoid.

    Attributes:
        factors: directions x gates of the state: 1/2 for a sigmoid's sums, else 1.
    """

    def __init__(self, arrays: WorkArrays, sizes: Recurrence) -> None:
        self._arrays = arrays
        self._sizes = sizes
        self.factors = np.ones((sizes.directions, sizes.width), arrays.dtype)
        self.factors[:, : sizes.kind.sigmoids * sizes.hidden] = 0.5

    def input_sums(self, sums: Array, joined: int) -> list[Step]:
        """The steps that set `sums`, steps x batch x directions x gates of the state, to X W^T and the biases.

        Those of R are added to those of W in the first `joined` gates.
        """
        sizes, arrays = self._sizes, self._arrays
        columns = sizes.directions * sizes.width
        # steps * batch, features; steps * batch, directions * gates
        x, rows = arrays.x(0).reshape(sizes.rows, sizes.features), sums.reshape(sizes.rows, columns)
        fill, weights = self._scaled(1, np.s_[:], turned=False)
        steps: list[Step] = [fill, row_product(arrays.owner, x, weights.reshape(columns, sizes.features).T, rows)]
        if sizes.bias is not None:
            biases = arrays.x(sizes.bias).reshape(sizes.directions, 2, sizes.width)  # those of W, of R
            total, both = arrays.scratch((sizes.directions, sizes.width)), np.s_[:, : joined * sizes.hidden]
            steps += [
                partial(np.copyto, total, biases[:, 0]),
                partial(np.add, total[both], biases[:, 1][both], out=total[both]),
                partial(np.multiply, total, self.factors, out=total),
                partial(np.add, rows, total.reshape(-1), out=rows),
            ]
        return steps

    def recurrent(self, first: int, last: int) -> tuple[Step, Array]:
        """R of the gates from `first` up to `last` as directions x hidden x gates, and the step that fills it."""
        hidden = self._sizes.hidden
        return self._scaled(2, np.s_[first * hidden : last * hidden], turned=True)

    def _scaled(self, index: int, gates: slice, *, turned: bool) -> tuple[Step, Array]:
        """Input `index` times the factors; for a constant computed once."""
        owner, factors = self._arrays.owner, self.factors[:, gates, None]
        constant = owner.input(index).constant
        source = self._arrays.x(index) if constant is None else owner.x(index)
        weights = source[:, gates]
        if turned:
            weights, factors = weights.swapaxes(1, 2), factors.swapaxes(1, 2)
        if constant is not None:
            key = f"recurrent {self._sizes.kind.gates} {gates} {turned}"
            found: Array = constant.derived(
                key, lambda: np.ascontiguousarray(weights.astype(self._arrays.dtype) * factors)
            )
            return nothing_to_do, found
        scaled = self._arrays.scratch(weights.shape)
        return partial(np.multiply, weights, factors, out=scaled), scaled


def recurrent_rows(asked: RowsCall) -> list[Rows | None]:
    """Sequences are on axis 1 of X and of the states, axis 2 of Y, and axis 0 of their lengths."""
    found: dict[int, Rows] = {}
    for index, rows in enumerate(asked.rows):
        if rows is None:
            continue
        if index in (1, 2) or rows.axis != (0 if asked.rank(index) == 1 else 1):
            raise asked.mixes(rows.axis)
        found[index] = rows.at(1)
    asked.require_uncounted()
    rows = asked.common(found)
    return [rows.at(len(kind.shape) - 2) for kind in asked.outputs]
