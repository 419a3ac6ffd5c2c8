"""residual-fusion: a convolution or fully connected layer adds another tensor to its result before it writes.

`Add` and `Sum` of a layer's result and a tensor of the same shape, the sums of residual networks (He et al. 2015,
arXiv:1512.03385), become post-ops, with the activations behind them. Where the other tensor's last use is here the
layer works in place, `sum:I`; where others may still read it, `add:I` reads it as an operand.

The layer then waits for the other tensor. That must not make the net's critical path longer: where both sides are
layers the one is taken that ends later, and where neither can wait the sum stays.
"""

from __future__ import annotations

import math
from dataclasses import replace

from dagexec.compiler.passes.activation_fusion import fuse_activations
from dagexec.compiler.passes.draft import Draft
from dagexec.compiler.passes.fusion import (
    FUSED_PRODUCT,
    described,
    fused,
    has_room,
    layer_meta,
    post_ops_of,
    takes_post_ops,
)
from dagexec.compiler.passes.operator_traits import may_add
from dagexec.compiler.passes.ordering import Ordering
from dagexec.compiler.passes.post_operations import Types, is_sum, operand_links
from dagexec.compiler.passes.rewriting import Pass
from dagexec.compiler.passes.types import BlobType
from dagexec.core.arguments import Arguments
from dagexec.core.node import Node
from dagexec.ops.engines.onednn.post_ops import drops_nan
from dagexec.ops.families.activation.post_ops import SUM

_LARGE = 1 << 20  # bytes of a tensor: those that do not stay in the cache of a core
_SLACK = 1e-9  # seconds by which sums of floats may differ


def edit(draft: Draft) -> None:
    """Fuse sums as operands, then let layers work in place where they may."""
    fused_layers: list[int] = []
    ordering: Ordering | None = None
    for number in draft.having(may_add):
        if number not in draft or not is_sum(draft[number]) or not draft.is_free(number):
            continue
        layers = _layers_for(draft, number)
        if not layers:
            continue
        if ordering is None:
            types = draft.types()
            ordering = Ordering(draft, types)
        layer = _fuse_sum(draft, number, layers, types, ordering)
        if layer is not None:
            fused_layers.append(layer)
            ordering.edited(layer)
    if ordering is not None:
        _work_in_place(draft, [number for number in fused_layers if number in draft], types, ordering)


def _layers_for(draft: Draft, number: int) -> list[int]:
    """The layers that write inputs of operator `number` for it alone."""
    return [writer for name in draft[number].input if (writer := _layer_for(draft, number, name)) is not None]


def _fuse_sum(draft: Draft, number: int, layers: list[int], types: Types, ordering: Ordering) -> int | None:
    """Fuse sum `number` into one of the `layers` before it; returns the number that this has then."""
    for layer in sorted(layers, key=ordering.finish, reverse=True) if len(layers) > 1 else layers:
        source = draft[layer].output[0]
        links = operand_links(draft, number, source, types)
        operands = [link.operand for link in links]
        if not links or not all(operands) or not has_room(draft[layer], links):
            continue
        if any(draft.constant(name) is not None or not _same_type(types, name, source) for name in operands):
            continue
        if not _may_wait(draft, layer, number, operands, ordering):
            continue
        in_place = len(operands) == 1 and _may_work_in_place(draft, layer, number, operands[0], ordering)
        if not in_place and _is_for_winograd(draft, layer):
            continue
        draft.changed(f"{draft.label(layer)} applies {described(links)} of {draft.label(number)}")
        draft.replace(number, fused(draft[layer], links, draft[number].output[0]))
        draft.remove(layer)
        return fuse_activations(draft, number)
    return None


def _layer_for(draft: Draft, number: int, name: str) -> int | None:
    """The layer that writes `name` for operator `number` alone."""
    writer = draft.producer(name)
    if writer is None or draft.only_reader(name) != number or layer_meta(draft, writer) is None:
        return None
    return writer


def _same_type(types: Types, one: str, other: str) -> bool:
    return one in types and types[one] == types.get(other)


