"""Which operators can work on images in another order than NCHW, and how their defs change then.

`describe` gives the role of an operator: which of its inputs and outputs are images that change their order together,
and a rewriting of its arguments and constants. It needs ranks and numbers of channels, no sizes, so batch and image
size may be free. The `layout` pass decides with that who works in which order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.compiler.passes.operator_traits import is_in_training
from dagexec.compiler.passes.types import BlobType
from dagexec.core.arguments import Arguments, ArgumentValue
from dagexec.core.dtypes import FLOAT32, INT64
from dagexec.core.node import Node
from dagexec.core.registry import schema_of
from dagexec.core.schema import OperatorCall, OpSchema, TensorType
from dagexec.core.traits import ImageRole
from dagexec.errors import DagexecError
from dagexec.ops.base.layout import BLOCKS, NCHW, NHWC
from dagexec.ops.families.activation.post_ops import parse_post_op
from dagexec.ops.families.shape.slicing import slice_ranges
from dagexec.platform.records import dataclass

Array = npt.NDArray[Any]

_FEWEST_AXES = 3  # of an image
_MAX_CHANNELS_READ_PLAIN = 4  # an image with colors: there are kernels that read it in NCHW and write other orders


@dataclass(frozen=True)
class Image:
    """What is known of an image tensor: N, `channels`, and `axes` spatial axes."""

    axes: int
    channels: int


ONE_NUMBER = Image(0, 1)
"""What is known of a tensor of at most one axis and one element: it is the same in every order."""


@dataclass(frozen=True)
class Role:
    """How an operator takes part in a layout.

    Attributes:
        inputs, outputs: by position, the images that are in the operator's order.
        constants: by position, the parameters that are changed with the order, and how: (array, order) to array.
        arguments: for an order, arguments to set; None for one to take away.
        seeks: it is much faster in an order other than NCHW.
        reads_plain: it may read input 0 in NCHW and write NHWC or blocks of channels.
        blocked: by the channels of a block, whether it can work in such blocks, as far as that depends on other things
            than the images' channels.
    """

    inputs: Mapping[int, Image]
    outputs: Mapping[int, Image]
    constants: Mapping[int, Callable[[Array, str], Array]] = field(default_factory=dict)
    arguments: Callable[[str], Mapping[str, ArgumentValue | None]] = lambda order: {}
    seeks: bool = False
    reads_plain: bool = False
    blocked: Callable[[int], bool] = lambda block: True

    def serves(self, order: str) -> bool:
        """True when the operator can work in `order`, NHWC or blocked."""
        if order == NHWC:
            return True
        block = BLOCKS[order]
        images = [*self.inputs.values(), *self.outputs.values()]
        if self.reads_plain:
            images = list(self.outputs.values())
        return self.blocked(block) and all(image.channels % block == 0 for image in images)


def in_order(array: Array, rank: int, order: str) -> Array:
    """A constant that broadcasts to images of `rank` axes, so that it broadcasts to them in `order`.

    An array of one element stays as it is. Raises ValueError where the channels fill no blocks.
    """
    if array.size == 1:
        return array
    full = array.reshape((1,) * (rank - array.ndim) + array.shape)
    if order == NHWC:
        return np.ascontiguousarray(np.moveaxis(full, 1, -1))
    batch, channels, *spatial = full.shape
    if channels == 1:
        return full[..., np.newaxis]
    blocks = full.reshape(batch, channels // BLOCKS[order], BLOCKS[order], *spatial)
    return np.ascontiguousarray(np.moveaxis(blocks, 2, -1))


def describe(
    definition: Node,
    images: Mapping[str, Image | None],
    parameters: Mapping[str, Array],
    types: Mapping[str, BlobType],
) -> Role | None:
    """The role of an operator in NCHW on `images`; None where it has none, or is in another order already."""
    role = schema_of(definition.type).image_role
    if role is None or is_in_training(definition):
        return None
    if definition.device_option is not None and definition.device_option.device_type:
        return None
    arguments = definition.arguments()
    if arguments.string("order", NCHW).upper() != NCHW or "output_order" in arguments:
        return None
    if role is ImageRole.TURNING:
        return _turning(arguments.ints("axes"), images.get(definition.input[0]), types.get(definition.input[0]))
    if role is ImageRole.RESIZING:
        return _resized(arguments, images.get(definition.input[0]), types.get(definition.output[0]))
    if role is not ImageRole.ELEMENTWISE and definition.input and images.get(definition.input[0]) == ONE_NUMBER:
        return None
    return _RULES[role](definition, arguments, images, parameters)


def _order_argument(order: str) -> Mapping[str, ArgumentValue | None]:
    return {"order": order}


def _convolution(
    definition: Node, arguments: Arguments, images: Mapping[str, Image | None], parameters: Mapping[str, Array]
) -> Role | None:
    """Conv and FusedConv with a constant filter M, C/G, kernel."""
    weights = parameters.get(definition.input[1])
    group = arguments.int("group", 1)
    if weights is None or weights.ndim < 3 or group < 1:
        return None
    rank = weights.ndim
    source, result = Image(rank - 2, weights.shape[1] * group), Image(rank - 2, weights.shape[0])
    first_extra = 2 + arguments.int("bias", 0) if definition.type == "FusedConv" else 3
    extra = _operands(definition, range(first_extra, len(definition.input)), result, images, parameters)
    if extra is None:
        return None
    inputs, constants = extra
    reads_plain = _has_onednn(definition) and group == 1 and source.channels <= _MAX_CHANNELS_READ_PLAIN
    return Role(
        inputs={0: source, **inputs},
        outputs={0: result},
        constants={1: _filter_in_order, **constants},
        arguments=_order_argument,
        seeks=_has_library(definition),
        reads_plain=reads_plain,
        blocked=_blocked_groups(definition, group, weights.shape[1], weights.shape[0] // group, parts=True),
    )


def _blocked_groups(
    definition: Node, group: int, inner: int, outer: int, *, parts: bool = False
) -> Callable[[int], bool]:
    """Where a convolution from `inner` to `outer` channels a group is computed: no block has two groups.

    With `parts` it may have some that are read and written alike.
    """
    if not _has_onednn(definition):
        return _never
    are_parts = parts and inner == outer
    return lambda block: group == 1 or (inner % block == 0 and outer % block == 0) or (are_parts and block % inner == 0)


def _never(block: int) -> bool:
    return False


def _filter_in_order(weights: Array, order: str) -> Array:
    """M, C/G, kernel as the filter of a convolution in `order`; also C, M/G, kernel of a transposed one."""
    return np.ascontiguousarray(np.moveaxis(weights, 1, -1)) if order == NHWC else weights


def _transposed_convolution(
    definition: Node, arguments: Arguments, images: Mapping[str, Image | None], parameters: Mapping[str, Array]
) -> Role | None:
    """ConvTranspose with a constant filter C, M/G, kernel."""
    weights = parameters.get(definition.input[1])
    group = arguments.int("group", 1)
    if weights is None or weights.ndim < 3 or group < 1:
        return None
    axes = weights.ndim - 2
    return Role(
        inputs={0: Image(axes, weights.shape[0])},
        outputs={0: Image(axes, weights.shape[1] * group)},
        constants={1: _filter_in_order},
        arguments=_order_argument,
        seeks=_has_library(definition),
        blocked=_blocked_groups(definition, group, weights.shape[0] // group, weights.shape[1]),
    )


def _quantized_convolution(
    definition: Node, arguments: Arguments, images: Mapping[str, Image | None], parameters: Mapping[str, Array]
) -> Role | None:
    """QuantConv and ConvInteger with a constant filter M, C/G, kernel: without a blocked order, and fast in NHWC."""
    weights = parameters.get(definition.input[1])
    if weights is None or weights.ndim < 3:
        return None
    axes = weights.ndim - 2
    result = Image(axes, weights.shape[0])
    post_ops = [parse_post_op(text, definition.type) for text in arguments.strings("post_ops")]
    addends = [one.input for one in post_ops if one.kind == "add"]
    return Role(
        inputs={0: Image(axes, weights.shape[1] * arguments.int("group", 1)), **dict.fromkeys(addends, result)},
        outputs={0: result},
        constants={1: _filter_in_order},
        arguments=_order_argument,
        seeks=_has_library(definition),
        blocked=_never,
    )


def _on_integers(
    definition: Node, arguments: Arguments, images: Mapping[str, Image | None], parameters: Mapping[str, Array]
) -> Role | None:
    """Quantization by one scale, its inverse, casts, sums of quantized images: of one shape, in NCHW or NHWC."""
    image = images.get(definition.input[0])
    if image is None:
        return None
    if definition.type == "QuantAdd":
        same = images.get(definition.input[1]) == image
        return Role({0: image, 1: image}, {0: image}, blocked=_never) if same else None
    if any(name not in parameters or parameters[name].size != 1 for name in definition.input[1:]):
        return None
    return Role({0: image}, {0: image}, blocked=_never)


def _has_library(definition: Node) -> bool:
    return not {"ONEDNN", "CUDNN"}.isdisjoint(definition.engine.split(","))


def _has_onednn(definition: Node) -> bool:
    return "ONEDNN" in definition.engine.split(",")


def _same_channels(
    definition: Node, arguments: Arguments, images: Mapping[str, Image | None], parameters: Mapping[str, Array]
) -> Role | None:
    """An operator with an argument `order` that keeps the channels of its one image."""
    image = images.get(definition.input[0])
    group = arguments.int("group", 1)
    if image is None or len(definition.output) != 1 or group < 1:
        return None
    width = image.channels // group if definition.type == "ChannelShuffle" else 0
    blocked = (lambda block: width % block == 0) if _has_onednn(definition) else _never
    return Role({0: image}, {0: image}, arguments=_order_argument, blocked=blocked)


def _normalized_by_channel(
    definition: Node, arguments: Arguments, images: Mapping[str, Image | None], parameters: Mapping[str, Array]
) -> Role | None:
    """SpatialBN in inference, and PRelu: vectors have an element a channel in any order; other slopes broadcast."""
    image = images.get(definition.input[0])
    if image is None or len(definition.output) != 1 or any(name not in parameters for name in definition.input[1:]):
        return None
    changed: dict[int, Callable[[Array, str], Array]] = {}
    if parameters[definition.input[1]].ndim > 1:
        operands = _operands(definition, range(1, 2), image, images, parameters)
        if operands is None:
            return None
        changed = operands[1]
    blocked = Role.blocked if _has_onednn(definition) else _never
    return Role({0: image}, {0: image}, changed, _order_argument, blocked=blocked)


def _elementwise(
    definition: Node, arguments: Arguments, images: Mapping[str, Image | None], parameters: Mapping[str, Array]
) -> Role | None:
    """A function of one image, or of several operands that broadcast to it."""
    known = (images.get(name) for name in definition.input)
    image = next((found for found in known if found not in (None, ONE_NUMBER)), None)
    if image is None or len(definition.output) != 1 or arguments.string("axis_str", ""):
        return None
    if arguments.int("broadcast", 0):
        return _broadcast_run(definition, arguments, images.get(definition.input[0]), parameters)
    operands = _operands(definition, range(len(definition.input)), image, images, parameters)
    return None if operands is None else Role(operands[0], {0: image}, operands[1])


def _operands(
    definition: Node,
    positions: range,
    image: Image,
    images: Mapping[str, Image | None],
    parameters: Mapping[str, Array],
) -> tuple[dict[int, Image], dict[int, Callable[[Array, str], Array]]] | None:
    """Of the inputs at `positions`, which broadcast to `image`, the images and the constants; None when one is neither.

    An image of one channel for many, and a constant of more axes or more channels than the image has, are neither.
    """
    rank = image.axes + 2
    found: dict[int, Image] = {}
    constants: dict[int, Callable[[Array, str], Array]] = {}
    for position in positions:
        name = definition.input[position]
        other = images.get(name)
        if name in parameters:
            array = parameters[name]
            channels = array.shape[1 - rank] if array.ndim >= rank - 1 else 1
            if array.ndim > rank or channels not in (1, image.channels):
                return None
            constants[position] = lambda constant, order: in_order(constant, rank, order)
        elif other == image:
            found[position] = other
        elif other != ONE_NUMBER:
            return None
    return found, constants


def _broadcast_run(
    definition: Node, arguments: Arguments, image: Image | None, parameters: Mapping[str, Array]
) -> Role | None:
    """Caffe2's older broadcasting, of a constant B to a run of the image's axes: written out as NumPy's."""
    if image is None or len(definition.input) != 2 or definition.input[1] not in parameters:
        return None
    constant = parameters[definition.input[1]]
    rank = image.axes + 2
    axis = arguments.int("axis", -1)
    start = rank - constant.ndim if axis == -1 else axis
    if start < 0 or start + constant.ndim > rank:
        return None
    shape = (1,) * start + constant.shape + (1,) * (rank - start - constant.ndim)
    return Role(
        {0: image},
        {0: image},
        {1: lambda array, order: in_order(array.reshape(shape), rank, order)},
        arguments=lambda order: {"broadcast": None, "axis": None},
    )


