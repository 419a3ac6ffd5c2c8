"""`dagexec inspect`: the operators, chains, shapes and work of a model, and a drawing of its DAG."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dagexec.analysis.plot import check_drawing, draw_graph
from dagexec.cli.arguments import PassOption, SetOption, parse_arguments
from dagexec.cli.compiled import (
    choices_in_words,
    compiled_rows,
    compiled_table,
    compiled_without_measuring,
    input_types,
)
from dagexec.cli.feeds import AllowIoOption, JsonOption, ModelArgument, ShapeOption, read_model, with_shapes
from dagexec.cli.json_output import print_json
from dagexec.cli.memory import memory_rows, memory_table
from dagexec.cli.passes import pass_outcomes, pass_table, passes_as_list
from dagexec.cli.reports import ReportOption, write_report
from dagexec.core.graph import Graph, build_graph
from dagexec.core.inference import NetTypes, infer_net
from dagexec.core.model import InputInfo, Model
from dagexec.core.node import Node
from dagexec.core.operator_arguments import with_arguments
from dagexec.core.registry import schema_of, sub_nets_of
from dagexec.report.document import Report, check_report
from dagexec.report.graph import GraphSection
from dagexec.scheduler.plan.plan import Plan, build_plan


def inspect_command(
    model: ModelArgument,
    shape: ShapeOption = None,
    settings: SetOption = None,
    draw: Annotated[
        Path | None,
        typer.Option("--draw", metavar="FILE.png", help="Draw the DAG, colored by chain (.png, .svg, .dot)."),
    ] = None,
    memory: Annotated[
        bool, typer.Option("--memory", help="Show the memory plan for each net type; see docs/memory.md.")
    ] = False,
    passes: Annotated[
        bool, typer.Option("--passes", help="Show what each pass of compilation changes; see docs/passes.md.")
    ] = False,
    own_passes: PassOption = None,
    without_pass: Annotated[
        list[str] | None,
        typer.Option("--without-pass", metavar="NAME", help="Skip a pass. May be repeated."),
    ] = None,
    compiled: Annotated[
        bool,
        typer.Option("--compiled", help="Show the compiled operators: engine, layout; see docs/tuning.md."),
    ] = False,
    device: Annotated[
        str, typer.Option("--device", help="With --compiled: the device to compile for, cpu, sim:N or cuda:N.")
    ] = "cpu",
    report: ReportOption = None,
    allow_io: AllowIoOption = False,
    as_json: JsonOption = False,
) -> None:
    """List the operators of MODEL with their chains, shapes and FLOPs."""
    if draw is not None:
        check_drawing(draw)
    if report is not None:
        check_report(report)
    arguments = parse_arguments(settings)
    loaded, shapes = with_shapes(read_model(model, allow_io), shape or ())
    if arguments:
        loaded = replace(loaded, net=with_arguments(loaded.net, arguments))
    graph = build_graph(loaded.net, (loaded.parameters.keys() | loaded.inputs.keys()).__contains__)
    types = infer_net(graph, input_types(loaded, shapes), loaded.parameters)
    plan = build_plan(graph, [cost.seconds if cost else 0.0 for cost in types.costs])
    if draw is not None:
        draw_graph(plan, draw)
    if report is not None:
        write_report(Report(loaded.name, _in_words(loaded, graph, plan, types), [GraphSection(plan, types)]), report)
    rows = memory_rows(loaded, shapes) if memory else []
    wants_passes = passes or own_passes or without_pass
    outcomes = pass_outcomes(loaded, shapes, own_passes or (), without_pass or ()) if wants_passes else []
    result = compiled_without_measuring(loaded, shapes, device) if compiled else None
    if as_json:
        found = _as_dict(loaded, graph, plan, types)
        found |= {"memory": {row.net_type: asdict(row) for row in rows}} if rows else {}
        if result is not None:
            found["compiled"] = {"operators": compiled_rows(result, shapes), "choices": choices_in_words(result)}
        print_json(found | ({"passes": passes_as_list(outcomes)} if wants_passes else {}))
        return
    console = Console()
    _print_net(console, loaded, graph, plan, types, memory_table(rows) if rows else None)
    if wants_passes:
        console.print(pass_table(outcomes))
    if result is not None:
        console.print(compiled_table(compiled_rows(result, shapes)))
        for line in choices_in_words(result):
            console.print(line, markup=False)


def _print_net(console: Console, model: Model, graph: Graph, plan: Plan, types: NetTypes, memory: Table | None) -> None:
    """The net as it is given, for people: its operators, inputs and outputs."""
    console.print(_table(graph, plan, types))
    console.print(f"{model.name}: {'; '.join(_in_words(model, graph, plan, types))}", markup=False)
    for line in _foreign(graph):
        console.print(line, markup=False, highlight=False)
    for name, info in model.inputs.items():
        console.print(f"input  {name}: {info}", markup=False)
    for name, info in _overridable(model).items():
        console.print(f"input  {name}: {info}, the model has a default for it", markup=False)
    if memory is not None:
        console.print(memory)
    for name in model.outputs:
        console.print(f"output {name}: {types.blobs.get(name) or 'unknown until it runs'}", markup=False)


def _in_words(model: Model, graph: Graph, plan: Plan, types: NetTypes) -> tuple[str, ...]:
    edges = sum(len(row) for row in graph.children)
    reduced = sum(len(row) for row in graph.reduced_children)
    return (
        f"{len(graph)} operators in {len(plan.chains)} chains",
        f"{edges} dependencies, {reduced} after transitive reduction",
        f"{len(graph.views)} views",
        f"{_parameter_count(model):,} parameters",
        f"{types.flops / 1e9:.3f} GFLOP a run",
    )


def _parameter_count(model: Model) -> int:
    return sum(array.size for array in model.parameters.values())


def _overridable(model: Model) -> Mapping[str, InputInfo]:
    return {} if model.overridable is None else model.overridable.inputs


def _foreign(graph: Graph) -> Iterator[str]:
    """A line for each operator that another runtime computes, and one for each reason."""
    for index, definition in enumerate(graph.operators):
        if reasons := _reasons(graph, index):
            yield f"operator {index}, {definition.type}, is computed by another runtime:"
            yield from (f"  {reason}" for reason in reasons)


def _reasons(graph: Graph, index: int) -> list[str]:
    """Why another runtime computes an operator; none when it does not."""
    return graph.operators[index].arguments().strings("reasons") if graph.schemas[index].foreign else []


def _table(graph: Graph, plan: Plan, types: NetTypes) -> Table:
    table = Table(title=Text(f"net {graph.name}", "table.title"))
    for column in ("#", "operator", "chain", "output", "type", "MFLOP"):
        table.add_column(column, justify="right" if column in ("#", "chain", "MFLOP") else "left")
    chain_of = plan.chain_of
    for index, definition in enumerate(graph.operators):
        cost = types.costs[index]
        outputs = zip(definition.output, types.outputs[index], strict=True)
        names, kinds = [], []
        for name, kind in outputs:
            names.append(name)
            kinds.append(str(kind) if kind else "unknown")
        flops = f"{cost.flops / 1e6:.3f}" if cost else ""
        view = " (view)" if index in graph.views else ""
        table.add_row(
            str(index), definition.type + view, str(chain_of[index]), Text("\n".join(names)), "\n".join(kinds), flops
        )
        for number, inner in _inner_operators(definition, str(index)):
            table.add_row(number, inner.type, "", Text("\n".join(inner.output)), "", "")
    return table


def _inner_operators(definition: Node, number: str) -> Iterator[tuple[str, Node]]:
    """The operators of the nets that an operator runs, each with its number: 3.then_net.0 stands in operator 3."""
    for argument, net in sub_nets_of(definition, schema_of(definition.type)).items():
        for index, inner in enumerate(net.op):
            place = f"{number}.{argument}.{index}"
            yield place, inner
            yield from _inner_operators(inner, place)


def _as_dict(model: Model, graph: Graph, plan: Plan, types: NetTypes) -> dict[str, object]:
    chain_of = plan.chain_of
    operators = []
    for index, definition in enumerate(graph.operators):
        cost = types.costs[index]
        operators.append(
            {
                "type": definition.type,
                "name": definition.name,
                "inputs": list(definition.input),
                "outputs": list(definition.output),
                "shapes": [list(kind.shape) if kind else None for kind in types.outputs[index]],
                "dtypes": [str(kind.meta) if kind else None for kind in types.outputs[index]],
                "chain": chain_of[index],
                "flops": cost.flops if cost else None,
                "parents": list(graph.parents[index]),
                "view": index in graph.views,
                "foreign": definition.arguments().strings("reasons") if graph.schemas[index].foreign else [],
                "inner": [
                    {"number": number, "type": inner.type, "name": inner.name, "outputs": list(inner.output)}
                    for number, inner in _inner_operators(definition, str(index))
                ],
            }
        )
    return {
        "model": model.name,
        "operators": operators,
        "chains": [list(chain) for chain in plan.chains],
        "parameters": _parameter_count(model),
        "flops": types.flops,
        "inputs": {name: str(info) for name, info in model.inputs.items()},
        "overridable": {name: str(info) for name, info in _overridable(model).items()},
        "outputs": list(model.outputs),
    }
