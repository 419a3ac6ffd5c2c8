"""Which operators may be dropped, merged or computed ahead: those that only write what their inputs decide.

And which inputs others change.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

from dagexec.core.node import Node
from dagexec.core.registry import operator_module, schema_of, sub_nets_of
from dagexec.core.schema import OpSchema

_OWN = "dagexec.ops."
_FOR_ORDER_ONLY = "NoOp"


def only_computes(definition: Node) -> bool:
    """True when it is of this package and has no effects, nor have operators of nets that it runs."""
    schema = schema_of(definition.type)
    return schema.once(_only_computes_itself) and (not schema.sub_nets or all(map(only_computes, _inner(definition))))


def _only_computes_itself(schema: OpSchema) -> bool:
    is_own = operator_module(schema.type).startswith(_OWN) and not schema.calls_application
    return is_own and not schema.effects and not schema.mutates


def _inner(definition: Node) -> Iterator[Node]:
    """The operators of the nets that an operator runs."""
    return (one for net in sub_nets_of(definition, schema_of(definition.type)).values() for one in net.op)


def all_only_compute(definitions: Iterable[Node]) -> bool:
    """`only_computes` of all of them; those of one form are asked about once."""
    return all(map(only_computes, {one.form: one for one in definitions}.values()))


def has_no_effects(definition: Node) -> bool:
    """True when nothing is lost with the operator but its outputs.

    Of operators that an application registers nothing is known, so they stay; so do those whose point is the order.
    """
    return only_computes(definition) and definition.type != _FOR_ORDER_ONLY


def is_known(definition: Node) -> bool:
    """True for operators of this package, which do no more than compute and may be run on inputs that are made up.

    A loop may not: on such inputs it might never end.
    """
    return only_computes(definition) and not schema_of(definition.type).sub_nets


def is_pure(definition: Node) -> bool:
    """True when, moreover, the same inputs give the same outputs: fillers from a random generator do not."""
    return has_no_effects(definition) and _is_reproducible(definition)


def _is_reproducible(definition: Node) -> bool:
    schema = schema_of(definition.type)
    return schema.reproducible and (not schema.sub_nets or all(map(_is_reproducible, _inner(definition))))


def mutated(definition: Node, schema: OpSchema) -> tuple[int, ...]:
    """The inputs that it changes without naming them as outputs, be it by an operator of a net that it runs."""
    own = tuple(place for place in schema.mutates if place < len(definition.input))
    if not schema.sub_nets:
        return own
    return own + definition.values.once("mutated", partial(_mutated_inside, definition, schema))


def _mutated_inside(definition: Node, schema: OpSchema) -> tuple[int, ...]:
    """By operators of its nets, counted from behind the last input; the arguments decide it."""
    names = definition.arguments().strings("captured")
    changed = {
        one.input[place]
        for net in sub_nets_of(definition, schema).values()
        for one in net.op
        for place in mutated(one, schema_of(one.type))
    }
    return tuple(place - len(names) for place, name in enumerate(names) if name in changed)
