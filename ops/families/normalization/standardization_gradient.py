"""The gradients of InstanceNorm, GroupNorm and LayerNorm.

With x^ = (X - mean) / deviation and g = dY * scale, over a group of m elements

    dX = (g - sum(g) / m - x^ * sum(g * x^) / m) / deviation

and dscale, dbias are the sums of dY * x^ and of dY over all that an element of scale and bias serves. Mean and
deviation are computed again when the forward operator did not keep them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from dagexec.core.dtypes import FLOAT_TYPES
from dagexec.core.gradient import GradientOperators, GradientRequest, gradient_of, not_differentiable
from dagexec.core.operator import Operator, Step, in_sequence
from dagexec.core.registry import declares, schema_of
from dagexec.core.rows import before_axis, gradient_and_sums
from dagexec.core.rows_call import RowsCall
from dagexec.core.schema import InplaceRule, OperatorCall, OpSchema, TensorType, memory_cost, no_inplace
from dagexec.core.traits import Rows
from dagexec.ops.base.blocks import BLOCK, Array, Scratch, compute_dtype, convert, is_narrow, row_pieces
from dagexec.ops.base.passes import scalar_pass
from dagexec.ops.families.normalization.local_response import epsilon_of, require_channel_parameters
from dagexec.ops.families.normalization.standardization import (
    Grouping,
    first_normalized,
    group_grouping,
    instance_grouping,
    layer_grouping,
)
from dagexec.platform.records import dataclass


@dataclass(frozen=True, slots=True)
class GradientInputs:
    """Which input of a gradient operator is what; None for what is not given.

    `deviation` is the inverse one but for LayerNorm.
    """

    x: int
    dy: int
    scale: int | None
    bias: int | None
    mean: int | None
    deviation: int | None


InputsOf = Callable[[int], GradientInputs | None]
"""What the inputs are, for their number; None when there cannot be so many."""


def instance_inputs(count: int) -> GradientInputs | None:
    """X, scale, bias, dY, [mean, inv_std]."""
    found = {4: GradientInputs(0, 3, 1, 2, None, None), 6: GradientInputs(0, 3, 1, 2, 4, 5)}
    return found.get(count)


def group_inputs(count: int) -> GradientInputs | None:
    """dY, X, gamma, beta, [mean, inv_std]."""
    found = {4: GradientInputs(1, 0, 2, 3, None, None), 6: GradientInputs(1, 0, 2, 3, 4, 5)}
    return found.get(count)


def layer_inputs(count: int) -> GradientInputs | None:
    """dY, Y, mean, std, X, [gamma, [beta]]; or dY, X, [gamma, [beta]]."""
    found = {
        2: GradientInputs(1, 0, None, None, None, None),
        4: GradientInputs(1, 0, 2, 3, None, None),
        3: GradientInputs(1, 0, 2, None, None, None),
        5: GradientInputs(4, 0, None, None, 2, 3),
        6: GradientInputs(4, 0, 5, None, 2, 3),
        7: GradientInputs(4, 0, 5, 6, 2, 3),
    }
    return found.get(count)


def seen_from_x(call: OperatorCall, x: int) -> OperatorCall:
    """The call as groupings see it: X is its first input."""
    return OperatorCall(call.definition, call.arguments, (call.inputs[x],), (None,), call.label)


def infer_gradient(inputs_of: InputsOf, grouping: Callable[[OperatorCall], Grouping]) -> InferGradient:
    """dX has the type of X, dscale and dbias that of the scale."""

    def infer(call: OperatorCall) -> list[TensorType]:
        roles = inputs_of(len(call.inputs))
        if roles is None:
            raise call.fail(f"wrong number of inputs, {len(call.inputs)}: {inputs_of.__doc__}")
        kind = call.inputs[roles.x]
        call.require_types(roles.x, *FLOAT_TYPES)
        call.require_same_type(roles.x, roles.dy)
        call.require_shape(roles.dy, kind.shape, "the shape of X")
        epsilon_of(call)
        groups = grouping(seen_from_x(call, roles.x))
        for index in (roles.mean, roles.deviation):
            if index is not None:
                call.require_shape(index, groups.statistics, "one element a group")
                call.require_same_type(roles.x, index)
        results = [kind]
        if roles.scale is not None:
            given = tuple(index for index in (roles.scale, roles.bias) if index is not None)
            _require_affine(call, given, groups, grouping is layer_grouping)
            results += [call.inputs[roles.scale]] * 2
        if len(call.definition.output) != len(results):
            raise call.fail(f"expected {len(results)} outputs, found {len(call.definition.output)}")
        return results

    return infer


InferGradient = Callable[[OperatorCall], list[TensorType]]


def _require_affine(call: OperatorCall, given: tuple[int, ...], groups: Grouping, whole: bool) -> None:
    """Raise ShapeError unless scale and bias, the inputs `given`, have as many elements as the grouping says.

    `whole` is for LayerNorm.
    """
    count = int(np.prod(groups.affine, dtype=np.int64))
    if not whole:
        require_channel_parameters(call, given, count)
        return
    for index in given:
        if call.inputs[index].elements != count:
            name = call.definition.input[index]
            raise call.fail(f"input {name!r} must have {count} elements, found shape {call.inputs[index].shape}")


class _StandardizeGradient(Operator):
    """Base: what inputs and groups are, a class says.

    Attributes:
        inverse: the deviation that is given is the inverse one.
    """

    inverse = True

    @abstractmethod
    def roles(self) -> GradientInputs:
        """What each input is."""

    @abstractmethod
    def grouping(self, call: OperatorCall) -> Grouping:
        """What a group is."""

    def prepare(self) -> Step:
        """Piece by piece of the batch; dscale and dbias are added up in float64."""
        call, roles = self.call(), self.roles()
        groups = self.grouping(seen_from_x(call, roles.x))
        x, dy, dx = self.x(roles.x), self.x(roles.dy), self.y(0)
        affine = [self.y(index) for index in range(1, len(self.output_blobs))]
        if x.size == 0:
            return in_sequence([partial(result.fill, 0) for result in affine])
        work = compute_dtype(x.dtype)
        batch = groups.view[0]
        count = min(batch, max(1, BLOCK // int(np.prod(groups.view[1:]))))
        memory = Scratch(self, count * int(np.prod(groups.view[1:])), work)
        small = Scratch(self, count * int(np.prod(groups.reduced[1:])), work)
        totals = [self.scratch(groups.affine, np.float64) for _ in affine]
        part = self.scratch(groups.affine, work) if affine else None
        steps: list[Step] = [partial(total.fill, 0) for total in totals]
        for piece in row_pieces(batch, count):
            source, gradient, target = (array.reshape(groups.view)[piece] for array in (x, dy, dx))
            shape = source.shape
            given, out = gradient, target
            if is_narrow(x.dtype):
                given, out = memory(3, shape), memory(4, shape)
                steps += [convert(source, memory(4, shape)), convert(gradient, given)]
                source = memory(4, shape)
            normal, product = memory(0, shape), memory(1, shape)
            mean, inverse = (small(index, (len(source), *groups.reduced[1:])) for index in range(2))
            steps += self._statistics(groups, piece, source, product, mean, inverse)
            steps += [
                partial(np.subtract, source, mean, out=normal),
                partial(np.multiply, normal, inverse, out=normal),
            ]
            if part is not None:
                steps += self._affine_sums(groups, given, normal, product, part, totals)
            steps += self._passes(groups, given, normal, (product, memory(2, shape)), inverse, small, out)
            if out is not target:
                steps.append(convert(out, target))
        steps += [convert(total.reshape(result.shape), result) for total, result in zip(totals, affine, strict=True)]
        return in_sequence(steps)

    def _statistics(
        self, groups: Grouping, piece: slice, x: Array, squares: Array, mean: Array, inverse: Array
    ) -> list[Step]:
        """The steps that write mean and inverse deviation of the groups of a piece."""
        roles = self.roles()
        if roles.mean is not None and roles.deviation is not None:
            kept = [self.x(index).reshape(groups.reduced)[piece] for index in (roles.mean, roles.deviation)]
            steps: list[Step] = [convert(kept[0], mean), convert(kept[1], inverse)]
            return steps if self.inverse else [*steps, partial(np.reciprocal, inverse, out=inverse)]
        return [
            partial(np.add.reduce, x, axis=groups.axes, keepdims=True, out=mean),
            scalar_pass(np.divide, mean, groups.members, mean),
            partial(np.subtract, x, mean, out=squares),
            partial(np.square, squares, out=squares),
            partial(np.add.reduce, squares, axis=groups.axes, keepdims=True, out=inverse),
            scalar_pass(np.divide, inverse, groups.members, inverse),
            scalar_pass(np.add, inverse, self.arguments.float("epsilon", 1e-5), inverse),
            partial(np.sqrt, inverse, out=inverse),
            partial(np.reciprocal, inverse, out=inverse),
        ]

    def _affine_sums(
        self, groups: Grouping, dy: Array, normal: Array, product: Array, part: Array, totals: list[Array]
    ) -> list[Step]:
        """The steps that add a piece's part to dscale and dbias."""
        rank = len(groups.view)
        own = [axis for axis in range(rank) if rank - axis <= len(groups.affine)]
        kept = {axis for axis, size in zip(own, groups.affine, strict=True) if size == groups.view[axis]}
        summed = tuple(axis for axis in range(rank) if axis not in kept)
        vector = part.reshape([groups.view[axis] for axis in sorted(kept)])
        steps: list[Step] = [partial(np.multiply, dy, normal, out=product)]
        for terms, total in ((product, totals[0]), (dy, totals[1])):
            steps += [partial(np.add.reduce, terms, axis=summed, out=vector), partial(np.add, total, part, out=total)]
        return steps

    def _passes(
        self,
        groups: Grouping,
        dy: Array,
        normal: Array,
        memory: tuple[Array, Array],
        inverse: Array,
        small: Scratch,
        dx: Array,
    ) -> list[Step]:
        """The steps that write dX of a piece; `normal` and `memory` are overwritten."""
        product, scaled = memory
        steps: list[Step] = []
        scale = self.roles().scale
        gradient = dy
        if scale is not None:
            steps.append(partial(np.multiply, dy, self.x(scale).reshape(groups.affine), out=scaled))
            gradient = scaled
        mean, slope = small(2, inverse.shape), small(3, inverse.shape)
        return [
            *steps,
            partial(np.add.reduce, gradient, axis=groups.axes, keepdims=True, out=mean),
            scalar_pass(np.divide, mean, groups.members, mean),
            partial(np.multiply, gradient, normal, out=product),
            partial(np.add.reduce, product, axis=groups.axes, keepdims=True, out=slope),
            scalar_pass(np.divide, slope, groups.members, slope),
            partial(np.multiply, normal, slope, out=normal),
            partial(np.add, normal, mean, out=normal),
            partial(np.subtract, gradient, normal, out=normal),
            partial(np.multiply, normal, inverse, out=dx),
        ]


