"""Gradient makers: for an operator and the gradients of its outputs, the operators that compute those of its inputs.

A maker stands beside its operator in `dagexec.ops` and only builds defs; `dagexec.training.backward` puts them together
for a net. The gradient of blob `x` is called `x_grad`.

    @gradient_of("Relu")
    def relu_gradient(request: GradientRequest) -> GradientOperators:
        return request.single("ReluGradient", [request.y(0), request.dy(0)], [0])

One that does no more than that is said in short: `gradient_by("Relu", "ReluGradient", ("Y", "dY"))`.

Gradient operators get the arguments, the engine and the device of the forward operator. Those of an operator that may
work in place must allow dX to overwrite dY, as both have one name then.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import field
from string import digits

from dagexec.core.arguments import Arguments, ArgumentValue, make_argument
from dagexec.core.node import arguments_of, operator_label
from dagexec.core.operator_def import op
from dagexec.core.operator_index import load_gradient
from dagexec.core.proto import OperatorDef
from dagexec.errors import GradientError
from dagexec.platform.records import dataclass


@dataclass(frozen=True, slots=True)
class SparseGradient:
    """A gradient that is zero but in some rows: blob `values` has a row for each entry of blob `indices` (1-D).

    An index may occur more than once; its rows add up.
    """

    indices: str
    values: str


OLD_VALUE = "<before>"
"""The backward pass appends this to the name of an input that the operator overwrites, to tell it from the output."""

Gradient = str | SparseGradient
"""The blob of a dense gradient, or a sparse one."""


@dataclass(frozen=True)
class GradientOperators:
    """What a maker returns.

    Attributes:
        operators: the gradient operators, in an order in which they may run.
        inputs: the gradient of each input of the forward operator; None where there is none, or it is not wanted.
    """

    operators: tuple[OperatorDef, ...]
    inputs: tuple[Gradient | None, ...]


@dataclass(frozen=True)
class GradientRequest:
    """What a maker is asked.

    Attributes:
        definition: the forward operator.
        outputs: the gradient of each output; None where nothing depends on that output.
        wanted: the inputs whose gradients are requested. A maker may give others, too.
        label: how messages name the forward operator.
        arguments: the forward operator's arguments.
    """

    definition: OperatorDef
    outputs: tuple[Gradient | None, ...]
    wanted: frozenset[int]
    label: str
    arguments: Arguments
    _fills: list[OperatorDef] = field(default_factory=list)

    def x(self, index: int) -> str:
        """The name of input `index`. Raises GradientError when the operator has no such input."""
        return self._blob("input", self.definition.input, index)

    def y(self, index: int) -> str:
        """The name of output `index`. Raises GradientError when the operator has no such output."""
        return self._blob("output", self.definition.output, index)

    def shape_of_x(self, index: int) -> str:
        """A blob of the shape of input `index`, of an operator whose outputs in place have the shape of the input.

        It is the input, or the output that overwrites it; so no gradient fails because a value is gone that nothing
        reads.
        """
        name = self.x(index)
        overwriting = (y for y in self.definition.output if name in (y, f"{y}{OLD_VALUE}"))
        return next(overwriting, name)

    def has_x(self, index: int) -> bool:
        """True when the operator has that input."""
        return index < len(self.definition.input)

    def has_y(self, index: int) -> bool:
        """True when the operator has that output."""
        return index < len(self.definition.output)

    def has_dy(self, index: int) -> bool:
        """True when something depends on output `index`."""
        return index < len(self.outputs) and self.outputs[index] is not None

    def require_no_dy(self, *outputs: int) -> None:
        """Raise GradientError when something depends on one of these outputs, whose gradients the maker leaves out."""
        for index in outputs:
            if self.has_dy(index):
                raise GradientError(
                    f"{self.label}: output {self.y(index)!r} is there for the gradient operator; no gradient passes "
                    f"from it to the inputs: read it through StopGradient, or compute it apart"
                )

    def dy(self, index: int) -> str:
        """The dense gradient of output `index`; where nothing depends on it, zeros of the output's shape and type.

        Raises GradientError when the gradient is sparse.
        """
        grad = self.outputs[index]
        if isinstance(grad, SparseGradient):
            raise GradientError(
                f"{self.label}: expected a dense gradient of output {self.y(index)!r}, found a sparse one ({grad})"
            )
        if grad is not None:
            return grad
        name = f"{self.y(index)}_autogen_zeros"
        if all(name not in fill.output for fill in self._fills):
            self._fills.append(_placed(fill_like(self.y(index), name, 0.0), self.definition))
        return name

    def dx(self, index: int) -> str:
        """The name for the gradient of input `index`.

        That is the blob's with `_grad`. A blob that is several inputs gets a name of its own for each; the backward
        pass sums them.
        """
        name = self.x(index)
        before = list(self.definition.input[:index]).count(name)
        return f"{name}_grad" if not before else f"_{name}_grad_input_{index}"

    def operator(
        self,
        op_type: str,
        inputs: Sequence[str],
        outputs: Sequence[str],
        **arguments: ArgumentValue,
    ) -> OperatorDef:
        """A gradient operator, with the forward operator's device, engine and arguments; `arguments` replace those."""
        operator = OperatorDef(type=op_type, input=inputs, output=outputs, is_gradient_op=True)
        operator.engine = self.definition.engine
        operator.arg.extend(arg for arg in self.definition.arg if arg.name not in arguments)
        operator.arg.extend(make_argument(name, value) for name, value in arguments.items())
        return _placed(operator, self.definition)

    def plain_operator(
        self, op_type: str, inputs: Sequence[str], outputs: Sequence[str], **arguments: ArgumentValue
    ) -> OperatorDef:
        """An operator on the forward operator's device, with none of its arguments and no engine."""
        operator = op(op_type, inputs, outputs, arg=arguments)
        operator.is_gradient_op = True
        return _placed(operator, self.definition)

    def single(
        self, op_type: str, inputs: Sequence[str], of_inputs: Sequence[int], **arguments: ArgumentValue
    ) -> GradientOperators:
        """One gradient operator, whose outputs are the gradients of the inputs `of_inputs`, in that order."""
        operator = self.operator(op_type, inputs, [self.dx(index) for index in of_inputs], **arguments)
        return self.result([operator], {index: self.dx(index) for index in of_inputs})

    def _blob(self, kind: str, names: Sequence[str], index: int) -> str:
        if index >= len(names):
            raise GradientError(f"{self.label}: its gradient needs {kind} {index}, and it has only {len(names)}")
        return names[index]

    def result(self, operators: Sequence[OperatorDef], gradients: dict[int, Gradient]) -> GradientOperators:
        """What a maker returns: its operators, and the gradients by index of the input."""
        inputs = tuple(gradients.get(index) for index in range(len(self.definition.input)))
        return GradientOperators((*self._fills, *operators), inputs)