def _joined_channels(
    definition: Node, arguments: Arguments, images: Mapping[str, Image | None], parameters: Mapping[str, Array]
) -> Role | None:
    """Concat along the channels."""
    parts = [images.get(name) for name in definition.input]
    if not _along_channels(arguments) or len(definition.output) != 1:
        return None
    known = [part for part in parts if part is not None]
    if len(known) != len(parts) or len({part.axes for part in known}) != 1:
        return None
    result = Image(known[0].axes, sum(part.channels for part in known))
    return Role(dict(enumerate(known)), {0: result}, arguments=lambda order: {"axis": None, "order": order})


def _along_channels(arguments: Arguments) -> bool:
    return arguments.int("axis", 1) == 1 and not arguments.int("add_axis", 0)


def _cut(
    definition: Node, arguments: Arguments, images: Mapping[str, Image | None], parameters: Mapping[str, Array]
) -> Role | None:
    """Split, into parts of known sizes along the channels, or along any other axis."""
    image = images.get(definition.input[0])
    if image is None or len(definition.input) != 1 or arguments.int("add_axis", 0):
        return None
    axis, count = arguments.int("axis", 1) % (image.axes + 2), len(definition.output)
    if axis != 1:
        same = dict.fromkeys(range(count), image)
        return Role({0: image}, same, arguments=lambda order: {"axis": _axis_in(order, axis, image.axes + 2)})
    sizes = arguments.ints("split") or [image.channels // count] * count

    def changed(order: str) -> Mapping[str, ArgumentValue | None]:
        parts = [size // BLOCKS.get(order, 1) for size in sizes]
        return {"axis": None, "order": order, "split": parts}

    outputs = {position: Image(image.axes, size) for position, size in enumerate(sizes)}
    return Role({0: image}, outputs, arguments=changed)


def _axis_in(order: str, axis: int, rank: int) -> int:
    """Where axis `axis` of a tensor of `rank` axes in NCHW is in `order`; that of the blocks for the channels."""
    if order != NHWC or axis == 0:
        return axis
    return rank - 1 if axis == 1 else axis - 1


def _sliced(
    definition: Node, arguments: Arguments, images: Mapping[str, Image | None], parameters: Mapping[str, Array]
) -> Role | None:
    """Slice by known bounds: those of each axis go where the axis goes; channels are cut between blocks only."""
    image = images.get(definition.input[0])
    values = [parameters.get(name) for name in definition.input[1:]]
    if image is None or len(values) > 2 or any(bounds is None for bounds in values):
        return None
    rank = image.axes + 2
    size = 1 << (60 - image.channels.bit_length()) // (rank - 1)  # of other axes, as large as a tensor can be
    shape = (size, image.channels, *(size,) * image.axes)
    kinds = (TensorType(shape, FLOAT32), *(TensorType(bounds.shape, INT64) for bounds in values if bounds is not None))
    try:
        kept = slice_ranges(OperatorCall(definition, arguments, kinds, (None, *values), definition.type))[1]
    except DagexecError:
        return None
    given = values[0] if values and values[0] is not None else arguments.ints("starts")
    axes = [axis % rank for axis in arguments.ints("axes")] or list(range(len(given)))
    whole = kept == range(image.channels)

    def changed(order: str) -> Mapping[str, ArgumentValue | None]:
        moved: dict[str, ArgumentValue | None] = {"axes": [_axis_in(order, axis, rank) for axis in axes]}
        if order in BLOCKS and 1 in axes:
            for name, bound in (("starts", kept.start), ("ends", kept.stop)):
                bounds = list(arguments.ints(name))
                bounds[axes.index(1)] = bound // BLOCKS[order]
                moved[name] = bounds
        return moved

    def blocked(block: int) -> bool:
        """Channels are cut between blocks."""
        whole_blocks = kept.step == 1 and kept.start % block == 0 and kept.stop % block == 0
        return 1 not in axes or (whole_blocks and not values)

    result = image if whole else Image(image.axes, len(kept))
    return Role({0: image}, {0: result}, arguments=changed, blocked=blocked)


def _padded(
    definition: Node, arguments: Arguments, images: Mapping[str, Image | None], parameters: Mapping[str, Array]
) -> Role | None:
    """Pad: the heads of all axes, then the tails. Channels are not padded in blocks."""
    image = images.get(definition.input[0])
    pads = arguments.ints("pads")
    if image is None or len(definition.input) != 1 or "axes" in arguments or len(pads) != 2 * (image.axes + 2):
        return None
    rank = image.axes + 2
    channels = pads[1] + pads[rank + 1]

    def changed(order: str) -> Mapping[str, ArgumentValue | None]:
        halves: list[int] = []
        for half in (pads[:rank], pads[rank:]):
            halves += [half[0], *half[2:], half[1]] if order == NHWC else [*half, 0]
        return {"pads": halves}

    blocked = Role.blocked if pads[1] == pads[rank + 1] == 0 else _never
    return Role({0: image}, {0: Image(image.axes, image.channels + channels)}, arguments=changed, blocked=blocked)


def _reduced(
    definition: Node, arguments: Arguments, images: Mapping[str, Image | None], parameters: Mapping[str, Array]
) -> Role | None:
    """A reduction over all spatial axes that keeps them with size 1."""
    image = images.get(definition.input[0])
    if image is None or len(definition.input) != 1 or not arguments.int("keepdims", 1) or "axes" not in arguments:
        return None
    rank = image.axes + 2
    if sorted(axis % rank for axis in arguments.ints("axes")) != list(range(2, rank)):
        return None

    def changed(order: str) -> Mapping[str, ArgumentValue | None]:
        first = 1 if order == NHWC else 2
        return {"axes": list(range(first, first + image.axes))}

    return Role({0: image}, {0: image}, arguments=changed)


def _resized(arguments: Arguments, image: Image | None, result: BlobType | None) -> Role | None:
    """Resize, whose `axes` say for which axes its sizes or factors are: in NHWC they are the same ones elsewhere."""
    if image is None or result is None or result.rank != image.axes + 2:
        return None
    rank, channels = result.rank, result.shape[1]
    axes = [axis % rank for axis in arguments.ints("axes")] or list(range(rank))
    if channels is None:
        return None
    return Role(
        {0: image},
        {0: Image(image.axes, channels)},
        arguments=lambda order: {"axes": [_axis_in(order, axis, rank) for axis in axes]},
        blocked=_never,
    )


def _turning(axes: Sequence[int], image: Image | None, kind: BlobType | None) -> Role | None:
    """A permutation to N, spatial, C, of an image, or from there, which gives one: in NHWC it changes nothing."""
    rank = len(axes)
    spatial = tuple(range(1, rank - 1))
    nothing: Mapping[str, ArgumentValue | None] = {"axes": list(range(rank))}
    if rank < _FEWEST_AXES:
        return None
    if tuple(axes) == (0, *range(2, rank), 1) and image is not None and image.axes == len(spatial):
        return Role({0: image}, {}, arguments=lambda order: nothing, blocked=_never)
    channels = kind.shape[-1] if kind is not None and kind.rank == rank else None
    if tuple(axes) == (0, rank - 1, *spatial) and channels:
        return Role({}, {0: Image(len(spatial), channels)}, arguments=lambda order: nothing, blocked=_never)
    return None


Rule = Callable[[Node, Arguments, Mapping[str, Image | None], Mapping[str, Array]], Role | None]

_RULES: Mapping[ImageRole, Rule] = {
    ImageRole.ELEMENTWISE: _elementwise,
    ImageRole.CONVOLUTION: _convolution,
    ImageRole.TRANSPOSED_CONVOLUTION: _transposed_convolution,
    ImageRole.QUANTIZED_CONVOLUTION: _quantized_convolution,
    ImageRole.POOLING: _same_channels,
    ImageRole.SAME_CHANNELS: _same_channels,
    ImageRole.PER_CHANNEL: _normalized_by_channel,
    ImageRole.JOINING: _joined_channels,
    ImageRole.CUTTING: _cut,
    ImageRole.SLICING: _sliced,
    ImageRole.PADDING: _padded,
    ImageRole.REDUCTION: _reduced,
    ImageRole.ON_INTEGERS: _on_integers,
}

_CONVOLVING = (ImageRole.CONVOLUTION, ImageRole.TRANSPOSED_CONVOLUTION, ImageRole.QUANTIZED_CONVOLUTION)


def may_seek_order(schema: OpSchema) -> bool:
    """True for operators that may be much faster in an order other than NCHW."""
    return schema.image_role in _CONVOLVING
