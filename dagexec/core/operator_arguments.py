"""Arguments for all operators of a net that know them: `exhaustive_search=1`, say, for every convolution."""

from __future__ import annotations

from collections.abc import Mapping

from dagexec.core.arguments import ArgumentValue, make_argument
from dagexec.core.proto import NetDef
from dagexec.core.registry import schema_of
from dagexec.errors import ArgumentError


def with_arguments(net: NetDef, arguments: Mapping[str, ArgumentValue]) -> NetDef:
    """A copy of `net` whose operators have those of `arguments` that their schema lists and that they lack.

    Raises ArgumentError for an argument that no operator of the net knows, UnsupportedOperatorError for an operator
    type without a schema.
    """
    changed = NetDef()
    changed.CopyFrom(net)
    known: set[str] = set()
    for definition in changed.op:
        schema = schema_of(definition.type)
        present = {argument.name for argument in definition.arg}
        for name, value in arguments.items():
            if name in schema.args:
                known.add(name)
                if name not in present:
                    definition.arg.append(make_argument(name, value))
    unknown = sorted(set(arguments) - known)
    if unknown:
        raise ArgumentError(f"net {net.name!r}: no operator knows the argument(s) {', '.join(unknown)}")
    return changed
