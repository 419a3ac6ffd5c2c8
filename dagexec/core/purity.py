"""Which operators may be dropped, merged or computed ahead: those that only write what their inputs decide."""

from __future__ import annotations

from collections.abc import Iterable

from dagexec.core.node import Node
from dagexec.core.registry import operator_module, schema_of, sub_nets_of

_OWN = "dagexec.ops."
_FOR_ORDER_ONLY = "NoOp"


def only_computes(definition: Node) -> bool:
    """True when it is of this package and has no effects, nor have operators of nets that it runs."""
    schema = schema_of(definition.type)
    if not operator_module(definition.type).startswith(_OWN) or schema.calls_application:
        return False
    inner = (one for net in sub_nets_of(definition, schema).values() for one in net.op)
    return not schema.effects and not schema.mutates and all(map(only_computes, inner))


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
    inner = (one for net in sub_nets_of(definition, schema).values() for one in net.op)
    return schema.reproducible and all(map(_is_reproducible, inner))
