"""in-place: an element-wise operator whose input dies there writes its result over it.

It touches half the memory then. Only operators that compute each element from the one at its place may, where their
schemas allow it; and only where all other readers of the input come before in any case, so that nothing waits for it.
What oneDNN computes with maxima keeps its input, to compute it again where there is a NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from functools import cache

from dagexec.compiler.passes.draft import Draft
from dagexec.compiler.passes.fusion import FUSED_CHAIN, post_ops_of
from dagexec.compiler.passes.ordering import Ordering, other_readers
from dagexec.compiler.passes.rewriting import Pass
from dagexec.core.node import Node
from dagexec.core.registry import schema_of
from dagexec.core.schema import OpSchema
from dagexec.core.shape_values import asked_operators
from dagexec.core.traits import ImageRole
from dagexec.ops.engines.onednn.post_ops import drops_nan
from dagexec.ops.families.activation.post_ops import PostOp, as_post_ops


def edit(draft: Draft) -> None:
    """Decide for all operators while each blob has one value, then rename."""
    candidates = [number for number in draft.having(_is_elementwise) if _may_write_over_an_input(draft, number)]
    if not candidates:
        return
    ordering = cache(lambda: Ordering(draft, draft.types()))  # asked for where a blob has several readers
    names: dict[str, str] = {}
    kept = set(_shape_values(draft)) if draft.has(_reads_values) else set()
    for number in candidates:
        source = _dying_input(draft, number, ordering, kept)
        if source is not None:
            names[source] = draft[number].output[0]
            kept.add(source)  # for who reads it too
            draft.changed(f"{draft.label(number)} writes over {source!r}")
    for old in reversed(list(names)):  # a result that is written over in turn comes later
        names[old] = names.get(names[old], names[old])
    if names:
        program = draft.model.program
        touched = names.keys()
        renamed = [
            one if touched.isdisjoint(one.input) and touched.isdisjoint(one.output) else one.renamed(names)
            for one in program.op
        ]
        draft.become(draft.model.changed(net=program.with_operators(renamed)), ())


def _shape_values(draft: Draft) -> frozenset[str]:
    """Blobs on whose values shapes depend: they are computed before a run, if nothing else is written to them."""
    definitions = [definition for _, definition in draft.operators()]
    asked = asked_operators(definitions, [schema_of(definition.type) for definition in definitions])
    return frozenset(name for index in asked for name in definitions[index].output)


def _is_elementwise(schema: OpSchema) -> bool:
    return schema.image_role in (ImageRole.ELEMENTWISE, ImageRole.PER_CHANNEL) and not schema.view


def _reads_values(schema: OpSchema) -> bool:
    return bool(schema.value_inputs)


def _may_write_over_an_input(draft: Draft, number: int) -> bool:
    definition = draft[number]
    schema = schema_of(definition.type)
    if len(definition.output) != 1 or not draft.is_free(number):
        return False
    if "ONEDNN" in definition.engine.split(",") and drops_nan(_functions(definition)):
        return False
    return any(schema.inplace(index, 0) for index in range(len(definition.input)))


def _functions(definition: Node) -> Sequence[PostOp]:
    """What an element-wise operator does, as post-ops, as far as they may concern NaN."""
    return post_ops_of(definition) or as_post_ops(definition) or ()


def _dying_input(draft: Draft, number: int, ordering: Callable[[], Ordering], kept: Set[str]) -> str | None:
    """An input, but none of `kept`, that `number` may write over: of the result's type, and not read from then on."""
    definition = draft[number]
    result = definition.output[0]
    inplace = schema_of(definition.type).inplace
    for index, name in enumerate(definition.input):
        if not inplace(index, 0) or definition.input.count(name) != 1 or name in kept:
            continue
        if definition.type == FUSED_CHAIN and index > 0:
            continue
        others = other_readers(draft, name, number)
        types = {} if others is None else draft.types()
        if others is None or name not in types or types[name] != types.get(result):
            continue
        if not others or ordering().are_before(others, number):
            return name
    return None


PASS = Pass(
    "in-place", "Element-wise operators write over inputs that die there.", edit, needs=(_is_elementwise,), retypes=True
)
