"""`dagexec check`: prove that a net is free of races in every schedule, or show which accesses are not ordered."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dagexec.analysis.comparison import random_feeds
from dagexec.analysis.state_space import RunSpace, search_runs
from dagexec.cli.arguments import OptimizeOption, SetOption, parse_arguments
from dagexec.cli.check_foreign import check_foreign
from dagexec.cli.completion import complete_net_type
from dagexec.cli.feeds import AllowIoOption, JsonOption, OptionalModelArgument, ShapeOption, read_model, with_shapes
from dagexec.cli.json_output import print_json
from dagexec.cli.reports import ReportOption, write_report
from dagexec.errors import SettingError
from dagexec.executor.compile import compile
from dagexec.platform.processor import available_cores
from dagexec.report.document import Report, check_report
from dagexec.report.graph import GraphSection
from dagexec.report.hazards import HazardsSection, missing_edges
from dagexec.scheduler.hazards import PieceFault, Proof, UnorderedAccesses, check_net
from dagexec.scheduler.plan.plan import build_plan

_NOT_PROVEN = 1


def check_command(
    model: OptionalModelArgument = None,
    graph: Annotated[
        Path | None,
        typer.Option("--graph", metavar="FILE", help="In place of MODEL, a graph of another system: docs/hazards.md."),
    ] = None,
    net_type: Annotated[
        str, typer.Option("--net-type", help="simple, dag or async_dag.", autocompletion=complete_net_type)
    ] = "async_dag",
    device: Annotated[
        str, typer.Option("--device", help="cpu, sim:N or cuda:N, for operators that do not name one.")
    ] = "sim:0",
    num_workers: Annotated[
        int | None, typer.Option("--num-workers", min=1, help="Workers that launch. Default: one per core.")
    ] = None,
    streams: Annotated[
        int | None,
        typer.Option("--streams", min=1, help="Total streams of each device. Default: one per worker."),
    ] = None,
    settings: SetOption = None,
    optimize: OptimizeOption = False,
    shape: ShapeOption = None,
    exhaustive: Annotated[
        bool, typer.Option("--exhaustive", help="Look at every state of a run on the workers, and stop it in each.")
    ] = False,
    seconds: Annotated[
        float, typer.Option("--seconds", min=0, help="For --exhaustive: when to end it, proved or not.")
    ] = 60.0,
    report: ReportOption = None,
    allow_io: AllowIoOption = False,
    as_json: JsonOption = False,
) -> None:
    """Prove that every schedule of MODEL orders all conflicting accesses; otherwise list violations, exit status 1.

    With --graph, prove the same of a graph of operators, threads, streams and events, whichever system runs it.
    Where a run with these shapes is a step of a decoder (docs/embedding.md), the same is proved of the step's net.
    With --exhaustive, look at every state of a run as well, and stop it in each: no deadlock, no task lost or done
    twice or begun too early; otherwise list the events that lead there, exit status 1.
    """
    if graph is not None and model is None:
        if not check_foreign(graph, as_json):
            raise typer.Exit(_NOT_PROVEN)
        return
    if model is None or graph is not None:
        raise SettingError("give either MODEL or --graph FILE")
    if report is not None:
        check_report(report)
    loaded, shapes = with_shapes(read_model(model, allow_io, device), shape or ())
    arguments = parse_arguments(settings)
    with (
        Console(stderr=True).status(Text(f"Checking {loaded.name}")),
        compile(
            loaded,
            optimize=optimize,
            net_type=net_type,
            device=device,
            num_workers=num_workers,
            operator_arguments=arguments,
        ) as executor,
    ):
        net = executor.net()
        by_name = any(info.shape is None and name not in shapes for name, info in loaded.inputs.items())
        if not by_name:
            for name, array in random_feeds(loaded, shapes).items():
                net.workspace.feed_blob(name, array)
            net.prepared()
        if exhaustive and by_name:
            raise SettingError("--exhaustive: an input has no known shape, give it with --shape")
        start = time.perf_counter()
        proof = check_net(net, streams, by_name=by_name)
        proof_seconds = time.perf_counter() - start
        spaces = list(search_runs(net, num_workers or available_cores(), seconds=seconds)) if exhaustive else []
        plan = build_plan(net.graph, [0.0] * len(net.graph)) if by_name else net.plan
        start, purpose, other = time.perf_counter(), "", None
        if not by_name:
            with executor.net_instead(random_feeds(loaded, shapes)) as instead:
                start = time.perf_counter()
                if instead is not None:
                    purpose, other = instead[0], check_net(instead[1], streams)
        other_seconds = time.perf_counter() - start
    if as_json:
        setting = {"model": loaded.name, "net_type": net_type, "device": device, "streams": streams}
        of_other = None if other is None else {"for": purpose} | _as_dict(other, other_seconds, [])
        print_json(setting | {"by_name": by_name} | _as_dict(proof, proof_seconds, spaces) | {"instead": of_other})
    else:
        _print(f"{loaded.name}: {net_type} on {device}", proof, proof_seconds, by_name)
        for space in spaces:
            _print_space(space)
        if other is not None:
            _print(f"{loaded.name}: {purpose}", other, other_seconds, by_name=False)
    if report is not None:
        section = GraphSection(plan, missing=missing_edges(proof, plan.graph))
        lines = (f"{net_type} on {device}: {proof.operators} operators in {proof.chains} chains",)
        write_report(Report(loaded.name, lines, [HazardsSection(proof, plan.graph), section]), report)
    if not all(each.holds for each in (proof, other) if each is not None) or any(
        space.found.fault is not None for space in spaces
    ):
        raise typer.Exit(_NOT_PROVEN)


def _print(title: str, proof: Proof, seconds: float, by_name: bool) -> None:
    console = Console()
    table = Table(title=Text(title, "table.title"), show_header=False)
    table.add_column()
    table.add_column(justify="right")
    guards = {f"operators under the mutex of the {mutex}": count for mutex, count in sorted(proof.guards.items())}
    rows = {
        "operators": proof.operators,
        "chains": proof.chains,
        "dependencies between chains": proof.dependencies,
        "events recorded": proof.events,
        "waits for an event": proof.waits,
        **guards,
        "memories that operators compete for": proof.resources,
        "pairs of accesses checked": proof.pairs_checked,
        "pieces of operators executed alone": proof.pieces,
        "unordered": len(proof.unordered),
        "overwritten": len(proof.overwritten),
        "faults of pieces": len(proof.faults),
    }
    for what, count in rows.items():
        table.add_row(what, f"{count:,}")
    table.add_row("seconds", f"{seconds:.3f}")
    console.print(table)
    if by_name:
        console.print("An input has no known shape (see --shape): blobs are distinguished by name, not by memory.")
    if proof.holds:
        console.print(
            "Proved: every pair is ordered or mutually exclusive, on any stream and in any schedule.", style="green"
        )
        return
    for found in (*proof.unordered, *proof.overwritten, *proof.faults):
        console.print(Text(str(found), "red"), soft_wrap=True)


def _print_space(space: RunSpace) -> None:
    console, found = Console(), space.found
    size = f"{space.tasks:,} tasks in {space.pieces:,} pieces, of which {space.ordered:,} pairs touch the same memory"
    searched = f"{found.states:,} states and {found.transitions:,} events in {found.seconds:.1f} s"
    console.print(
        Text(f"{space.net} on {space.workers} workers: {size}; {searched}, stopped {space.stops:,} times"),
        soft_wrap=True,
    )
    if found.fault is not None:
        lines = [*(f"  {number}. {event}" for number, event in enumerate(found.path, 1)), found.fault]
        console.print(Text("\n".join(lines), "red"), soft_wrap=True)
    elif found.exhausted:
        console.print("Proved: in every state, no deadlock, and each task once and after all it needs.", style="green")
    else:
        console.print(
            f"Not proved, time was up: no fault within {found.depth:,} events; "
            f"{found.waiting:,} states were not looked at (see --seconds).",
            style="yellow",
        )


def _as_dict(proof: Proof, seconds: float, spaces: Sequence[RunSpace]) -> dict[str, object]:
    counts = {key: value for key, value in asdict(proof).items() if key not in ("unordered", "overwritten", "faults")}
    unordered = [_found(found) for found in proof.unordered]
    overwritten = [asdict(found) for found in proof.overwritten]
    faults = [_found(found) for found in proof.faults]
    return counts | {
        "holds": proof.holds, "unordered": unordered, "overwritten": overwritten, "faults": faults, "seconds": seconds,
        "exhaustive": [asdict(space) | {"proved": space.found.holds} for space in spaces],
    }  # fmt: skip


def _found(found: UnorderedAccesses | PieceFault) -> dict[str, object]:
    return asdict(found) | {"kind": found.kind.name}
