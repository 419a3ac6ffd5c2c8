"""Stages of a pipeline, each rewritten as the model that it is alone: the same passes decide the same about it.

Passes decide over a whole net: the layout of its images, whether its parameters stay in a cache, what is folded into
what. Results of a stage would differ in their last digits from those of its model, and with what else is in the
pipeline. So its operators are taken out as a model of their own, with what that said of its inputs (`Model.stages`),
and what the passes make of it is put back in their place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dagexec.compiler.passes.dead_code import PASS as DEAD_CODE
from dagexec.compiler.passes.rewriting import PassOutcome, PassReport, run_passes
from dagexec.core.model import InputInfo, Model
from dagexec.core.node import Node
from dagexec.platform.records import dataclass


@dataclass(frozen=True)
class _Part:
    """A stage: its operators are those from `first` up to `last`, without the latter; `model` is of these alone."""

    model: Model
    first: int
    last: int


def by_stage(model: Model, rewrite: Callable[[Model], PassReport]) -> PassReport:
    """`rewrite` each stage of a pipeline by itself, and a model that is none as a whole.

    What is between the stages stays as it is. Outputs of stages that nobody reads are removed afterwards.
    """
    parts = _parts(model)
    if not parts:
        return rewrite(model)
    reports = [rewrite(part.model) for part in parts]
    outcomes: list[PassOutcome] = [one for report in reports for one in report.outcomes]
    joined = _joined(model, parts, [report.model for report in reports])
    last = run_passes(joined, [DEAD_CODE])
    return PassReport(last.model, (*outcomes, *last.outcomes))


def _parts(model: Model) -> list[_Part]:
    """The stages in their order; none where the operators of one do not stand together, as somebody moved them."""
    owners = [_owner(model, definition.name) for definition in model.program.op]
    found: list[_Part] = []
    for stage in model.stages:
        numbers = [number for number, owner in enumerate(owners) if owner == stage]
        if not numbers:
            continue
        first, last = numbers[0], numbers[-1] + 1
        if last - first != len(numbers):
            return []
        found.append(_Part(_alone(model, stage, first, last), first, last))
    return sorted(found, key=lambda part: part.first)


def _owner(model: Model, name: str) -> str:
    """The stage whose name is in front of `name`; "" for what is in none."""
    for place, letter in enumerate(name):
        if letter == "/" and name[:place] in model.stages:
            return name[:place]
    return ""


def _alone(model: Model, stage: str, first: int, last: int) -> Model:
    operators = model.program.op[first:last]
    types = model.stages[stage]
    written = {name for definition in operators for name in definition.output}
    read = _read_from_outside(operators)
    others = (*model.program.op[:first], *model.program.op[last:])
    wanted = {name for definition in others for name in _names_read(definition)} | set(model.outputs)
    outputs = dict.fromkeys((*types.outputs, *sorted(written & wanted)))
    parameters = {
        name: array for name, array in model.parameters.items() if name in read or _owner(model, name) == stage
    }
    inputs = {name: types.inputs.get(name) or model.inputs.get(name, InputInfo()) for name in read}
    inputs = {name: info for name, info in inputs.items() if name not in parameters}
    program = model.program.with_operators(operators).with_name(stage)
    return model.changed(
        name=stage, net=program, parameters=parameters, inputs=inputs, outputs=tuple(outputs), overridable=None,
        stages={},
    )  # fmt: skip


def _names_read(definition: Node) -> Sequence[str]:
    return (*definition.input, *definition.control_input)


def _read_from_outside(operators: Sequence[Node]) -> list[str]:
    """Blobs that operators read before one of them writes them, in the order of their reading."""
    written: set[str] = set()
    read: dict[str, None] = {}
    for definition in operators:
        read.update(dict.fromkeys(name for name in _names_read(definition) if name and name not in written))
        written.update(definition.output)
    return list(read)


def _joined(model: Model, parts: Sequence[_Part], rewritten: Sequence[Model]) -> Model:
    """`model` with what its `parts` were `rewritten` to. Blobs of two stages that passes gave one name get others."""
    operators: list[Node] = []
    parameters = dict(model.parameters)
    for part in parts:
        for name in part.model.parameters:
            parameters.pop(name, None)
    used = {name for definition in model.program.op for name in (*_names_read(definition), *definition.output)}
    used |= model.parameters.keys() | model.inputs.keys()
    end = 0
    for part, made in zip(parts, rewritten, strict=True):
        operators.extend(model.program.op[end : part.first])
        end = part.last
        own = {name for definition in part.model.program.op for name in (*_names_read(definition), *definition.output)}
        new = {name for definition in made.program.op for name in definition.output} | set(made.parameters)
        names = {name: _free(name, part.model.name, used) for name in new - own - part.model.parameters.keys()}
        used.update(names.values())
        parameters.update((names.get(name, name), array) for name, array in made.parameters.items())
        operators.extend(_renamed(definition, names) for definition in made.program.op)
    operators.extend(model.program.op[end:])
    return model.changed(net=model.program.with_operators(operators), parameters=parameters, stages={})


def _free(name: str, stage: str, used: set[str]) -> str:
    while name in used:
        name = f"{stage}/{name}"
    return name


def _renamed(definition: Node, names: dict[str, str]) -> Node:
    if not any(names.get(one, one) != one for one in (*_names_read(definition), *definition.output)):
        return definition
    controls = [names.get(one, one) for one in definition.control_input]
    return definition.renamed(names).changed(control_input=controls)
