"""Shape operators: the same elements under another shape or in another order, and what a shape is.

Those that keep the order of the elements (Reshape, Flatten, Squeeze, ...) are views: the net may let the output share
the input's storage, and then there is nothing to do. `dagexec.ops.families.shape.concat` joins and splits tensors,
`dagexec.ops.families.shape.slicing` takes parts and repeats them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import methodcaller
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.core.dtypes import INT64
from dagexec.core.onnx_name import OnnxName
from dagexec.core.operator import Operator, Step, in_sequence, nothing_to_do
from dagexec.core.registry import declares, new_operator
from dagexec.core.rows import first_axis, permuted, reshaped
from dagexec.core.schema import Cost, OperatorCall, OpSchema, TensorType, first_to_first, memory_cost, same_as_input
from dagexec.core.shapes import element_count
from dagexec.core.tensor import Tensor
from dagexec.core.traits import Crossing, ImageRole, gives_back
from dagexec.ops.base.copied_view import CopiedView, Viewing
from dagexec.ops.base.integers import given_axes, integers_of

Array = npt.NDArray[Any]


def copy_cost(call: OperatorCall, outputs: Sequence[TensorType]) -> Cost:
    """Bytes moved, and no arithmetic: of the first input no more is read than is written."""
    cost = memory_cost(call, outputs, 0.0)
    first = call.inputs[0].nbytes if call.inputs else 0
    return Cost(0, cost.bytes_read - max(0, first - cost.bytes_written), cost.bytes_written)


def no_cost(_call: OperatorCall, _outputs: Sequence[TensorType]) -> Cost:
    """What a view costs: nothing moves."""
    return Cost(0, 0, 0)


def named_axes(call: OperatorCall, name: str, rank: int) -> tuple[int, ...]:
    """Argument `name` as axes of a tensor of `rank` axes, as often as they are named; negative counts from the end.

    Raises ShapeError for an axis out of range.
    """
    axes = call.arguments.ints(name)
    for axis in axes:
        if not -rank <= axis < rank:
            raise call.fail(f"argument {name!r} must hold axes in [{-rank}, {rank - 1}], found {axis}")
    return tuple(axis % rank for axis in axes)


def distinct_axes(call: OperatorCall, name: str, rank: int) -> tuple[int, ...]:
    """As `named_axes`, and a ShapeError for an axis that is named twice."""
    found = named_axes(call, name, rank)
    if len(set(found)) != len(found):
        raise call.fail(f"argument {name!r} must name each axis once, found {call.arguments.ints(name)}")
    return found


def view_step(x: Array, y: Array) -> Step:
    """A step that puts the elements of `x` into `y` in their order: nothing to do when they share memory."""
    if x.size == 0 or (x.flags.c_contiguous and np.may_share_memory(x, y)):
        return nothing_to_do
    return partial(np.copyto, y.reshape(x.shape), x)


class View(Operator):
    """An operator whose output 0 holds the elements of input 0 in the same order."""

    reads_strided = True

    def prepare(self) -> Step:
        """Nothing to do where output and input share memory, one copy where not."""
        return view_step(self.x(0), self.y(0))


@declares
def view_operator(
    name: str,
    infer: Callable[[OperatorCall], Sequence[TensorType]],
    doc: str,
    args: dict[str, str] | None = None,
    onnx: tuple[OnnxName, ...] = (),
    optional: tuple[str, ...] = (),
    **traits: Any,
) -> OpSchema:
    """The schema of a view with one output; in place is allowed. `traits` are further attributes.

    Its input is X, and there may be `optional` ones, whose values decide the shape.
    """
    return OpSchema(
        name,
        infer=infer,
        doc=doc,
        inputs=(1, 1 + len(optional)),
        input_names=("X", *optional),
        value_inputs=tuple(range(1, 1 + len(optional))),
        output_names=("Y",),
        args=args or {},
        inplace=first_to_first,
        cost=no_cost,
        view=True,
        onnx=onnx,
        moves_elements=True,
        **{"rows": reshaped, **traits},
    )


def infer_reshape(call: OperatorCall) -> list[TensorType]:
    """The new shape with 0 and -1 resolved, and for the second output a vector of the old rank."""
    shape, meta = call.inputs[0].shape, call.inputs[0].meta
    if len(call.inputs) == 2 and "shape" in call.arguments:
        raise call.fail("the new shape is given by both an input and the argument 'shape'; expected only one of them")
    if len(call.inputs) == 1 and "shape" not in call.arguments:
        raise call.fail("the new shape is missing: give the argument 'shape' or a second input")
    wanted = integers_of(call, 1) if len(call.inputs) == 2 else tuple(call.arguments.ints("shape"))
    types = [TensorType(_resolve(call, shape, wanted), meta)]
    return types if len(call.definition.output) == 1 else [*types, TensorType((len(shape),), INT64)]


def _resolve(call: OperatorCall, shape: tuple[int, ...], wanted: tuple[int, ...]) -> tuple[int, ...]:
    keep_zero = call.arguments.bool("allow_zero")
    sizes = []
    for position, size in enumerate(wanted):
        if size == 0 and not keep_zero:
            if position >= len(shape):
                raise call.fail(f"new shape {wanted} copies axis {position}, which the input does not have")
            sizes.append(shape[position])
        elif size >= -1:
            sizes.append(size)
        else:
            raise call.fail(f"new shape {wanted} has the size {size}; expected -1, 0 or a size")
    if sizes.count(-1) > 1:
        raise call.fail(f"new shape {wanted} has more than one -1")
    total = element_count(shape)
    if -1 in sizes:
        known = element_count(tuple(size for size in sizes if size != -1))
        if known == 0 or total % known:
            raise call.fail(
                f"new shape {wanted}: -1 cannot be resolved: {total} elements are not a multiple of {known}"
            )
        sizes[sizes.index(-1)] = total // known
    if element_count(tuple(sizes)) != total:
        raise call.fail(f"new shape {wanted} has {element_count(tuple(sizes))} elements, the input has {total}")
    return tuple(sizes)


@new_operator(
    "Reshape",
    inputs=(1, 2),
    outputs=(1, 2),
    infer=infer_reshape,
    doc=(
        "The elements of X, in order, under a new shape. A size 0 copies X's size at that place; one size may be "
        "-1 and is what remains. The shape is the argument or the second input. old_shape is X's shape."
    ),
    input_names=("X", "new_shape"),
    output_names=("reshaped", "old_shape"),
    args={
        "shape": "the new shape, when there is no second input",
        "allow_zero": "1: a size 0 is a size, not a copy (ONNX allowzero; default 0)",
    },
    inplace=first_to_first,
    cost=no_cost,
    value_inputs=(1,),
    view=True,
    results=1,
    moves_elements=True,
    rows=reshaped,
)
class Reshape(Operator):
    """New shape, same elements."""

    reads_strided = True

    def prepare(self) -> Step:
        """A view, and the old shape written out when it is requested."""
        move = view_step(self.x(0), self.y(0))
        if len(self.output_blobs) == 1:
            return move
        return in_sequence([move, partial(np.copyto, self.y(1), np.array(self.old_shape, np.int64))])


def infer_flatten(call: OperatorCall) -> list[TensorType]:
    """Two axes: the product of the sizes before `axis`, and of those from it on."""
    shape = call.inputs[0].shape
    axis = call.axis("axis", 1, len(shape), end=True)
    return [TensorType((element_count(shape[:axis]), element_count(shape[axis:])), call.inputs[0].meta)]


@view_operator(
    "Flatten",
    infer_flatten,
    "X as a matrix: axes before `axis` make the rows, the others the columns.",
    {"axis": "the first axis of the columns, up to the rank of X (default 1)"},
    onnx=(OnnxName("Flatten", 25, {"axis": "axis"}),),
)
class Flatten(View):
    """A matrix of the same elements."""


def infer_flatten_to_vec(call: OperatorCall) -> list[TensorType]:
    """One axis of all elements."""
    return [TensorType((call.inputs[0].elements,), call.inputs[0].meta)]


@view_operator("FlattenToVec", infer_flatten_to_vec, "The elements of X as a vector.")
class FlattenToVec(View):
    """A vector of the same elements."""


def infer_prepend_dim(call: OperatorCall) -> list[TensorType]:
    """A new first axis, by which the size of the old one is divided."""
    shape, size = call.inputs[0].shape, call.arguments.int("dim_size", 0)
    if not shape or size < 1 or shape[0] % size:
        raise call.fail(f"argument 'dim_size' must divide the first of the sizes {list(shape)}, found {size}")
    return [TensorType((size, shape[0] // size, *shape[1:]), call.inputs[0].meta)]


@view_operator(
    "PrependDim",
    infer_prepend_dim,
    "X with its first axis as two, the first of them of size `dim_size`.",
    {"dim_size": "the size of the new first axis, which divides that of X's"},
)
class PrependDim(View):
    """The first axis as two."""


def infer_merge_dim(call: OperatorCall) -> list[TensorType]:
    """The first two axes as one."""
    shape = call.inputs[0].shape
    if len(shape) < 2:
        raise call.fail(f"X must have at least 2 axes, found {len(shape)}")
    return [TensorType((shape[0] * shape[1], *shape[2:]), call.inputs[0].meta)]


@view_operator("MergeDim", infer_merge_dim, "X with its first two axes as one.")
class MergeDim(View):
    """The first two axes as one."""


def _places(call: OperatorCall, axes: tuple[int, ...], rank: int) -> tuple[int, ...]:
    """`axes`, negative ones counted from the end. Raises ShapeError for an axis out of range."""
    for axis in axes:
        if not -rank <= axis < rank:
            raise call.fail(f"expected axes in [{-rank}, {rank - 1}], found {axis}")
    return tuple(axis % rank for axis in axes)


def infer_squeeze(call: OperatorCall) -> list[TensorType]:
    """The shape without the axes given, which must have size 1; one may be named more than once."""
    shape = call.inputs[0].shape
    axes = given_axes(call, "dims")
    if axes is None:
        return [TensorType(tuple(size for size in shape if size != 1), call.inputs[0].meta)]
    dropped = _places(call, axes, len(shape))
    for axis in dropped:
        if shape[axis] != 1:
            raise call.fail(f"axis {axis} to squeeze must have size 1, found {shape[axis]}")
    return [TensorType(tuple(s for axis, s in enumerate(shape) if axis not in dropped), call.inputs[0].meta)]


@view_operator(
    "Squeeze",
    infer_squeeze,
    "X without axes of size 1: those in `dims` or input 1, by default all.",
    {"dims": "axes to drop, when there is no input 1"},
    optional=("axes",),
)
class Squeeze(View):
    """Axes of size 1 dropped."""


def infer_expand_dims(call: OperatorCall) -> list[TensorType]:
    """The shape with axes of size 1 at those given, which count in the output; one may be named more than once."""
    shape = call.inputs[0].shape
    axes = given_axes(call, "dims")
    if axes is None:
        raise call.fail("expected the new axes as the argument 'dims' or as input 1, found neither")
    rank = len(shape) + len(set(axes))
    added = _places(call, axes, rank)
    if len(set(added)) != rank - len(shape):
        raise call.fail(f"an axis is named twice, once from the end: {list(axes)}")
    rest = iter(shape)
    return [TensorType(tuple(1 if axis in added else next(rest) for axis in range(rank)), call.inputs[0].meta)]


@view_operator(
    "ExpandDims",
    infer_expand_dims,
    "X with new axes of size 1, at `dims` or where input 1 says.",
    {"dims": "where the new axes are in the output, when there is no input 1"},
    optional=("axes",),
)
class ExpandDims(View):
    """Axes of size 1 added."""


@view_operator(
    "StopGradient",
    same_as_input,
    "X itself; the backward pass stops here.",
    post_ops=gives_back,
    image_role=ImageRole.ELEMENTWISE,
)
class StopGradient(View):
    """The identity, a wall to gradients."""


def infer_transpose(call: OperatorCall) -> list[TensorType]:
    """The sizes in the order of `axes`."""
    shape = call.inputs[0].shape
    return [TensorType(tuple(shape[axis] for axis in permutation(call)), call.inputs[0].meta)]


def permutation(call: OperatorCall) -> tuple[int, ...]:
    """The axes of a Transpose: `axes`, or all reversed. Raises ShapeError."""
    rank = len(call.inputs[0].shape)
    axes = call.arguments.ints("axes")
    if not axes:
        return tuple(reversed(range(rank)))
    if sorted(axes) != list(range(rank)):
        raise call.fail(f"argument 'axes' must be a permutation of 0..{rank - 1}, found {axes}")
    return tuple(axes)


@new_operator(
    "Transpose",
    infer=infer_transpose,
    doc="Axis i of the output is axis `axes[i]` of X.",
    input_names=("X",),
    output_names=("Y",),
    args={"axes": "a permutation of X's axes (default: reversed)"},
    cost=copy_cost,
    image_role=ImageRole.TURNING,
    onnx=(OnnxName("Transpose", 25, {"perm": "axes"}),),
    rows=permuted(permutation),
    moves_elements=True,
)
class Transpose(CopiedView):
    """Axes in another order."""

    reads_strided = writes_strided = True

    def viewing(self, call: OperatorCall) -> Viewing:
        return methodcaller("transpose", permutation(call))

    def prepare(self) -> Step:
        return partial(np.copyto, self.y(0), self.x(0).transpose(permutation(self.call())))


@declares
def order_operator(name: str, source: int, target: int, doc: str) -> OpSchema:
    """The schema of an operator that moves the channel axis of an image batch from `source` to `target`."""

    def infer(call: OperatorCall) -> list[TensorType]:
        shape = list(call.require_rank(0, 3, 4, 5))
        shape.insert(target if target >= 0 else len(shape) - 1, shape.pop(source))
        return [TensorType(tuple(shape), call.inputs[0].meta)]

    return OpSchema(
        name, infer=infer, doc=doc, input_names=("data",), output_names=("output",), cost=copy_cost, rows=first_axis
    )


@order_operator("NCHW2NHWC", 1, -1, "Channels from axis 1 to the end: (N, C, H, W) to (N, H, W, C).")
class NCHW2NHWC(Operator):
    """Channels last."""

    reads_strided = writes_strided = True

    def prepare(self) -> Step:
        return partial(np.copyto, self.y(0), np.moveaxis(self.x(0), 1, -1))


@order_operator("NHWC2NCHW", -1, 1, "Channels from the end to axis 1: (N, H, W, C) to (N, C, H, W).")
class NHWC2NCHW(Operator):
    """Channels first."""

    reads_strided = writes_strided = True

    def prepare(self) -> Step:
        return partial(np.copyto, self.y(0), np.moveaxis(self.x(0), -1, 1))


def sizes_of(call: OperatorCall) -> list[Array]:
    """The sizes of input 0 at the axes asked for, int64."""
    shape = call.inputs[0].shape
    axes = named_axes(call, "axes", len(shape)) if "axes" in call.arguments else range(len(shape))
    return [np.array([shape[axis] for axis in axes], np.int64)]


def infer_shape(call: OperatorCall) -> list[TensorType]:
    """An int64 vector, one size per axis asked for."""
    return [TensorType(sizes_of(call)[0].shape, INT64)]


@new_operator(
    "Shape",
    infer=infer_shape,
    doc="The shape of X as an int64 vector, or its sizes at `axes`.",
    input_names=("X",),
    output_names=("shape",),
    args={"axes": "the axes whose sizes are given (default: all)"},
    cost=no_cost,
    from_types=sizes_of,
)
class Shape(Operator):
    """The sizes of a tensor."""

    reads_strided = True

    def prepare(self) -> Step:
        """The sizes are known now; the step writes them."""
        [sizes] = sizes_of(self.call())
        return partial(np.copyto, self.y(0), sizes)


@new_operator(
    "Size",
    infer=lambda _call: [TensorType((), INT64)],
    doc="The number of elements of X, an int64 scalar.",
    input_names=("X",),
    output_names=("size",),
    cost=no_cost,
    from_types=lambda call: [np.array(call.inputs[0].elements, np.int64)],
    onnx=(OnnxName("Size", 25),),
)
class Size(Operator):
    """The number of elements of a tensor."""

    reads_strided = True

    def prepare(self) -> Step:
        """The number is known now; the step writes it."""
        return partial(self.y(0).fill, self.x(0).size)


@declares
def copy_operator(name: str, doc: str, crossing: Crossing, **traits: Any) -> OpSchema:
    """The schema of a copy, with further attributes."""
    return OpSchema(
        name,
        infer=same_as_input,
        doc=doc,
        input_names=("input",),
        output_names=("output",),
        cost=copy_cost,
        crossing=crossing,
        **traits,
    )


@copy_operator(
    "Copy",
    "A copy of the input, in memory of its own on the operator's device.",
    Crossing.COPY,
    post_ops=gives_back,
    image_role=ImageRole.ELEMENTWISE,
    moves_elements=True,
)
class Copy(Operator):
    """A copy, of a blob on this device or another."""

    reads_strided = writes_strided = crosses_devices = True

    def x(self, index: int) -> npt.NDArray[Any]:
        """The array of the input, as the device that has it works on it."""
        return self.input(index).runtime.host_view(super().x(index))

    def prepare(self) -> Step:
        return partial(np.copyto, self.y(0), self.x(0))


@copy_operator("CopyCPUToGPU", "A copy of a blob of the host, on the operator's device.", Crossing.FROM_HOST)
class CopyCPUToGPU(Copy):
    """A copy from the host."""


@copy_operator("CopyFromCPUInput", "A copy of a blob of the host, on the operator's device.", Crossing.FROM_HOST)
class CopyFromCPUInput(Copy):
    """A copy from the host, whatever device the operator is on."""


@copy_operator(
    "EnsureCPUOutput", "A copy of the input in host memory, made by the operator's device.", Crossing.TO_HOST
)
class EnsureCPUOutput(Copy):
    """A copy to the host."""

    def output(self, index: int) -> Tensor:
        """The output, on the host."""
        return self.output_blobs[index].tensor()


@copy_operator("CopyGPUToCPU", "A copy of the input in host memory, made by the operator's device.", Crossing.TO_HOST)
class CopyGPUToCPU(EnsureCPUOutput):
    """A copy to the host."""
