"""Which operators a pass may drop, merge or compute ahead: those that do nothing but write what their inputs decide."""

from __future__ import annotations

from dagexec.core.proto import OperatorDef
from dagexec.core.registry import operator_module, schema_of

_OWN = "dagexec.ops."
_FOR_ORDER_ONLY = "NoOp"


def has_no_effects(definition: OperatorDef) -> bool:
    """True when nothing is lost with the operator but its outputs.

    Of operators that an application registers nothing is known, so they stay; so do those whose point is the order.
    """
    return is_known(definition) and definition.type != _FOR_ORDER_ONLY


def is_known(definition: OperatorDef) -> bool:
    """True for operators of this package, which do no more than compute and may be run on inputs that are made up."""
    if not operator_module(definition.type).startswith(_OWN):
        return False
    schema = schema_of(definition.type)
    return not schema.effects and not schema.mutates


def is_pure(definition: OperatorDef) -> bool:
    """True when, moreover, the same inputs give the same outputs: fillers from a random generator do not."""
    return has_no_effects(definition) and schema_of(definition.type).reproducible