def _may_wait(draft: Draft, layer: int, number: int, operands: list[str], ordering: Ordering) -> bool:
    """True when `layer` may begin only when all operands are there, and the net takes no longer for it."""
    for name in operands:
        for writer in draft.writers(name):
            if ordering.is_before(writer, layer):
                continue
            if ordering.path_through(writer, layer, number) > ordering.critical_path + _SLACK:
                return False
    return True


def _may_work_in_place(draft: Draft, layer: int, number: int, operand: str, ordering: Ordering) -> bool:
    """True when `layer`, fused with sum `number`, may write over `operand`: it does not read it itself otherwise.

    `number` waits for no more than `layer` does, but for the operand; readers have to be before `layer` then.
    """
    others = [reader for reader in draft.readers(operand) if reader != number]
    if operand in draft[layer].input:
        return False
    return ordering.may_be_overwritten(operand, number) and all(ordering.is_before(reader, layer) for reader in others)


def _is_for_winograd(draft: Draft, layer: int) -> bool:
    """True for a 3 x 3 convolution of stride 1 without groups, which an operand would keep from the Winograd kernel.

    oneDNN's Winograd kernels add in place and rectify, and know no other operand: fusing would cost more than a pass.
    """
    definition = draft[layer]
    if definition.type == FUSED_PRODUCT or definition.type == "FC":
        return False
    arguments, weights = draft.arguments(layer), draft.constant(definition.input[1])
    if weights is None or weights.ndim != 4 or arguments.int("group", 1) != 1:
        return False
    first = 1 if arguments.string("order", "NCHW").upper() == "NHWC" else 2
    return weights.shape[first : first + 2] == (3, 3) and _steps(arguments) == {1}


def _steps(arguments: Arguments) -> set[int]:
    """The strides and dilations given, in any spelling; 1 where none is."""
    found = {1, *arguments.ints("strides"), *arguments.ints("dilations")}
    for name in ("stride", "stride_h", "stride_w", "dilation", "dilation_h", "dilation_w"):
        found.add(arguments.int(name, 1))
    return found


def _work_in_place(draft: Draft, layers: list[int], types: Types, ordering: Ordering) -> None:
    """Turn `add` into `sum` where the operand's last use is here; all blobs are single up to now."""
    chosen = []
    for number in layers:
        operands = [post_op.input for post_op in post_ops_of(draft[number]) if post_op.kind == "add"]
        if len(operands) == 1:
            name = draft[number].input[operands[0]]
            once = list(draft[number].input).count(name) == 1
            if _is_kept(draft, number, types.get(name)):
                continue
            if once and ordering.may_be_overwritten(name, number):
                chosen.append((number, operands[0]))
    names = {draft[number].input[index]: draft[number].output[0] for number, index in chosen}
    for number, index in chosen:
        draft.changed(f"{draft.label(number)} adds in place to {draft[number].input[index]!r}")
        draft.replace(number, _summing(draft[number], index))
    for old in names:
        new = names[old]
        while new in names:
            new = names[new]
        draft.rename(old, new)


def _is_kept(draft: Draft, layer: int, addend: BlobType | None) -> bool:
    """True when `layer` reads what it adds as an operand although it might write over it.

    Behind Relu or the like oneDNN has to compute it again where there is a NaN. In place the addend is looked at before
    (`ops.engines.onednn.keeping_nan`), which costs more than another buffer while tensors are small. Winograd's
    algorithms know no operand.
    """
    if not drops_nan(post_ops_of(draft[layer])) or _is_for_winograd(draft, layer):
        return False
    return addend is None or any(math.prod(shape) * addend.meta.itemsize < _LARGE for shape in addend.shapes)


def _summing(definition: Node, index: int) -> Node:
    """`definition` with `sum` for the operand that is input `index`."""
    texts = [
        str(replace(post_op, kind=SUM) if post_op.input == index else post_op) for post_op in post_ops_of(definition)
    ]
    return definition.changed(arguments={"post_ops": texts})


PASS = Pass(
    "residual-fusion",
    "Layers add the other branch's tensor to their result, in place where they may.",
    edit,
    needs=(may_add, takes_post_ops),
)
