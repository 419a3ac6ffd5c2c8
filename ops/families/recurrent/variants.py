"""RNN, and LSTM and GRU with what ONNX allows besides: other activations, peepholes, coupled gates, clipped sums.

The operators `LSTM` and `GRU` are for layers as nearly all are, and faster. Names, shapes and the order of gates are
those of ONNX. Peepholes: Gers and Schmidhuber, 2000; coupled gates: Greff et al., 2017, arXiv:1503.04069.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar

import numpy as np

from dagexec.core.gradient import not_differentiable
from dagexec.core.operator import Step
from dagexec.core.registry import new_operator
from dagexec.core.schema import Cost, OperatorCall, TensorType, memory_cost
from dagexec.errors import ArgumentError
from dagexec.ops.base.array_function import ArrayOperator
from dagexec.ops.base.blocks import Array, compute_dtype
from dagexec.ops.base.row_products import multiply_rows
from dagexec.ops.families.recurrent.gru import GRU_KIND
from dagexec.ops.families.recurrent.layer import (
    LAYER_ARGS,
    Recurrence,
    RecurrentKind,
    layer_cost,
    read_recurrence,
    recurrent_rows,
    require_floats,
    shortest_length,
)
from dagexec.ops.families.recurrent.lstm import LSTM_KIND
from dagexec.platform.records import dataclass

Function = Callable[[Array], None]
"""Replaces the elements of an array by what it makes of them."""


def _sigmoid(x: Array, _alpha: float, _beta: float) -> None:
    np.multiply(x, 0.5, out=x)
    np.tanh(x, out=x)
    np.multiply(x, 0.5, out=x)
    np.add(x, 0.5, out=x)


def _tanh(x: Array, _alpha: float, _beta: float) -> None:
    np.tanh(x, out=x)


def _relu(x: Array, _alpha: float, _beta: float) -> None:
    np.maximum(x, 0, out=x)


def _affine(x: Array, alpha: float, beta: float) -> None:
    x *= alpha
    x += beta


def _leaky_relu(x: Array, alpha: float, _beta: float) -> None:
    np.copyto(x, x * alpha, where=x < 0)


def _thresholded_relu(x: Array, alpha: float, _beta: float) -> None:
    np.copyto(x, 0, where=x < alpha)


def _scaled_tanh(x: Array, alpha: float, beta: float) -> None:
    x *= beta
    np.tanh(x, out=x)
    x *= alpha


def _hard_sigmoid(x: Array, alpha: float, beta: float) -> None:
    _affine(x, alpha, beta)
    np.clip(x, 0, 1, out=x)


def _elu(x: Array, alpha: float, _beta: float) -> None:
    np.copyto(x, alpha * np.expm1(np.minimum(x, 0)), where=x < 0)


def _softsign(x: Array, _alpha: float, _beta: float) -> None:
    x /= 1 + np.abs(x)


def _softplus(x: Array, _alpha: float, _beta: float) -> None:
    np.logaddexp(x, 0, out=x)


@dataclass(frozen=True, slots=True)
class Activation:
    """A function with defaults for its parameters; None for one that it has not."""

    compute: Callable[[Array, float, float], None]
    alpha: float | None = None
    beta: float | None = None


ACTIVATIONS = {
    "Sigmoid": Activation(_sigmoid),
    "Tanh": Activation(_tanh),
    "Relu": Activation(_relu),
    "Affine": Activation(_affine, 1.0, 0.0),
    "LeakyRelu": Activation(_leaky_relu, 0.01),
    "ThresholdedRelu": Activation(_thresholded_relu, 1.0),
    "ScaledTanh": Activation(_scaled_tanh, 1.0, 1.0),
    "HardSigmoid": Activation(_hard_sigmoid, 0.2, 0.5),
    "Elu": Activation(_elu, 1.0),
    "Softsign": Activation(_softsign),
    "Softplus": Activation(_softplus),
}
_BY_NAME = {name.lower(): name for name in ACTIVATIONS}


Named = tuple[str, float, float]
"""One of ACTIVATIONS, alpha and beta; 0 for one that it has not."""


def read_activations(call: OperatorCall, defaults: Sequence[str], directions: int) -> list[list[Named]]:
    """The functions of each direction. The numbers in `activation_alpha` go to those that have an alpha, in order.

    Raises ArgumentError for an unknown function, or another number than a direction has of each.
    """
    names = call.arguments.strings("activations") or [*defaults] * directions
    if len(names) != len(defaults) * directions:
        expected = len(defaults) * directions
        raise ArgumentError(f"{call.label}: {expected} 'activations' are needed, found {names}")
    alphas, betas = (iter(call.arguments.floats(f"activation_{name}")) for name in ("alpha", "beta"))
    functions: list[Named] = []
    for name in names:
        known = _BY_NAME.get(name.lower())
        if known is None:
            raise ArgumentError(f"{call.label}: activation {name!r} is none of {', '.join(ACTIVATIONS)}")
        found = ACTIVATIONS[known]
        alpha = 0.0 if found.alpha is None else next(alphas, found.alpha)
        beta = 0.0 if found.beta is None else next(betas, found.beta)
        functions.append((known, alpha, beta))
    width = len(defaults)
    return [functions[start : start + width] for start in range(0, len(functions), width)]


def _function(named: Named) -> Function:
    name, alpha, beta = named
    compute = ACTIVATIONS[name].compute
    return lambda x: compute(x, alpha, beta)


RNN_KIND = RecurrentKind("RNN", gates=1, sigmoids=0, functions=("Tanh",), states=("h",), saved=())

ARGS = LAYER_ARGS | {
    "activations": f"the functions of each direction, of {', '.join(ACTIVATIONS)} (default: those of the formula)",
    "activation_alpha": "first parameters of the functions that have some, in order",
    "activation_beta": "second parameters, likewise",
    "clip": "sums are cut off at -clip and clip before the functions",
}


def infer_variant(call: OperatorCall, kind: RecurrentKind) -> list[TensorType]:
    """Y of all steps and the last states."""
    peepholes = int(call.arguments.bool("peepholes"))
    sizes = read_recurrence(call, kind, behind=peepholes)
    meta = require_floats(call, sizes)
    if peepholes:
        call.require_shape(sizes.inputs, (sizes.directions, 3 * sizes.hidden), "directions, three of the state")
        call.require_same_type(0, sizes.inputs)
    if call.arguments.float("clip", 0.0) < 0:
        raise ArgumentError(f"{call.label}: argument 'clip' must not be negative")
    for name in ("linear_before_reset", "input_forget"):
        call.arguments.bool(name)
    read_activations(call, kind.functions, sizes.directions)
    state = TensorType((sizes.directions, sizes.batch, sizes.hidden), meta)
    sequence = TensorType((sizes.steps, *state.shape), meta)
    return [sequence, *[state] * len(kind.states)][: len(call.definition.output)]


@dataclass(frozen=True)
class Direction:
    """What the steps of one direction compute with.

    Attributes:
        recurrent: R turned: hidden x gates.
        bias: that of R, of the gates.
        functions: the activations.
        peepholes: three vectors of the state; None without.
        clip: cuts sums off.
    """

    recurrent: Array
    bias: Array
    functions: list[Function]
    peepholes: tuple[Array, ...] | None
    clip: Function


class Variant(ArrayOperator):
    """Base: the sums of X for all steps, then step after step.

    Attributes:
        kind: what kind of layer it is.
    """

    kind: ClassVar[RecurrentKind]

    @abstractmethod
    def advance(self, direction: Direction, sums: Array, states: list[Array]) -> list[Array]:
        """The states after a step, from those before and `sums`, batch x gates, of X and the bias of W."""

    def computing(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> Step:
        """Each run widens 16-bit floats, and goes through the directions one after the other."""
        call = self.call()
        peepholes = call.arguments.bool("peepholes")
        sizes = read_recurrence(call, self.kind, behind=int(peepholes))
        named = read_activations(call, self.kind.functions, sizes.directions)
        functions = [[_function(one) for one in names] for names in named]
        clip = self._clip(call)

        def step() -> None:
            given = [array.astype(compute_dtype(array.dtype), copy=False) for array in inputs]
            for number in range(sizes.directions):
                both = np.zeros((2, sizes.width), given[0].dtype)
                if sizes.bias is not None:
                    both = given[sizes.bias][number].reshape(2, sizes.width)
                peeping = tuple(given[sizes.inputs][number].reshape(3, -1)) if peepholes else None
                direction = Direction(given[2][number].T, both[1], functions[number], peeping, clip)
                sums = self.product(given[0].reshape(sizes.rows, sizes.features), given[1][number].T) + both[0]
                self._direction(
                    sizes, number, direction, sums.reshape(sizes.steps, sizes.batch, sizes.width), given, outputs
                )

        return step

    def product(self, x: Array, w: Array) -> Array:
        """x w for a matrix x of examples."""
        if self.is_batch_invariant:
            return multiply_rows(x, w)
        found: Array = x @ w
        return found

    @staticmethod
    def _clip(call: OperatorCall) -> Function:
        limit = call.arguments.float("clip", 0.0) or math.inf

        def clip(x: Array) -> None:
            np.clip(x, -limit, limit, out=x)

        return clip

    def _direction(
        self,
        sizes: Recurrence,
        number: int,
        direction: Direction,
        sums: Array,
        given: Sequence[Array],
        outputs: Sequence[Array],
    ) -> None:
        shape = (sizes.batch, sizes.hidden)
        if sizes.state is None:
            states = [np.zeros(shape, sums.dtype) for _ in self.kind.states]
        else:
            states = [given[sizes.state + index][number] for index in range(len(self.kind.states))]
        lengths = None if sizes.lengths is None or not sizes.batch else given[sizes.lengths]
        full = sizes.steps if lengths is None else shortest_length(lengths, sizes.steps, self.label)
        for place in sizes.order(number):
            after = self.advance(direction, sums[place], states)
            y = after[0]
            if lengths is not None and place >= full:
                running = (place < lengths)[:, None]
                y = np.where(running, y, 0)
                after = [np.where(running, new, old) for new, old in zip(after, states, strict=True)]
            np.copyto(outputs[0][place, number], y, casting="unsafe")
            states = after
        for output, state in zip(outputs[1:], states, strict=False):
            np.copyto(output[number], state, casting="unsafe")


def _gates(sums: Array, count: int) -> list[Array]:
    width = sums.shape[-1] // count
    return [sums[..., gate * width : (gate + 1) * width] for gate in range(count)]


@new_operator(
    "RNN",
    inputs=(3, 6),
    outputs=(1, 2),
    infer=partial(infer_variant, kind=RNN_KIND),
    doc="For each step t of X: Y[t] = H = f(X[t] W^T + H R^T + biases), f being tanh. X is steps x batch x "
    "features, Y steps x directions x batch x hidden. Behind the end of a sequence Y is 0 and its state stays. "
    "Elman, 1990. (dagexec's own, for ONNX.)",
    input_names=RNN_KIND.input_names(),
    output_names=("Y", "Y_h, the last state"),
    args=ARGS,
    cost=partial(layer_cost, kind=RNN_KIND),
    rows=recurrent_rows,
)
class RNN(Variant):
    """A simple recurrent layer."""

    kind = RNN_KIND

    def advance(self, direction: Direction, sums: Array, states: list[Array]) -> list[Array]:
        """f of the sums."""
        h = self.product(states[0], direction.recurrent)
        h += sums
        h += direction.bias
        direction.clip(h)
        direction.functions[0](h)
        return [h]


def _general_lstm_cost(call: OperatorCall, outputs: Sequence[TensorType]) -> Cost:
    return memory_cost(call, outputs, 8 * call.inputs[2].shape[-1] + 8 * call.inputs[0].shape[-1] + 30)


@new_operator(
    "GeneralLSTM",
    inputs=(3, 8),
    outputs=(1, 3),
    infer=partial(infer_variant, kind=LSTM_KIND),
    doc="LSTM with functions f, g, h and peepholes p: i = f(i + p_i C), forget likewise; C = forget C + i g(cell); "
    "o = f(o + p_o C); Y[t] = H = o h(C). With input_forget=1, forget = 1 - i. See LSTM for the rest. "
    "(dagexec's own, for ONNX.)",
    input_names=(*LSTM_KIND.input_names(), "P, with peepholes=1: input, output, forget"),
    output_names=("Y", "Y_h, the last hidden state", "Y_c, the last cell"),
    args=ARGS | {"peepholes": "1: the last input is P (default 0)", "input_forget": "1: coupled gates (default 0)"},
    cost=_general_lstm_cost,
    rows=recurrent_rows,
)
class GeneralLSTM(Variant):
    """Long short-term memory with other functions, peepholes or coupled gates."""

    kind = LSTM_KIND

    def advance(self, direction: Direction, sums: Array, states: list[Array]) -> list[Array]:
        """The gates, the cell, the hidden state."""
        h, c = states
        gates = self.product(h, direction.recurrent)
        gates += sums
        gates += direction.bias
        i, o, f, g = _gates(gates, 4)
        opened, squashed, shown = direction.functions
        if direction.peepholes is not None:
            i += direction.peepholes[0] * c
            f += direction.peepholes[2] * c
        for sum_ in (i, f, g):
            direction.clip(sum_)
        opened(i)
        if self.arguments.bool("input_forget"):
            np.subtract(1, i, out=f)
        else:
            opened(f)
        squashed(g)
        cell = f * c
        cell += i * g
        if direction.peepholes is not None:
            o += direction.peepholes[1] * cell
        direction.clip(o)
        opened(o)
        hidden = cell.copy()
        shown(hidden)
        hidden *= o
        return [hidden, cell]


@new_operator(
    "GeneralGRU",
    inputs=(3, 6),
    outputs=(1, 2),
    infer=partial(infer_variant, kind=GRU_KIND),
    doc="GRU with functions f and g for sigmoid and tanh, and clipped sums. See GRU for the rest. (dagexec's own, "
    "for ONNX.)",
    input_names=GRU_KIND.input_names(),
    output_names=("Y", "Y_h, the last state"),
    args=ARGS | {"linear_before_reset": "1: the reset gate multiplies what R makes of H; else H (default 0)"},
    cost=partial(layer_cost, kind=GRU_KIND),
    rows=recurrent_rows,
)
class GeneralGRU(Variant):
    """Gated recurrent units with other functions."""

    kind = GRU_KIND

    def advance(self, direction: Direction, sums: Array, states: list[Array]) -> list[Array]:
        """Update and reset gates, the candidate, the mix."""
        (h,) = states
        width = 2 * h.shape[1]
        opened = self.product(h, direction.recurrent[:, :width])
        opened += sums[:, :width]
        opened += direction.bias[:width]
        direction.clip(opened)
        direction.functions[0](opened)
        z, r = _gates(opened, 2)
        recurrent, bias = direction.recurrent[:, width:], direction.bias[width:]
        behind = self.arguments.bool("linear_before_reset")
        n = r * (self.product(h, recurrent) + bias) if behind else self.product(r * h, recurrent) + bias
        n += sums[:, width:]
        direction.clip(n)
        direction.functions[1](n)
        return [n + z * (h - n)]


not_differentiable("train with LSTM or GRU", "RNN", "GeneralLSTM", "GeneralGRU")
