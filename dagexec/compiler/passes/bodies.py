"""bodies: the nets that operators run (`dagexec.core.body`) get passes of their own: simplification, and engines.

What a body captures that is constant outside is a parameter inside. Parameters that its passes make become parameters
of the model, which the body captures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field

from dagexec.compiler.passes.catalog import SIMPLIFYING
from dagexec.compiler.passes.draft import Array, Draft
from dagexec.compiler.passes.engine import ENGINE
from dagexec.compiler.passes.rewriting import Pass, run_passes
from dagexec.compiler.passes.types import BlobType, blob_type
from dagexec.core.arguments import ArgumentValue
from dagexec.core.body_types import Seen
from dagexec.core.inference import body_types
from dagexec.core.model import InputInfo, Model
from dagexec.core.node import Node
from dagexec.core.program import Program
from dagexec.core.registry import schema_of, sub_nets_of
from dagexec.core.schema import OpSchema, TensorType
from dagexec.platform.records import dataclass


def edit(draft: Draft) -> None:
    """Rewrite the bodies of all operators, those of operators in bodies included."""
    running = [
        number for number in draft.having(_runs_nets) if sub_nets_of(draft[number], schema_of(draft[number].type))
    ]
    types = draft.types() if running else {}
    for number in running:
        _rewrite(draft, number, draft[number], types)


def _runs_nets(schema: OpSchema) -> bool:
    return bool(schema.sub_nets)


@dataclass
class _Captures:
    """What the bodies of an operator capture: the names inside of `constants`, and the names outside by those inside.

    `used` are those that the rewritten bodies read, and `types` what is known of captured ones.
    """

    outside: Mapping[str, str]
    constants: Mapping[str, Array]
    types: Mapping[str, InputInfo]
    used: dict[str, str] = field(default_factory=dict)


def _rewrite(draft: Draft, number: int, definition: Node, types: Mapping[str, BlobType]) -> None:
    names = draft.arguments(number).strings("captured")
    own = definition.input[: len(definition.input) - len(names)]
    outside = dict(zip(names, definition.input[len(own) :], strict=True))
    constants = {inside: array for inside, name in outside.items() if (array := draft.constant(name)) is not None}
    captures = _Captures(outside, constants, {inside: _info(types.get(name)) for inside, name in outside.items()})
    nets = sub_nets_of(definition, schema_of(definition.type))
    takes_values = any(name not in outside for net in nets.values() for name in net.external_input)
    given = _given(draft, definition, types) if takes_values else {}
    changes = 0
    arguments: dict[str, ArgumentValue | None] = {}
    for argument, net in nets.items():
        rewritten, count = _rewritten(draft, net, captures, given.get(argument, ()))
        arguments[argument] = rewritten.message()
        changes += count
    if not changes:
        return
    arguments["captured"] = list(captures.used)
    draft.changed(f"{draft.label(number)}: {changes} changes in the nets that it runs")
    draft.replace(number, definition.changed(inputs=[*own, *captures.used.values()], arguments=arguments))


def _given(draft: Draft, definition: Node, types: Mapping[str, BlobType]) -> dict[str, list[InputInfo]]:
    """What is known of the values that an operator gives its nets, by argument."""
    known = [types.get(name) for name in definition.input]
    contents = [draft.constant(name) for name in definition.input]
    probes = max((len(kind.shapes) for kind in known if kind is not None), default=1)
    found: dict[str, list[Sequence[TensorType | None]]] = {}
    for probe in range(probes):
        inputs = [None if kind is None else TensorType(kind.shapes[probe], kind.meta) for kind in known]
        around = body_types(definition, Seen(inputs, contents))
        for argument, given in around.given.items() if around is not None else ():
            found.setdefault(argument, []).append(given)
    return {
        argument: [_info(blob_type(column)) for column in zip(*rows, strict=True)]
        for argument, rows in found.items()
        if len(rows) == probes
    }


def _info(kind: BlobType | None) -> InputInfo:
    return InputInfo() if kind is None else InputInfo(kind.meta, kind.shape)


def _rewritten(draft: Draft, net: Program, captures: _Captures, types: Sequence[InputInfo]) -> tuple[Program, int]:
    """A body after its passes, and how many changes these made; what it captures is noted.

    `types` are those of the values it is given, as far as they are known.
    """
    given = [name for name in net.external_input if name not in captures.outside]
    parameters = {name: captures.constants[name] for name in net.external_input if name in captures.constants}
    known = {**captures.types, **dict(zip(given, types, strict=False))}
    inputs = {name: known.get(name, InputInfo()) for name in net.external_input if name not in parameters}
    model = Model(net.name, net, parameters=parameters, inputs=inputs, outputs=tuple(net.external_output))
    report = run_passes(model, (*SIMPLIFYING, ENGINE, PASS))
    result = report.model.program
    read = {name for operator in result.op for name in operator.input} | set(result.external_output)
    taken = read | captures.outside.keys() | {name for operator in result.op for name in operator.output}
    made = {
        name: _add_parameter(draft, f"{net.name}/{name}", array, taken)
        for name, array in report.model.parameters.items()
        if name in read and array is not parameters.get(name)
    }
    operators = [operator.renamed(made) if made.keys() & set(operator.input) else operator for operator in result.op]
    found = {name: outer for name, outer in captures.outside.items() if name in read and name not in made}
    found |= {name: name for name in made.values()}
    captures.used.update(found)
    return result.with_operators(operators).with_external_input([*given, *found]), report.changes


def _add_parameter(draft: Draft, hint: str, array: Array, taken: set[str]) -> str:
    """A new parameter of the model with a name that nothing in a body has."""
    name = draft.fresh(hint)
    while name in taken:
        name = draft.fresh(hint)
    draft.add_parameter_named(name, array)
    return name


PASS = Pass(
    "bodies", "Nets inside of operators are simplified, and their operators name the engine.", edit, needs=(_runs_nets,)
)