Maker = Callable[[GradientRequest], GradientOperators]

_makers: dict[str, Maker | None] = {}
_refusals: dict[str, str] = {}


def gradient_of(*op_types: str) -> Callable[[Maker], Maker]:
    """Decorator: this maker serves these operator types. Raises GradientError when one of them has a maker already."""

    def register(maker: Maker) -> Maker:
        for op_type in op_types:
            _check_free(op_type)
            _makers[op_type] = maker
        return maker

    return register


def gradient_by(
    forward: str, op_type: str, reads: Sequence[str], *, of_inputs: Sequence[int] = (0,), **arguments: ArgumentValue
) -> None:
    """One operator of type `op_type` gives the gradients of the inputs `of_inputs` of `forward`, in that order.

    `reads` are its inputs: of the forward operator inputs (X, or X0, X1, ...) and outputs (Y), and gradients of outputs
    (dY). `arguments` replace those of the forward operator. Raises GradientError when `forward` has a maker already.
    """
    named = [(name.rstrip(digits), int(name.lstrip("dXY") or 0)) for name in reads]

    def maker(request: GradientRequest) -> GradientOperators:
        blobs = {"X": request.x, "Y": request.y, "dY": request.dy}
        inputs = [blobs[kind](index) for kind, index in named]
        return request.single(op_type, inputs, of_inputs, **arguments)

    gradient_of(forward)(maker)


