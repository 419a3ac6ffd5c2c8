"""Images of a training net with their channels last, which oneDNN's convolutions and normalizations are faster with.

Convolutions choose that order, and the operators between them follow. Parameters and their gradients stay as they are:
filters and their gradients are transposed once a step. Operators of no images, such as a fully connected layer, read a
copy in N, channels, height, width.

LeNet's step takes 0.7 of the processor time so, ResNet-20's 0.67 (64 images, AVX-512, beside other work).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field

from dagexec.core.arguments import Arguments, make_argument
from dagexec.core.device import CPU, Device
from dagexec.core.node import arguments_of, operator_label
from dagexec.core.proto import NetDef, OperatorDef
from dagexec.core.tensor import Tensor
from dagexec.core.workspace import Workspace
from dagexec.ops.base.layout import NCHW, NHWC
from dagexec.ops.families.conv.gradient_outputs import BIAS, FILTER, INPUT
from dagexec.platform.records import dataclass

_FIRST = (0,)
_FUNCTIONS = ("Elu", "LeakyRelu", "Relu", "Selu", "Sigmoid", "Tanh")
_IMAGE_AXES = 4


@dataclass(frozen=True)
class _Images:
    """Which inputs and outputs of an operator are images, and which are filters."""

    inputs: Sequence[int]
    outputs: Sequence[int]
    filters: Sequence[int] = ()
    filter_gradients: Sequence[int] = ()


def _all(definition: OperatorDef) -> _Images:
    return _Images(range(len(definition.input)), range(len(definition.output)))


def _first(definition: OperatorDef) -> _Images:
    return _Images(_FIRST, _FIRST)


def _normalization_gradient(definition: OperatorDef) -> _Images:
    return _Images((0, 2), _FIRST)


def _convolution(definition: OperatorDef) -> _Images:
    return _Images(_FIRST, _FIRST, (1,))


def _convolution_gradient(definition: OperatorDef) -> _Images:
    arguments = arguments_of(definition, operator_label(definition, 0))
    names = list(arguments.strings("wanted")) or [FILTER, *([] if arguments.bool("no_bias") else [BIAS]), INPUT]
    names = names[: len(definition.output)]
    places = {name: [place for place, one in enumerate(names) if one == name] for name in (FILTER, INPUT)}
    return _Images((0, 2), places[INPUT], (1,), places[FILTER])


_SEEKING: Mapping[str, Callable[[OperatorDef], _Images]] = {
    "Conv": _convolution,
    "ConvGradient": _convolution_gradient,
}

_FOLLOWING: Mapping[str, Callable[[OperatorDef], _Images]] = {
    **dict.fromkeys(("AveragePool", "MaxPool", "LRN", "SpatialBN", "Pad"), _first),
    **dict.fromkeys(("AveragePoolGradient", "MaxPoolGradient", "LRNGradient", "PadGradient", "ConcatGradient"), _all),
    **dict.fromkeys(("Sum", "Copy"), _all),
    "Concat": lambda definition: _Images(range(len(definition.input)), _FIRST),
    **dict.fromkeys(_FUNCTIONS, _all),
    **dict.fromkeys((f"{name}Gradient" for name in _FUNCTIONS), _all),
    "SpatialBNGradient": _normalization_gradient,
}

_ORDERED = frozenset(
    f"{name}{suffix}" for name in ("Conv", "AveragePool", "MaxPool", "LRN", "SpatialBN") for suffix in ("", "Gradient")
)


def with_channels_last(net: NetDef, workspace: Workspace, engine: str) -> tuple[NetDef, dict[str, str]]:
    """`net` with its images in NHWC where its convolutions are by `engine`; and where those of each name are then.

    The filters' blobs are in `workspace`. `net` is given back as it is where fewer convolutions gain than images are
    copied, where filters are no 4-axis tensors or in groups, and for nets with devices or control inputs. External
    outputs, and what the workspace has a blob of, stay in NCHW under their names.
    """
    seeking = [
        convolution
        for convolution in net.op
        if convolution.type in _SEEKING and engine in convolution.engine.split(",")
    ]
    if not seeking or not all(_is_plain(convolution, workspace) for convolution in seeking) or not _is_on_host(net):
        return net, {}
    turned = _Turned(net, engine)
    for definition in net.op:
        turned.add(definition)
    if turned.copies >= len(seeking):
        return net, {}
    for name in sorted(turned.moved):
        if name in net.external_output or workspace.has_blob(name):
            turned.in_order(name)
    return turned.net, turned.moved


def _is_plain(definition: OperatorDef, workspace: Workspace) -> bool:
    """True for a convolution of images of two axes, in NCHW and without groups."""
    arguments = arguments_of(definition, operator_label(definition, 0))
    blob = workspace.get_blob_or_none(definition.input[1])
    is_filter = blob is not None and isinstance(blob.value, Tensor) and len(blob.value.shape) == _IMAGE_AXES
    return is_filter and arguments.string("order", NCHW) == NCHW and arguments.int("group", 1) == 1


def _is_on_host(net: NetDef) -> bool:
    return not net.HasField("device_option") and all(
        not definition.control_input and Device.from_option(definition.device_option) == CPU for definition in net.op
    )


@dataclass
class _Turned:
    """A net in the making.

    Attributes:
        net: the operators so far.
        moved: by name, the blob with channels last of what has no blob of that name.
        copies: of images.
    """

    source: NetDef
    engine: str
    net: NetDef = field(default_factory=NetDef)
    moved: dict[str, str] = field(default_factory=dict)
    copies: int = 0

    def __post_init__(self) -> None:
        self.net.CopyFrom(self.source)
        del self.net.op[:]
        self._known: dict[str, str] = {}  # the blob with channels last of each name that has one now
        self._taken = {name for definition in self.source.op for name in (*definition.input, *definition.output)}
        self._names: dict[str, str] = {}

    def add(self, definition: OperatorDef) -> None:
        """The operator, on images with channels last where it can be."""
        is_seeking = definition.type in _SEEKING and self.engine in definition.engine.split(",")
        rule = _SEEKING.get(definition.type) if is_seeking else _FOLLOWING.get(definition.type)
        images = None if rule is None else rule(definition)
        arguments = arguments_of(definition, operator_label(definition, 0))
        if images is not None and (is_seeking or any(definition.input[one] in self._known for one in images.inputs)):
            changed = _changed(definition, arguments)
            if changed is not None:
                self._add_turned(changed, images)
                return
        for name in dict.fromkeys(definition.input):
            self.in_order(name)
        self._forget(definition.output)
        self.net.op.add().CopyFrom(definition)

    def in_order(self, name: str) -> None:
        """Ensure that the blob `name` has its value, in NCHW."""
        if name in self.moved:
            self._copy("NHWC2NCHW", self.moved.pop(name), name)
            self.copies += 1

    def _add_turned(self, definition: OperatorDef, images: _Images) -> None:
        for place in images.inputs:
            self.copies += definition.input[place] not in self._known
            definition.input[place] = self._channels_last(definition.input[place])
        for place in images.filters:
            definition.input[place] = self._channels_last(definition.input[place])
        self._forget(name for place, name in enumerate(definition.output) if place not in images.outputs)
        for place in images.outputs:
            name = definition.output[place]
            definition.output[place] = self._known[name] = self.moved[name] = self._name(name)
        gradients = [(place, definition.output[place]) for place in images.filter_gradients]
        for place, name in gradients:
            definition.output[place] = self._name(name)
        self.net.op.append(definition)
        for place, name in gradients:
            self._copy("NHWC2NCHW", definition.output[place], name)

    def _channels_last(self, name: str) -> str:
        if name not in self._known:
            self._known[name] = self._name(name)
            self._copy("NCHW2NHWC", name, self._known[name])
        return self._known[name]

    def _copy(self, kind: str, source: str, target: str) -> None:
        self.net.op.append(OperatorDef(type=kind, input=[source], output=[target], engine=self.engine))

    def _forget(self, names: Iterable[str]) -> None:
        """These blobs get other values, in NCHW."""
        for name in names:
            self._known.pop(name, None)
            self.moved.pop(name, None)

    def _name(self, name: str) -> str:
        if name not in self._names:
            wanted = f"{name}_nhwc"
            while wanted in self._taken:
                wanted += "_"
            self._taken.add(wanted)
            self._names[name] = wanted
        return self._names[name]


def _changed(definition: OperatorDef, arguments: Arguments) -> OperatorDef | None:
    """The operator for channels last; None where it cannot be."""
    if arguments.string("order", NCHW) != NCHW:
        return None
    changes: dict[str, str | list[int]] = {}
    if definition.type in _ORDERED:
        changes["order"] = NHWC
    elif definition.type in ("Concat", "ConcatGradient"):
        if arguments.int("axis", 1) != 1 or arguments.bool("add_axis"):
            return None
        changes["order"] = NHWC
    elif definition.type in ("Pad", "PadGradient"):
        pads = arguments.ints("pads")
        if len(pads) != 2 * _IMAGE_AXES or "axes" in arguments:
            return None
        changes["pads"] = [half[axis] for half in (pads[:_IMAGE_AXES], pads[_IMAGE_AXES:]) for axis in (0, 2, 3, 1)]
    copy = OperatorDef()
    copy.CopyFrom(definition)
    others = [argument for argument in copy.arg if argument.name not in (*changes, "axis")]
    del copy.arg[:]
    copy.arg.extend([*others, *(make_argument(name, value) for name, value in changes.items())])
    return copy
