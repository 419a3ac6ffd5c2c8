"""before-concat: activations and batch normalizations go from behind a Concat to before it, into the layers there.

A function of each element commutes with joining, and so does a map of channels with joining them:

    f(Concat(a, b)) = Concat(f(a), f(b))

That is worth it where the layers, sums and activations that make a and b can take f in, where f(a) already exists, or
where it is a itself: rectified means of what is not negative. One input may cost an operator of its own, which is
smaller than the one that goes. ReLU also commutes with max pooling, so it goes to a layer before that.
"""

from __future__ import annotations

from collections.abc import Sequence

from dagexec.compiler.passes.affine import normalization
from dagexec.compiler.passes.draft import Draft
from dagexec.compiler.passes.fusion import FUSED_CHAIN, FUSED_CONVOLUTION, FUSED_PRODUCT, post_ops_of
from dagexec.compiler.passes.linear_layer import LinearLayer, read_layer
from dagexec.compiler.passes.post_operations import is_function
from dagexec.compiler.passes.rewriting import Pass
from dagexec.core.arguments import Arguments
from dagexec.core.node import Node
from dagexec.core.registry import schema_of
from dagexec.core.schema import OpSchema
from dagexec.core.traits import ImageRole
from dagexec.ops.families.activation.post_ops import as_post_ops

_FUSED = frozenset({FUSED_CONVOLUTION, FUSED_PRODUCT, FUSED_CHAIN})


def edit(draft: Draft) -> None:
    """Move what follows a Concat or a max pooling alone, from the front of the list on."""
    for number in draft.having(_may_move):
        if number in draft:
            _move(draft, number)


def _may_move(schema: OpSchema) -> bool:
    """An activation or a batch normalization."""
    return schema.post_ops is not None or schema.type == "SpatialBN"


def _is_concat_or_max_pooling(schema: OpSchema) -> bool:
    return schema.type == "Concat" or _is_max_pooling(schema)


def _move(draft: Draft, number: int) -> None:
    """Move operator `number` before the one that writes its input, if that helps."""
    definition = draft[number]
    is_normalization = definition.type == "SpatialBN"
    if not (is_normalization or is_function(definition)) or len(definition.output) != 1 or not draft.is_free(number):
        return
    source = draft.producer(definition.input[0]) if definition.input else None
    if source is None or draft.only_reader(definition.input[0]) != number or len(draft[source].output) != 1:
        return
    if is_normalization and draft[source].type == "Concat":
        _normalize_pieces(draft, number, source)
    elif not is_normalization and _helps(draft, number, source):
        _activate_pieces(draft, number, source)


def _helps(draft: Draft, number: int, source: int) -> bool:
    """True when activation `number`, which alone reads what `source` writes, is better done on what that reads."""
    names = list(dict.fromkeys(draft[source].input))
    if _is_max_pooling(schema_of(draft[source].type)):
        plain = draft[number].type == "Relu" and _windows_meet_pixels(draft.arguments(source))
        return plain and _is_taken_in(draft, number, source, names[0])
    if draft[source].type != "Concat":
        return False
    if any(_is_repeated_later(draft, number, name) for name in names):
        return False
    own = [name for name in names if not _is_taken_in(draft, number, source, name)]
    return len(own) < len(names) and len(own) <= 1


def _is_taken_in(draft: Draft, number: int, source: int, name: str) -> bool:
    """True when activation `number` on blob `name`, which `source` reads, needs no operator of its own."""
    if _is_kept(draft, number, name) or _same(draft, number, name):
        return True
    writer = draft.producer(name)
    if writer is None or not draft.is_inner(name) or list(draft.readers(name)) != [source]:
        return False
    if draft[writer].type == "Concat":
        return len(draft[writer].output) == 1 and _helps(draft, number, writer)
    return _takes_activations(draft[writer])


def _takes_activations(definition: Node) -> bool:
    """True for layers, batch normalizations and chains, and for what chains are made of."""
    known = definition.type == "SpatialBN" or definition.type in _FUSED or schema_of(definition.type).fused
    return bool(known or as_post_ops(definition))


def _is_max_pooling(schema: OpSchema) -> bool:
    return schema.image_role is ImageRole.POOLING and schema.moves_elements


def _is_kept(draft: Draft, number: int, name: str) -> bool:
    return draft[number].type == "Relu" and _is_not_negative(draft, name)


def _is_not_negative(draft: Draft, name: str) -> bool:
    """True when no element of `name` is below zero, by what writes it."""
    writer = draft.producer(name)
    if writer is None:
        return False
    definition = draft[writer]
    if post_ops := post_ops_of(definition) or as_post_ops(definition):
        return post_ops[-1].is_positive
    schema = schema_of(definition.type)
    keeps_sign = schema.moves_elements or schema.image_role is ImageRole.POOLING
    if _is_max_pooling(schema):
        keeps_sign = _windows_meet_pixels(draft.arguments(writer))
    return keeps_sign and all(_is_not_negative(draft, one) for one in definition.input)