@declares
def _operator(
    forward: str,
    inputs_of: InputsOf,
    grouping: Callable[[OperatorCall], Grouping],
    inputs: tuple[str, ...],
    outputs: tuple[int, int],
    inplace: InplaceRule = no_inplace,
) -> OpSchema:
    def rows(asked: RowsCall) -> Sequence[Rows | None]:
        roles = _found(inputs_of(len(asked.rows)))
        own = [index for index in range(len(asked.rows)) if index not in (roles.scale, roles.bias)]
        return gradient_and_sums(before_axis(first_normalized if grouping is layer_grouping else _one, *own))(asked)

    return OpSchema(
        f"{forward}Gradient",
        inputs=(min(4, len(inputs)) if outputs[0] == 3 else 2, len(inputs)),
        outputs=outputs,
        infer=infer_gradient(inputs_of, grouping),
        doc=f"The gradient of {forward}. The inputs are {inputs_of.__doc__}",
        input_names=inputs,
        output_names=("dX", "dscale", "dbias"),
        args=schema_of(forward).args,
        inplace=inplace,
        cost=lambda call, outputs: memory_cost(call, outputs, 14),
        rows=rows,
    )


def _one(_call: OperatorCall) -> int:
    return 1


def _found(roles: GradientInputs | None) -> GradientInputs:
    assert roles is not None  # inference has seen to it
    return roles


