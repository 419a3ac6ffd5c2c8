"""LC, the locally connected layer: a convolution whose every output position has a filter of its own; and its gradient.

Positions are taken in blocks. A block's windows become rows of taps, one for each image, and one batched matrix
product multiplies the rows of each position and group with the filter that is there, for all images at once: the
filters, by far the largest operand, are read once. Blocks bound the working memory, whatever the size of the image;
only dX may be summed in an image of its own, where X is not of the layout or type of the products.
LeCun 1989, "Generalization and network design strategies"; Taigman et al. 2014, "DeepFace".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.core.dtypes import FLOAT_TYPES
from dagexec.core.operator import Operator, Step, in_sequence
from dagexec.core.registry import declares
from dagexec.core.rows import first_axis
from dagexec.core.schema import Cost, OperatorCall, OpSchema, TensorType
from dagexec.errors import ArgumentError
from dagexec.ops.base.blocks import Scratch, block_indices, compute_dtype
from dagexec.ops.base.geometry import WINDOW_ARGS, Axis, output_sizes, tap_count
from dagexec.ops.base.row_products import each_row
from dagexec.ops.families.conv.gradient_outputs import BIAS, FILTER, GRADIENT_ARGS, GROUP_ARGS, INPUT, wanted_gradients
from dagexec.ops.families.conv.unrolled import (
    add_to_image,
    as_slices,
    columns_window,
    copy_to_columns,
    read_pixels,
    some_pixels,
    some_windows,
    spatial_first,
)
from dagexec.platform.records import dataclass

Array = npt.NDArray[Any]

_BLOCK_BYTES = 2 << 20  # of the largest working array of a block
_SPATIAL_AXES = {"": (1, 2, 3), "1D": (1,), "2D": (2,), "3D": (3,)}


@dataclass(frozen=True)
class Layer:
    """The sizes of a locally connected layer, and its arrays as the products need them (P positions, G groups).

    X is N, C, spatial (or N, spatial, C), the filter out, M, C/G, kernel (or out, M, kernel, C/G), the bias out, M, and
    Y is N, M, out (or N, out, M).
    """

    axes: tuple[Axis, ...]
    batch: int
    channels: int
    filters: int
    group: int
    channels_last: bool

    @property
    def out(self) -> tuple[int, ...]:
        """Number of positions along each axis."""
        return output_sizes(self.axes)

    @property
    def positions(self) -> int:
        """Number of positions."""
        return math.prod(self.out)

    @property
    def depth(self) -> int:
        """Length of a filter: taps times channels of a group."""
        return self.channels // self.group * tap_count(self.axes)

    @property
    def filter_shape(self) -> tuple[int, ...]:
        kernel, channels = [axis.kernel for axis in self.axes], self.channels // self.group
        return (*self.out, self.filters, *([*kernel, channels] if self.channels_last else [channels, *kernel]))

    @property
    def output_shape(self) -> tuple[int, ...]:
        """The shape of Y."""
        if self.channels_last:
            return (self.batch, *self.out, self.filters)
        return (self.batch, self.filters, *self.out)

    def image(self, x: Array) -> Array:
        """X, or its gradient, as spatial, G, N, C/G."""
        view = spatial_first(x, self.channels_last)
        grouped = view.reshape(*view.shape[:-1], self.group, self.channels // self.group)
        return np.moveaxis(grouped, -3, -2)

    def rows(self, y: Array) -> Array:
        """Y, or its gradient, as P, G, N, M/G."""
        filters = self.filters // self.group
        if self.channels_last:
            return y.reshape(self.batch, self.positions, self.group, filters).transpose(1, 2, 0, 3)
        return y.reshape(self.batch, self.group, filters, self.positions).transpose(3, 1, 0, 2)

    def matrices(self, weights: Array) -> Array:
        """The filter, or its gradient, as P, G, M/G, depth."""
        return weights.reshape(self.positions, self.group, self.filters // self.group, self.depth)

    def biases(self, bias: Array) -> Array:
        """The bias, or its gradient, as P, G, M/G."""
        return bias.reshape(self.positions, self.group, self.filters // self.group)

    def columns(self, buffer: Array, out: Sequence[int]) -> Array:
        """Rows of taps (positions of `out`, G, N, depth) as kernel, out, G, N, C/G."""
        kernel, channels, rank = [axis.kernel for axis in self.axes], self.channels // self.group, len(self.axes)
        order = (*kernel, channels) if self.channels_last else (channels, *kernel)
        split = buffer.reshape(*out, self.group, self.batch, *order)
        first = rank + 2 if self.channels_last else rank + 3
        taps = range(first, first + rank)
        return split.transpose(*taps, *range(rank + 2), rank + 2 + (rank if self.channels_last else 0))

    def blocks(self, most: int) -> list[Block]:
        """All positions, in blocks of at most `most`."""
        found: list[Block] = []
        start = 0
        for index in block_indices(self.out, most):
            part = as_slices(index, self.out)
            axes = tuple(some_windows(self.axes, part))
            stop = start + math.prod(output_sizes(axes))
            found.append(Block(slice(start, stop), axes))
            start = stop
        return found


@dataclass(frozen=True)
class Block:
    """A range of positions, counted in row-major order, and the axes of their windows."""

    places: slice
    axes: tuple[Axis, ...]


def read_layer(call: OperatorCall) -> Layer:
    """The layer of a call whose inputs 0 and 1 are X and the filter.

    Raises ShapeError or ArgumentError when types, window, groups or the shape of the filter do not fit.
    """
    call.require_types(0, *FLOAT_TYPES)
    call.require_same_type()
    suffix = call.definition.type.removeprefix("LC").removesuffix("Gradient")
    window, axes = columns_window(call, 0, _SPATIAL_AXES[suffix])
    shape = call.inputs[0].shape
    channels, group = window.channels(shape), call.arguments.int("group", 1)
    if group < 1 or channels % group:
        raise ArgumentError(f"{call.label}: group must divide the {channels} input channels, found {group}")
    filters = call.require_rank(1, 2 * len(axes) + 2)[len(axes)]
    if filters % group:
        raise ArgumentError(f"{call.label}: group {group} must divide the {filters} filters")
    layer = Layer(axes, shape[0], channels, filters, group, window.channels_last)
    order = "out, M, kernel, C/group" if window.channels_last else "out, M, C/group, kernel"
    why = f"{order} for output {layer.out}, {channels} channels in {group} group(s) and kernel {window.kernel}"
    call.require_shape(1, layer.filter_shape, why)
    return layer


def infer_layer(call: OperatorCall) -> list[TensorType]:
    """Y is N, M, out. Checks filter and bias against the input, the window and the groups."""
    layer = read_layer(call)
    if len(call.inputs) == 3:
        call.require_shape(2, (*layer.out, layer.filters), "out, M")
    return [TensorType(layer.output_shape, call.inputs[0].meta)]


def layer_cost(call: OperatorCall, outputs: Sequence[TensorType]) -> Cost:
    """Two operations for each tap, input channel of the group and output element; one for each bias."""
    y = outputs[0]
    flops = 2 * y.elements * read_layer(call).depth + (y.elements if len(call.inputs) == 3 else 0)
    return Cost(flops, sum(kind.nbytes for kind in call.inputs), y.nbytes)


def infer_gradient(call: OperatorCall) -> list[TensorType]:
    """The gradients have the shapes of what they are gradients of. Checks the filter and dY against X."""
    layer = read_layer(call)
    call.require_shape(2, layer.output_shape, "the shape of the layer's output")
    shapes = {INPUT: call.inputs[0].shape, FILTER: layer.filter_shape, BIAS: (*layer.out, layer.filters)}
    return [TensorType(shapes[name], call.inputs[0].meta) for name in wanted_gradients(call)]


def gradient_cost(call: OperatorCall, outputs: Sequence[TensorType]) -> Cost:
    """As many operations for the gradient of the input, and of the filter, as the layer takes; only what is wanted."""
    elements, depth = call.inputs[2].elements, read_layer(call).depth
    flops = sum(elements if name == BIAS else 2 * elements * depth for name in wanted_gradients(call))
    return Cost(flops, sum(kind.nbytes for kind in call.inputs), sum(kind.nbytes for kind in outputs))


class BlockWork:
    """What the layer and its gradient share: blocks, and working arrays as large as the largest block needs.

    Attributes:
        layer: the layer.
        blocks: of its positions.
        dtype: the type to compute in.
        narrow: X is of a narrower one.
        products, weights, biases: working arrays.
    """

    def __init__(self, owner: Operator) -> None:
        """For the shapes that `owner` is being prepared for."""
        self.layer = layer = read_layer(owner.call())
        self._x = owner.x(0)
        self.dtype = work = compute_dtype(self._x.dtype)
        self.narrow = work != self._x.dtype
        taps, products = layer.batch * layer.group * layer.depth, layer.batch * layer.filters
        weights = layer.filters * layer.depth
        largest = max(1, taps, products, weights if self.narrow else 0)
        most = max(1, _BLOCK_BYTES // (largest * work.itemsize))
        self.blocks = layer.blocks(most)
        most = min(most, layer.positions)
        self._taps = Scratch(owner, most * taps, work)
        self._tiles = Scratch(owner, most * taps, work)
        self.products = Scratch(owner, most * products, work)
        self.weights = Scratch(owner, most * weights, work)
        self.biases = Scratch(owner, most * layer.filters, work)

    def row_buffer(self, block: Block) -> Array:
        """The rows of taps of a block: P, G, N, depth."""
        layer = self.layer
        places = block.places.stop - block.places.start
        return self._taps(0, (places, layer.group, layer.batch, layer.depth))

    def unroll(self, block: Block, taps: Array) -> list[Step]:
        """The steps that fill the rows of taps of a block from X.

        Pixels that are apart in memory for each image and channel are first brought together, once for all taps.
        """
        image, axes = self.layer.image(self._x), block.axes
        columns = self.layer.columns(taps, output_sizes(axes))
        pixels = tuple(read_pixels(axis) for axis in axes)
        read = image[pixels]
        if self.layer.channels_last or self.layer.batch == 1 or read.size > taps.size:
            return copy_to_columns(image, columns, axes)
        tile = self._tiles(0, read.shape)
        return [partial(np.copyto, tile, read), *copy_to_columns(tile, columns, some_pixels(axes, pixels))]

    def direct(self) -> bool:
        """True when images can be used as they are, with the channels last and of the type to compute in."""
        return self.layer.channels_last and not self.narrow

    def staged(self, array: Array, scratch: Scratch) -> tuple[Array, list[Step]]:
        """`array` in the type to compute in, and the steps that bring its present values there."""
        if not self.narrow:
            return array, []
        wide = scratch(0, array.shape)
        return wide, [partial(np.copyto, wide, array)]

    def narrowed(self, target: Array, scratch: Scratch, compute: Callable[..., Any]) -> list[Step]:
        """The steps that compute into `target`, through scratch memory if it is of a 16-bit type."""
        if not self.narrow:
            return [partial(compute, out=target)]
        wide = scratch(0, target.shape)
        return [partial(compute, out=wide), partial(np.copyto, target, wide, casting="same_kind")]


class LocallyConnected(Operator):
    """A batched matrix product over positions and groups, of all images, or of each by itself."""

    def prepare(self) -> Step:
        """For each block: unroll the windows, multiply, add the bias."""
        work = BlockWork(self)
        layer = work.layer
        rows, matrices = layer.rows(self.y(0)), layer.matrices(self.x(1))
        bias = layer.biases(self.x(2)) if len(self.input_blobs) == 3 else None
        steps: list[Step] = []
        for block in work.blocks:
            taps, target = work.row_buffer(block), rows[block.places]
            steps += work.unroll(block, taps)
            weights, load = work.staged(matrices[block.places], work.weights)
            product = target if work.direct() else work.products(0, target.shape)
            steps += [*load, each_row(self, taps, weights.swapaxes(2, 3), product)]
            if bias is not None:
                offsets, load = work.staged(bias[block.places], work.biases)
                total = product if work.narrow else target
                steps += [*load, partial(np.add, product, offsets[:, :, None], out=total)]
                product = total
            if product is not target:
                steps.append(partial(np.copyto, target, product, casting="same_kind"))
        return in_sequence(steps)


class LocallyConnectedGradient(Operator):
    """Batched matrix products over positions and groups, for what is wanted and nothing else.

    With rows of taps A (N, depth), filters W (M, depth) and output gradients D (N, M) of a position and group:
    dW = D^T A, dA = D W, and dX is the sum of dA over the windows that read a pixel.
    """

    def prepare(self) -> Step:
        """For each block: dY, then each wanted gradient; the parts of dX add up block by block."""
        work = BlockWork(self)
        layer = work.layer
        targets = {name: self.y(number) for number, name in enumerate(wanted_gradients(self.call()))}
        rows = layer.rows(self.x(2))
        steps: list[Step] = []
        total, store = self._input_total(work, targets.get(INPUT))
        if total is not None:
            steps.append(partial(total.fill, 0))
        for block in work.blocks:
            gradient = rows[block.places]
            if not work.direct():
                staged = work.products(0, gradient.shape)
                steps.append(partial(np.copyto, staged, gradient))
                gradient = staged
            if FILTER in targets:
                steps += self._filter_steps(work, block, gradient, layer.matrices(targets[FILTER])[block.places])
            if BIAS in targets:
                steps += self._bias_steps(work, gradient, layer.biases(targets[BIAS])[block.places])
            if total is not None:
                steps += self._input_steps(work, block, gradient, total)
        return in_sequence([*steps, *store])

    def _input_total(self, work: BlockWork, target: Array | None) -> tuple[Array | None, list[Step]]:
        """Where dX is summed, as spatial, G, N, C/G, and the steps that bring it to the output; None if not wanted."""
        if target is None:
            return None, []
        image = work.layer.image(target)
        if work.direct():
            return image, []
        total = self.scratch(image.shape, work.dtype)
        return total, [partial(np.copyto, image, total, casting="same_kind")]

    def _filter_steps(self, work: BlockWork, block: Block, gradient: Array, target: Array) -> list[Step]:
        """dW = D^T A; for one image that is an outer product, which needs no BLAS."""
        taps = work.row_buffer(block)
        multiply = np.multiply if work.layer.batch == 1 else np.matmul
        product = partial(multiply, gradient.swapaxes(2, 3), taps)
        return [*work.unroll(block, taps), *work.narrowed(target, work.weights, product)]

    def _bias_steps(self, work: BlockWork, gradient: Array, target: Array) -> list[Step]:
        """The sum of D over the images."""
        return work.narrowed(target, work.biases, partial(np.add.reduce, gradient, axis=2))

    def _input_steps(self, work: BlockWork, block: Block, gradient: Array, total: Array) -> list[Step]:
        """dA = D W, and its sum into dX."""
        taps = work.row_buffer(block)
        weights, load = work.staged(work.layer.matrices(self.x(1))[block.places], work.weights)
        columns = work.layer.columns(taps, output_sizes(block.axes))
        return [*load, partial(np.matmul, gradient, weights, out=taps), *add_to_image(columns, total, block.axes)]


_LAYER_ARGS = WINDOW_ARGS | GROUP_ARGS


@declares
def _layer_operator(name: str) -> OpSchema:
    return OpSchema(
        name,
        inputs=(2, 3),
        infer=infer_layer,
        doc="A convolution whose every output position has filters and a bias of its own. X is N, C, spatial, filter "
        "out, M, C/group, kernel, bias out, M, Y is N, M, out. With order NHWC, X is N, spatial, C, filter out, M, "
        "kernel, C/group, Y is N, out, M. 1, 2 or 3 spatial axes. Taigman et al. 2014, DeepFace.",
        input_names=("X", "filter", "bias"),
        output_names=("Y",),
        args=_LAYER_ARGS,
        cost=layer_cost,
        rows=first_axis,
    )


@declares
def _gradient_operator(name: str) -> OpSchema:
    return OpSchema(
        name,
        outputs=(1, 3),
        infer=infer_gradient,
        doc=f"The gradients of {name.removesuffix('Gradient')}, whose arguments it takes, from that of its output: "
        "dfilter, dbias and, if it has an output, dX; with no_bias=1, dfilter and dX; or what wanted names. 16-bit "
        "floats are summed in float32.",
        input_names=("X", "filter", "dY"),
        output_names=("dfilter", "dbias", "dX"),
        args=_LAYER_ARGS | GRADIENT_ARGS,
        cost=gradient_cost,
    )


for _suffix in _SPATIAL_AXES:
    _name = f"LC{_suffix}"
    _layer_operator(_name)(type(_name, (LocallyConnected,), {"__doc__": f"{_name} on the CPU."}))
    _name += "Gradient"
    _gradient_operator(_name)(type(_name, (LocallyConnectedGradient,), {"__doc__": f"{_name} on the CPU."}))