def _windows_meet_pixels(arguments: Arguments) -> bool:
    """True when no window of a pooling lies in the padding alone, where the largest pixel is minus infinity."""
    if arguments.int("global_pooling", 0):
        return True
    if arguments.int("legacy_pad", 0) or any("dilation" in name for name in arguments.names()):
        return False
    kernel = [arguments.int(name, 1) for name in ("kernel", "kernel_h", "kernel_w") if name in arguments]
    pads = [arguments.int(name, 0) for name in ("pad", "pad_t", "pad_l", "pad_b", "pad_r")]
    return max(*pads, *arguments.ints("pads")) < min([*kernel, *arguments.ints("kernels")], default=0)


def _same(draft: Draft, number: int, name: str) -> str:
    """The result of an operator before `number` that does the same to blob `name`; empty when there is none."""
    for reader in draft.readers(name):
        if _does_the_same(draft, reader, number) and draft.is_listed_before(reader, number):
            return draft[reader].output[0]
    return ""


def _is_repeated_later(draft: Draft, number: int, name: str) -> bool:
    """True when an operator behind `number` does the same to blob `name`: it would be done twice."""
    return not _same(draft, number, name) and any(
        _does_the_same(draft, reader, number) for reader in draft.readers(name) if reader != number
    )


def _does_the_same(draft: Draft, one: int, other: int) -> bool:
    if one == other or not draft.is_free(one) or draft[one].type != draft[other].type:
        return False
    same = draft[one].values.key == draft[other].values.key
    return same and len(draft[one].input) == len(draft[one].output) == 1


def _activate_pieces(draft: Draft, number: int, source: int) -> None:
    """Do activation `number` to the inputs of `source`, which then takes its place; and move it on from there."""
    activation, pieces = draft[number], {}
    added = []
    for name in dict.fromkeys(draft[source].input):
        found = name if _is_kept(draft, number, name) else _same(draft, number, name)
        if not found:
            found = draft.fresh(f"{name}/{activation.type}")
            added.append(activation.changed(name="", inputs=[name], outputs=[found]))
        pieces[name] = found
    inputs = [pieces[name] for name in draft[source].input]
    moved = draft[source].changed(inputs=inputs, outputs=activation.output)
    _write(draft, number, source, added, moved)


def _write(draft: Draft, number: int, source: int, added: Sequence[Node], moved: Node) -> None:
    """Put `added` and `moved` in the place of operator `number`, and take out `source`."""
    draft.changed(f"{draft.label(number)} is done before {draft.label(source)}")
    draft.remove(source)
    first, *more = [*added, moved]
    draft.replace(number, first, *more)
    for definition in added:
        [writer] = draft.writers(definition.output[0])
        _move(draft, writer)


def _normalize_pieces(draft: Draft, number: int, source: int) -> None:
    """Do batch normalization `number` to the results of the layers that Concat `source` joins along the channels."""
    definition, layers = draft[number], []
    for name in draft[source].input:
        writer = draft.producer(name)
        layer = None if writer is None or draft.only_reader(name) != source else read_layer(draft, writer)
        if layer is None:
            return
        layers.append(layer)
    affine = normalization(draft, number)
    if affine is None or affine.factor.size != sum(layer.result.count for layer in layers):
        return
    if not _joins_channels(draft, number, source, layers):
        return
    added, first = [], 0
    for name, layer in zip(draft[source].input, layers, strict=True):
        part = slice(first, first + layer.result.count)
        vectors = [draft.add_parameter(f"{one}/{first}", draft.parameters[one][part]) for one in definition.input[1:]]
        outputs = [draft.fresh(f"{name}/{definition.type}")]
        added.append(definition.changed(name="", inputs=[name, *vectors], outputs=outputs))
        first = part.stop
    moved = draft[source].changed(inputs=[piece.output[0] for piece in added], outputs=definition.output)
    _write(draft, number, source, added, moved)


def _joins_channels(draft: Draft, number: int, source: int, layers: Sequence[LinearLayer]) -> bool:
    """True when Concat `source` joins the channels that normalization `number` and the layers before mean."""
    result = layers[0].result
    if result.rank < 2 or any((layer.result.axis, layer.result.rank) != (result.axis, result.rank) for layer in layers):
        return False
    arguments = draft.arguments(source)
    last = result.rank - 1
    by_order = {"NCHW": 1, "NHWC": last}
    joined = arguments.int("axis", by_order.get(arguments.string("order", "NCHW").upper(), 0)) % result.rank
    normalized = by_order.get(draft.arguments(number).string("order", "NCHW").upper())
    return joined == normalized == result.axis and not arguments.int("add_axis", 0)


PASS = Pass(
    "before-concat",
    "What follows a Concat goes to the layers before it.",
    edit,
    needs=(_is_concat_or_max_pooling, _may_move),
)
