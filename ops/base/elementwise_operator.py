"""Element-wise operators of one input, and their gradients, from one function each; see `expressed`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dagexec.core.arguments import Arguments
from dagexec.core.dtypes import FLOAT_TYPES, TypeMeta
from dagexec.core.expressions import inputs_of
from dagexec.core.gradient import gradient_by
from dagexec.core.onnx_name import OnnxName
from dagexec.core.operator import Step
from dagexec.core.registry import operator
from dagexec.core.rows import elementwise
from dagexec.core.schema import Cost, InplaceRule, OperatorCall, OpSchema, TensorType, memory_cost, one_to_one
from dagexec.core.traits import ImageRole, PostOpsRule
from dagexec.ops.base.blocks import Array, Index, Scratch, blockwise
from dagexec.ops.base.broadcast_reduction import reduced
from dagexec.ops.base.expressed import (
    DY,
    Check,
    Definition,
    Expressed,
    Function,
    GradientDefinition,
    expression_of,
    flops_by_default,
)
from dagexec.ops.base.expression_steps import EXACT, expression_steps


class Elementwise(Expressed):
    """Base: Y from X."""

    def prepare(self) -> Step:
        """The calls over the whole tensor, cut into pieces when there are several."""
        x, y, expression = self.x(0), self.y(0), self.expression()
        if x.flags.c_contiguous and y.flags.c_contiguous:
            x, y = x.reshape(-1), y.reshape(-1)

        def passes(_index: Index, source: Array, target: Array, scratch: Scratch) -> list[Step]:
            return expression_steps([expression], {0: source}, [target], scratch)

        return blockwise(self, x, y, passes)


class ElementwiseGradient(Expressed):
    """Base: dX from dY and from X or Y."""

    def prepare(self) -> Step:
        """The same."""
        expression = self.expression()
        positions = inputs_of(expression)
        sources, target = [self.x(position).reshape(-1) for position in positions], self.y(0).reshape(-1)

        def passes(pieces: Sequence[Array], dx: Array, scratch: Scratch) -> list[Step]:
            return expression_steps([expression], dict(zip(positions, pieces, strict=True)), [dx], scratch)

        return reduced(self, target.shape, sources, target, passes)


def elementwise_operator(
    name: str,
    args: Mapping[str, str] | None = None,
    *,
    gradient: tuple[str, ...] = (),
    slope: Function | None = None,
    metas: tuple[TypeMeta, ...] = FLOAT_TYPES,
    inplace: InplaceRule = one_to_one,
    check: Check | None = None,
    check_gradient: Check | None = None,
    onnx: OnnxName | None = None,
    post_ops: Sequence[str] | PostOpsRule = (),
    has_maker: bool = True,
    **traits: Any,
) -> Callable[[Function], Function]:
    """Decorator: register a function of an element as operator `name`, for all engines.

    `args` is the help text of each argument, `metas` the element types it takes; `check` raises ArgumentError for
    arguments that make no sense, before anything runs; `onnx` is the ONNX operator that it is. `post_ops` is what it is
    as post-ops, with its arguments by name, such as "elu:{alpha}", or a rule; `traits` are further attributes of its
    schema. `gradient` names what operator `nameGradient` reads, in order, of X, Y and dY: with Y in place of X it is
    derived from the result, and the operator may run in place. `slope` is the derivative from X, or Y, where the
    derived one loses accuracy or is not wanted; `check_gradient` is its check, if it is another. Without `has_maker`
    the maker is registered elsewhere.
    """

    def register(function: Function) -> Function:
        forward = Definition(function)
        _register(
            name,
            Elementwise,
            forward,
            args or {},
            metas,
            check,
            doc=forward.doc,
            input_names=("X",),
            inplace=inplace,
            onnx=() if onnx is None else (onnx,),
            expression=lambda call: expression_of(forward, call.arguments, call.inputs[0].meta),
            post_ops=post_ops if callable(post_ops) else _written_with(forward, post_ops),
            **{"formula": forward.formula(), "image_role": ImageRole.ELEMENTWISE, **traits},
        )
        if gradient:
            position = gradient.index(DY)
            derived = GradientDefinition(forward, gradient, slope)
            _register(
                f"{name}Gradient",
                ElementwiseGradient,
                derived,
                args or {},
                FLOAT_TYPES,
                check_gradient or check,
                doc=f"dX, the gradient of {name}, from {' and '.join(gradient)}.",
                input_names=gradient,
                inplace=lambda source, target: source == position and target == 0,
                rows=elementwise,
            )
            if has_maker:
                gradient_by(name, f"{name}Gradient", gradient)
        return function

    return register


def _register(
    name: str,
    base: type[Expressed],
    definition: Definition | GradientDefinition,
    args: Mapping[str, str],
    metas: tuple[TypeMeta, ...],
    check: Check | None,
    **fields: Any,
) -> None:
    forward = definition if isinstance(definition, Definition) else definition.forward
    names = fields["input_names"]
    typed = names.index(DY) if DY in names else 0
    flops = flops_by_default(definition)

    def infer(call: OperatorCall) -> list[TensorType]:
        call.require_types(0, *metas)
        if len(names) > 1:
            call.require_same_type()
        for position in range(1, len(names)):
            call.require_shape(position, call.inputs[0].shape, f"that of {names[0]}")
        forward.read(call.arguments)
        if check is not None:
            check(call)
        return [call.inputs[typed]]

    def cost(call: OperatorCall, outputs: Sequence[TensorType]) -> Cost:
        return memory_cost(call, outputs, flops)

    output = "dX" if DY in names else "Y"
    schema = OpSchema(name, infer=infer, output_names=(output,), args=args, cost=cost, **fields)
    is_exact = isinstance(definition, Definition) and _is_exact(definition)
    members = {
        "formula": definition,
        "reads_strided": is_exact,
        "writes_strided": is_exact,
        "__doc__": fields["doc"],
        "__module__": forward.function.__module__,
    }
    operator(schema)(type(name, (base,), members))


def _is_exact(forward: Definition) -> bool:
    """It is one function whose results do not depend on strides."""
    result = forward.result(forward.defaults, FLOAT_TYPES[0])
    return result.kind in EXACT and not result.operands[0].operands


def _written_with(forward: Definition, entries: Sequence[str]) -> PostOpsRule | None:
    """The rule that writes the values of arguments in `entries`; None for no entries."""
    if not entries:
        return None

    def rule(arguments: Arguments, _meta: TypeMeta, _count: int) -> Sequence[str]:
        values = {name: repr(value) for name, value in forward.read(arguments).items()}
        return [entry.format(**values) for entry in entries]

    return rule