@_operator(
    "InstanceNorm",
    instance_inputs,
    instance_grouping,
    ("X", "scale", "bias", "dY", "mean", "inv_std"),
    (3, 3),
    lambda source, target: (source, target) == (3, 0),
)
class InstanceNormGradient(_StandardizeGradient):
    """The gradient of instance normalization."""

    def roles(self) -> GradientInputs:
        return _found(instance_inputs(len(self.input_blobs)))

    def grouping(self, call: OperatorCall) -> Grouping:
        return instance_grouping(call)


@_operator("GroupNorm", group_inputs, group_grouping, ("dY", "X", "gamma", "beta", "mean", "inv_std"), (3, 3))
class GroupNormGradient(_StandardizeGradient):
    """The gradient of group normalization."""

    def roles(self) -> GradientInputs:
        return _found(group_inputs(len(self.input_blobs)))

    def grouping(self, call: OperatorCall) -> Grouping:
        return group_grouping(call)


@_operator(
    "LayerNorm", layer_inputs, layer_grouping, ("dY", "Y (not read)", "mean", "std", "X", "gamma", "beta"), (1, 3)
)
class LayerNormGradient(_StandardizeGradient):
    """The gradient of layer normalization."""

    inverse = False

    def roles(self) -> GradientInputs:
        return _found(layer_inputs(len(self.input_blobs)))

    def grouping(self, call: OperatorCall) -> Grouping:
        return layer_grouping(call)


