"""elementwise-fusion: element-wise operators in a row become one `FusedElementwise`.

A chain starts with any element-wise operator and continues as long as its result has one reader, which is element-wise
and keeps the shape: the tensor is then read and written once. A batch normalization in inference counts as a product
and a sum with a number a channel. Where the chain reads a layer's result alone and no other tensor, the layer applies
it: products and sums with numbers, which activation-fusion does not take for activations.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from dagexec.compiler.passes.affine import normalization
from dagexec.compiler.passes.draft import Array, Draft
from dagexec.compiler.passes.fusion import (
    FUSED_CHAIN,
    described,
    fused,
    has_room,
    layer_meta,
    post_ops_of,
    takes_post_ops,
)
from dagexec.compiler.passes.post_operations import FUSED_TYPES, MAX_POST_OPS, Link, Types, operand_links, unary_links
from dagexec.compiler.passes.rewriting import Pass
from dagexec.core.node import Node, new_node
from dagexec.core.registry import schema_of
from dagexec.core.schema import OpSchema
from dagexec.ops.families.activation.post_ops import SUM, PostOp
from dagexec.platform.cached import cached_property

Links = tuple[Link, ...]


def edit(draft: Draft) -> None:
    """Make chains of two and more operators, from the front of the list on."""
    fusion = _Fusion(draft)
    for number in draft.having(_may_be_link):
        if number in draft and number not in fusion.members:
            fusion.fuse_from(number)


def _may_be_link(schema: OpSchema) -> bool:
    return schema.post_ops is not None or schema.type in (FUSED_CHAIN, "SpatialBN")


class _Fusion:
    """The fusions of one net. `members` are the operators that are in a chain, even if it is of one."""

    def __init__(self, draft: Draft) -> None:
        self.members: set[int] = set()
        self._draft = draft
        self._has_layers = draft.has(takes_post_ops)
        self._computed: dict[str, Array] = {}

    def fuse_from(self, number: int) -> None:
        """Fuse the longest chain that begins with operator `number`."""
        draft = self._draft
        source, links = self._start(number) if self._has_neighbor(number) else ("", ())
        if not links:
            return
        chain = [number]
        while True:
            name = draft[chain[-1]].output[0]
            reader = draft.only_reader(name)
            more = () if reader is None or reader in self.members else self._links(reader, name)
            if reader is None or not more or len(links) + len(more) > MAX_POST_OPS:
                break
            links += more
            chain.append(reader)
        self.members.update(chain)
        layer = self._layer_before(number, source, links)
        if layer is not None:
            self._give_to_layer(layer, chain, links)
        elif len(chain) > 1:
            self._write(chain, source, links)

    @cached_property
    def _types(self) -> Types:
        """Those before the first fusion, asked for where there may be one."""
        return self._draft.types()

    def _has_neighbor(self, number: int) -> bool:
        """True when operator `number` may be fused with the one that reads its result, or a layer before it."""
        draft = self._draft
        definition = draft[number]
        reader = draft.only_reader(definition.output[0]) if definition.output else None
        if reader is not None and reader not in self.members and self._may_follow(draft[reader]):
            return True
        writers = map(draft.producer, definition.input) if self._has_layers else ()
        return any(one is not None and schema_of(draft[one].type).once(takes_post_ops) for one in writers)

    @staticmethod
    def _may_follow(definition: Node) -> bool:
        return len(definition.input) <= MAX_POST_OPS + 1 and schema_of(definition.type).once(_may_be_link)

    def _layer_before(self, number: int, source: str, links: Links) -> int | None:
        """The layer whose result only operator `number` reads, if it can apply `links`: those with numbers alone."""
        draft = self._draft
        layer = draft.producer(source)
        if layer is None or draft.only_reader(source) != number or any(link.operand for link in links):
            return None
        return layer if layer_meta(draft, layer) is not None and has_room(draft[layer], links) else None

    def _give_to_layer(self, layer: int, chain: list[int], links: Links) -> None:
        draft, last = self._draft, chain[-1]
        draft.changed(f"{draft.label(layer)} applies {described(links)} of {draft.label(last)}")
        draft.replace(last, fused(draft[layer], links, draft[last].output[0]))
        for member in (layer, *chain[:-1]):
            draft.remove(member)

    def _write(self, chain: list[int], source: str, links: Links) -> None:
        draft, last = self._draft, chain[-1]
        for link in links:
            if link.operand in self._computed:
                draft.add_parameter_named(link.operand, self._computed[link.operand])
        output = draft[last].output[0]
        draft.changed(f"{len(chain)} operators up to {draft.label(last)} become one: {described(links)}")
        base = new_node(FUSED_CHAIN, [source], [output], name=draft[last].name)
        draft.replace(last, fused(base, links, output))
        for member in chain[:-1]:
            draft.remove(member)

    def _start(self, number: int) -> tuple[str, Links]:
        """The input that the chain of operator `number` begins with, and the operator's links to it."""
        draft = self._draft
        if draft.is_free(number):
            for source in dict.fromkeys(draft[number].input):
                links = self._links(number, source) if draft.constant(source) is None else ()
                if links:
                    return source, links
        return "", ()

    def _links(self, number: int, source: str) -> Links:
        """What operator `number` does to `source`, as links; none when it is no link."""
        definition, kind = self._draft[number], self._types.get(source)
        if kind is None or kind.meta not in FUSED_TYPES:
            return ()
        if definition.type == FUSED_CHAIN:
            return self._links_of_chain(number, source)
        if definition.type == "SpatialBN":
            return self._links_of_normalization(number, source)
        return unary_links(definition, kind.meta) or operand_links(self._draft, number, source, self._types)

    def _links_of_chain(self, number: int, source: str) -> Links:
        definition = self._draft[number]
        post_ops = post_ops_of(definition)
        if definition.input[0] != source or any(post_op.kind == SUM for post_op in post_ops):
            return ()
        return tuple(
            Link(post_op) if post_op.input < 0 else Link(replace(post_op, input=-1), definition.input[post_op.input])
            for post_op in post_ops
        )

    def _links_of_normalization(self, number: int, source: str) -> Links:
        """A product and a sum with constants that have an element a channel, and size 1 on the other axes."""
        definition, kind = self._draft[number], self._types[source]
        affine = normalization(self._draft, number) if definition.input[0] == source else None
        order = self._draft.arguments(number).string("order", "NCHW").upper()
        if affine is None or not affine.is_finite or order not in ("NCHW", "NHWC") or kind.rank < 2:
            return ()
        shape = [1] * kind.rank
        shape[1 if order == "NCHW" else -1] = affine.factor.size
        links = []
        for kind_name, what, vector in (("mul", "factor", affine.factor), ("add", "shift", affine.shift)):
            name = self._draft.fresh(f"{definition.output[0]}/{what}")
            self._computed[name] = vector.astype(np.dtype(kind.meta.numpy)).reshape(shape)
            links.append(Link(PostOp(kind_name), name))
        return tuple(links)


PASS = Pass("elementwise-fusion", "Element-wise operators in a row become one.", edit, needs=(_may_be_link,))
