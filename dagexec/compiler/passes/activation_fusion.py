"""activation-fusion: a convolution or fully connected layer applies the activations that follow it, before it writes.

`Conv` and `FC` become `FusedConv` and `FusedFC` with the activations as `post_ops`; any number of them in a row. The
layer's own result must have no other reader.
"""

from __future__ import annotations

from dagexec.compiler.passes.draft import Draft
from dagexec.compiler.passes.fusion import described, fused, has_room, layer_meta, takes_post_ops
from dagexec.compiler.passes.operator_traits import may_be_post_ops
from dagexec.compiler.passes.post_operations import unary_links
from dagexec.compiler.passes.rewriting import Pass


def edit(draft: Draft) -> None:
    """Fuse into each layer all activations behind it."""
    for number in draft.having(takes_post_ops):
        if number in draft:
            fuse_activations(draft, number)


def fuse_activations(draft: Draft, number: int) -> int:
    """Fuse into layer `number` what follows it; returns the number that it has then."""
    meta = layer_meta(draft, number)
    while meta is not None:
        definition = draft[number]
        reader = draft.only_reader(definition.output[0])
        links = () if reader is None else unary_links(draft[reader], meta)
        if reader is None or not links or not has_room(definition, links):
            break
        draft.changed(f"{draft.label(number)} applies {described(links)} of {draft.label(reader)}")
        draft.replace(reader, fused(definition, links, draft[reader].output[0]))
        draft.remove(number)
        number = reader
    return number


PASS = Pass(
    "activation-fusion",
    "Layers apply the activations that follow them.",
    edit,
    needs=(takes_post_ops, may_be_post_ops),
)