def _kept(request: GradientRequest) -> list[str]:
    """The outputs that hold mean and deviation, when both are there."""
    return [request.y(1), request.y(2)] if request.has_y(2) else []


@gradient_of("InstanceNorm")
def instance_norm_gradient(request: GradientRequest) -> GradientOperators:
    """InstanceNormGradient(X, scale, bias, dY, [mean, inv_std]) -> dX, dscale, dbias."""
    request.require_no_dy(1, 2)
    return request.single(
        "InstanceNormGradient", [*request.definition.input, request.dy(0), *_kept(request)], [0, 1, 2]
    )


@gradient_of("GroupNorm")
def group_norm_gradient(request: GradientRequest) -> GradientOperators:
    """GroupNormGradient(dY, X, gamma, beta, [mean, inv_std]) -> dX, dgamma, dbeta."""
    request.require_no_dy(1, 2)
    return request.single("GroupNormGradient", [request.dy(0), *request.definition.input, *_kept(request)], [0, 1, 2])


not_differentiable("train with LayerNorm", "C10LayerNorm_DontUseThisOpYet")


@gradient_of("LayerNorm")
def layer_norm_gradient(request: GradientRequest) -> GradientOperators:
    """LayerNormGradient(dY, Y, mean, std, X, [gamma]) -> dX, [dgamma, dbeta], as Caffe2's.

    X stands in the place of Y, which is not read, so that Y may be overwritten.
    """
    request.require_no_dy(1, 2)
    kept = _kept(request)
    given = [request.x(0), *kept] if kept else []
    count = len(request.definition.input)
    return request.single("LayerNormGradient", [request.dy(0), *given, *request.definition.input[:2]], range(count))
