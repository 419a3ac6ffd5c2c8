"""Gradients of the pointwise operators: dX from dY and from Y or X, each element on its own.

A class says how a piece is computed (`passes`); `pointwise_gradient` gives it its schema, registers it, and registers
the maker of the forward operator's gradient. The classes are in `activation_gradient` and `unary_gradient`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, TypeVar

from dagexec.core.dtypes import FLOAT_TYPES
from dagexec.core.gradient import gradient_by
from dagexec.core.operator import Operator, Step
from dagexec.core.registry import operator, operator_class
from dagexec.core.rows import elementwise
from dagexec.core.schema import Cost, OperatorCall, OpSchema, TensorType, memory_cost
from dagexec.ops.base.blocks import Array, Scratch
from dagexec.ops.base.broadcast_reduction import reduced
from dagexec.ops.base.pointwise import Check, Pointwise

DY = "dY"


class PointwiseGradient(Operator):
    """Base of the gradients of pointwise operators.

    Attributes:
        constants: the float arguments, by name, with their defaults.
        reads: what the inputs are, in order: X, Y and dY.
    """

    constants: ClassVar[Mapping[str, float]] = {}
    reads: ClassVar[tuple[str, ...]]

    def prepare(self) -> Step:
        """The passes over the whole tensor, cut into pieces when there are several."""
        gradient = self.reads.index(DY)
        value = next(index for index in range(len(self.reads)) if index != gradient)
        sources = [self.x(value).reshape(-1), self.x(gradient).reshape(-1)]
        target = self.y(0).reshape(-1)
        return reduced(self, target.shape, sources, target, self._passes)

    def constant(self, name: str) -> float:
        """The value of float argument `name`."""
        return self.arguments.float(name, self.constants[name])

    @abstractmethod
    def passes(self, value: Array, dy: Array, dx: Array, scratch: Scratch) -> list[Step]:
        """The NumPy calls that compute `dx` from `dy` and the first of X and Y among the inputs.

        `dx` may be the same array as `dy`.
        """

    def _passes(self, pieces: Sequence[Array], dx: Array, scratch: Scratch) -> list[Step]:
        value, dy = pieces
        return self.passes(value, dy, dx, scratch)


GradientClass = TypeVar("GradientClass", bound=type[PointwiseGradient])


def pointwise_gradient(
    forward: str,
    reads: tuple[str, ...],
    doc: str,
    *,
    flops: float = 2.0,
    check: Check | None = None,
    has_maker: bool = True,
) -> Callable[[GradientClass], GradientClass]:
    """Class decorator: register a PointwiseGradient class as the gradient operator of operator `forward`.

    Its arguments are that operator's. `reads` says what its inputs are (see PointwiseGradient), `flops` the work of an
    element; `check` raises ArgumentError for invalid arguments, by default as the operator's does.
    `has_maker`: the maker just names these inputs.
    """
    gradient = reads.index(DY)

    def register(cls: GradientClass) -> GradientClass:
        cpu = operator_class(forward)
        assert issubclass(cpu, Pointwise)
        cls.reads, cls.constants = reads, cpu.constants
        refuse = check or cpu.check

        def infer(call: OperatorCall) -> list[TensorType]:
            call.require_types(0, *FLOAT_TYPES)
            call.require_same_type()
            for index in range(1, len(reads)):
                call.require_shape(index, call.inputs[0].shape, f"that of {reads[0]}")
            for constant, default in cls.constants.items():
                call.arguments.float(constant, default)
            if refuse is not None:
                refuse(call)
            return [call.inputs[gradient]]

        def cost(call: OperatorCall, outputs: Sequence[TensorType]) -> Cost:
            return memory_cost(call, outputs, flops)

        schema = OpSchema(
            f"{forward}Gradient",
            infer=infer,
            doc=doc,
            input_names=reads,
            output_names=("dX",),
            args=cpu.schema.args,
            inplace=lambda source, target: source == gradient and target == 0,
            cost=cost,
            rows=elementwise,
        )
        operator(schema)(cls)
        if has_maker:
            gradient_by(forward, f"{forward}Gradient", reads)
        return cls

    return register