def no_gradient(*op_types: str) -> None:
    """These operators pass on no gradient to any of their inputs: comparisons, shapes, fillers, StopGradient."""
    for op_type in op_types:
        _check_free(op_type)
        _makers[op_type] = None


def not_differentiable(reason: str, *op_types: str) -> None:
    """Requesting a gradient through these operators is an error, with this `reason`."""
    for op_type in op_types:
        _check_free(op_type)
        _refusals[op_type] = reason


def has_maker(op_type: str) -> bool:
    """True when gradients pass through operators of this type."""
    load_gradient(op_type)
    return _makers.get(op_type) is not None


def stops_gradients(op_type: str) -> bool:
    """True when operators of this type are known to pass on no gradient."""
    load_gradient(op_type)
    return op_type in _makers and _makers[op_type] is None


def gradient(
    definition: OperatorDef,
    output_gradients: Sequence[Gradient | None],
    *,
    wanted: Collection[int] | None = None,
    label: str = "",
) -> GradientOperators:
    """The gradient operators of `definition`, given the gradients of its outputs, one entry an output.

    `wanted` are the inputs whose gradients are requested, by default all. Raises GradientError for an operator that has
    no maker or no gradient, and for a number of gradients that is not that of the outputs.
    """
    label = label or operator_label(definition, -1)
    if len(output_gradients) != len(definition.output):
        raise GradientError(
            f"{label}: expected a gradient, or None, for each of {len(definition.output)} outputs, "
            f"found {len(output_gradients)}"
        )
    refusal = _refusal(definition.type)
    if refusal is not None:
        raise GradientError(f"{label}: {definition.type} has no gradient: {refusal}")
    if definition.type not in _makers:
        raise GradientError(f"{label}: no gradient maker is registered for {definition.type}")
    maker = _makers[definition.type]
    nothing = GradientOperators((), (None,) * len(definition.input))
    if maker is None or not has_gradient(definition, output_gradients):
        return nothing
    indices = frozenset(range(len(definition.input)) if wanted is None else wanted)
    if not indices:
        return nothing
    return maker(GradientRequest(definition, tuple(output_gradients), indices, label, arguments_of(definition, label)))


def has_gradient(definition: OperatorDef, output_gradients: Sequence[object | None]) -> bool:
    """True when an output has a gradient; for an operator without outputs, when it has a maker."""
    if not definition.output:
        return has_maker(definition.type)
    return any(output_gradient is not None for output_gradient in output_gradients)


def fill_like(source: str, target: str, value: float) -> OperatorDef:
    """The operator that fills `target` with `value`, in the shape and the element type of `source`."""
    return op("ConstantFill", [source], [target], value=float(value), input_type=1)


def _placed(made: OperatorDef, forward: OperatorDef) -> OperatorDef:
    if forward.HasField("device_option"):
        made.device_option.CopyFrom(forward.device_option)
    return made


def _refusal(op_type: str) -> str | None:
    """Why an operator has no gradient; that of a gradient operator would be a second derivative."""
    load_gradient(op_type)
    if op_type in _refusals:
        return _refusals[op_type]
    forward = op_type.removesuffix("Gradient").removesuffix("Grad")
    if forward != op_type and op_type not in _makers and has_maker(forward):
        return f"it is the gradient of {forward}, and there are no second derivatives"
    return None


def _check_free(op_type: str) -> None:
    if op_type in _makers or op_type in _refusals:
        raise GradientError(f"operator type {op_type!r} already has a gradient maker")
