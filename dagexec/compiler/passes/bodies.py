"""bodies: the nets that operators run (`dagexec.core.body`) get passes of their own: simplification, and engines.

What a body captures that is constant outside is a parameter inside. Parameters that its passes make become parameters
of the model, which the body captures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dagexec.compiler.passes.catalog import SIMPLIFYING
from dagexec.compiler.passes.draft import Array, Draft, copied, renamed
from dagexec.compiler.passes.engine import ENGINE
from dagexec.compiler.passes.rewriting import Pass, Rewritten, run_passes
from dagexec.core.arguments import make_argument
from dagexec.core.model import InputInfo, Model
from dagexec.core.proto import NetDef, OperatorDef
from dagexec.core.registry import schema_of, sub_nets_of


def apply(model: Model) -> Rewritten:
    """Rewrite the bodies of all operators, those of operators in bodies included."""
    draft = Draft(model)
    for number, definition in draft.operators():
        if sub_nets_of(definition, schema_of(definition.type)):
            _rewrite(draft, number, definition)
    return draft.finish()


@dataclass
class _Captures:
    """What the bodies of an operator capture: the names inside of `constants`, and the names outside by those inside.

    `used` are those that the rewritten bodies read.
    """

    outside: Mapping[str, str]
    constants: Mapping[str, Array]
    used: dict[str, str] = field(default_factory=dict)


def _rewrite(draft: Draft, number: int, definition: OperatorDef) -> None:
    names = draft.arguments(number).strings("captured")
    own = list(definition.input)[: len(definition.input) - len(names)]
    outside = dict(zip(names, definition.input[len(own) :], strict=True))
    constants = {inside: array for inside, name in outside.items() if (array := draft.constant(name)) is not None}
    captures = _Captures(outside, constants)
    changed = copied(definition)
    changes = 0
    for argument in changed.arg:
        if argument.name in schema_of(definition.type).sub_nets:
            net, count = _rewritten(draft, argument.n, captures)
            argument.n.CopyFrom(net)
            changes += count
    if not changes:
        return
    changed.input[:] = [*own, *captures.used.values()]
    kept = [argument for argument in changed.arg if argument.name != "captured"]
    del changed.arg[:]
    changed.arg.extend([*kept, make_argument("captured", list(captures.used))])
    draft.changed(f"{draft.label(number)}: {changes} changes in the nets that it runs")
    draft.replace(number, changed)


def _rewritten(draft: Draft, net: NetDef, captures: _Captures) -> tuple[NetDef, int]:
    """A body after its passes, and how many changes these made; what it captures is noted."""
    given = [name for name in net.external_input if name not in captures.outside]
    parameters = {name: captures.constants[name] for name in net.external_input if name in captures.constants}
    inputs = {name: InputInfo() for name in net.external_input if name not in parameters}
    model = Model(net.name, net, parameters=parameters, inputs=inputs, outputs=tuple(net.external_output))
    report = run_passes(model, (*SIMPLIFYING, ENGINE, PASS))
    result = NetDef()
    result.CopyFrom(report.model.net)
    read = {name for operator in result.op for name in operator.input} | set(result.external_output)
    taken = read | captures.outside.keys() | {name for operator in result.op for name in operator.output}
    made = {
        name: _add_parameter(draft, f"{net.name}/{name}", array, taken)
        for name, array in report.model.parameters.items()
        if name in read and array is not parameters.get(name)
    }
    operators = [renamed(operator, made) if made.keys() & set(operator.input) else operator for operator in result.op]
    del result.op[:]
    result.op.extend(operators)
    found = {name: outer for name, outer in captures.outside.items() if name in read and name not in made}
    found |= {name: name for name in made.values()}
    captures.used.update(found)
    result.external_input[:] = [*given, *found]
    return result, report.changes


def _add_parameter(draft: Draft, hint: str, array: Array, taken: set[str]) -> str:
    """A new parameter of the model with a name that nothing in a body has."""
    name = draft.fresh(hint)
    while name in taken:
        name = draft.fresh(hint)
    draft.add_parameter_named(name, array)
    return name


PASS = Pass("bodies", "Nets inside of operators are simplified, and their operators name the engine.", apply)
