"""`dagexec stress`: random nets, callers, cancellations and faults, until a defect is found or the time is up."""

from __future__ import annotations

import dataclasses
import os
import sys
import traceback
from collections import Counter
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn, track
from rich.table import Table

from dagexec.cli.feeds import JsonOption
from dagexec.cli.json_output import print_json
from dagexec.errors import DagexecError
from dagexec.platform.extras import install_command

if TYPE_CHECKING:
    from dagexec.stress.report import StressReport

_DEFECT_FOUND = 1


def stress_command(
    seconds: Annotated[
        float | None, typer.Option("--seconds", min=0, help="Start no new case after this many seconds. Default: 60.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed that determines the cases.")] = 0,
    device: Annotated[
        str | None, typer.Option("--device", help="cpu, sim:N (also uses other devices) or cuda:N. Default: cpu.")
    ] = None,
    net_type: Annotated[
        str | None, typer.Option("--net-type", help="simple, dag or async_dag. Default: random in each case.")
    ] = None,
    cases: Annotated[int | None, typer.Option("--cases", min=1, help="Maximum number of cases.")] = None,
    case: Annotated[
        int | None, typer.Option("--case", min=0, help="Run only the case with this seed: once, or --cases times.")
    ] = None,
    hang_seconds: Annotated[
        float, typer.Option("--hang-seconds", min=0.1, help="A case that takes longer counts as hung.")
    ] = 60.0,
    joined: Annotated[
        int | None, typer.Option("--joined", min=1, help="Instead of cases: this many requests that are joined.")
    ] = None,
    max_batch: Annotated[int, typer.Option("--max-batch", min=2, help="With --joined: the most rows of a run.")] = 8,
    model: Annotated[str, typer.Option("--model", help="With --joined: of which model.")] = "zoo:lenet",
    simulations: Annotated[
        int | None,
        typer.Option(
            "--simulate", min=1, help="Instead of cases: this many simulations of a server, its cluster and its disk."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Run random cases and compare every result with SimpleNet's; exit with status 1 and the case if one is wrong.

    With --joined, compare the results of requests that an executor joins with those of lone runs, byte by byte.

    With --simulate, run a server, its cluster and its disk on virtual time, where things go wrong as the seed says.
    """
    if simulations is not None:
        _simulate(simulations, seed, as_json)
        return
    if joined is not None:
        _run_joined(model, joined, max_batch, seed, as_json)
        return
    from dagexec.stress.session import Session, SessionOptions  # registers an operator for this command only

    if case is not None and cases is None and seconds is None:
        cases = 1
    if seconds is None and cases is None:
        seconds = 60.0
    session = Session(
        SessionOptions(
            seed=seed,
            seconds=seconds,
            cases=cases,
            device=device,
            net_type=net_type,
            case=case,
            hang_seconds=hang_seconds,
        )
    )
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=as_json,
    )

    def show(report: StressReport) -> None:
        share = max(report.seconds / seconds if seconds else 0.0, report.cases / cases if cases else 0.0)
        bar.update(task, completed=min(1.0, share), rate=_rate(report))

    def end_hung(report: StressReport) -> None:
        bar.stop()
        _print(report, as_json)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_DEFECT_FOUND)  # hanging threads would keep the process alive

    with bar:
        task = bar.add_task(f"Stress on {device or 'cpu'}", total=1.0, rate="")
        report = session.run(show, end_hung)
    _print(report, as_json)
    if report.defect is not None:
        raise typer.Exit(_DEFECT_FOUND)


def _simulate(simulations: int, seed: int, as_json: bool) -> None:
    try:
        from dagexec.stress.simulation import simulate
    except ImportError as error:
        raise DagexecError(f"{error}; install the server with: {install_command('serve')}") from error

    answers: Counter[str] = Counter()
    met: Counter[str] = Counter()
    steps, seconds = 0, 0.0
    for one in track(range(seed, seed + simulations), "Simulating", console=Console(stderr=True), disable=as_json):
        try:
            found = simulate(one)
        except Exception as error:
            text = "".join(traceback.format_exception(error))
            print(text, file=sys.stderr)
            raise typer.Exit(_DEFECT_FOUND) from None
        answers, met, steps, seconds = (
            answers + found.answers,
            met + found.met,
            steps + found.steps,
            seconds + found.seconds,
        )
    if as_json:
        print_json({"answers": answers, "went_wrong": met, "steps": steps, "virtual_seconds": seconds})
        return
    table = Table("what", "times", title=f"{simulations} simulations, {steps:,} steps, {seconds:,.0f} virtual seconds")
    for name, count in [*sorted(answers.items()), *sorted(met.items())]:
        table.add_row(f"answer {name}" if name in answers else name, f"{count:,}")
    Console().print(table)


def _run_joined(model: str, requests: int, max_batch: int, seed: int, as_json: bool) -> None:
    from dagexec.executor.source.loading import load_model
    from dagexec.stress.compositions import Plan, run_compositions  # registers an operator for this command only

    found = run_compositions(load_model(model), Plan(requests, seed=seed, max_batch=max_batch))
    if as_json:
        print_json(dataclasses.asdict(found))
    else:
        for name, count in sorted(found.outcomes.items()):
            print(f"{name}: {count:,}")
        print("runs by rows: " + ", ".join(f"{rows}: {count:,}" for rows, count in found.batch_sizes.items()))
    if found.problems:
        print("\n".join(found.problems), file=sys.stderr)
        raise typer.Exit(_DEFECT_FOUND)


def _print(report: StressReport, as_json: bool) -> None:
    if as_json:
        print_json(report.as_dict())
    else:
        title = f"{report.device}, seed {report.seed}: {_rate(report)} in {report.seconds:.1f} s"
        Console().print(title, _table(report), highlight=False)
    if report.defect is not None:
        lines = [report.defect.problem, report.defect.description, f"replay: {report.defect.replay}"]
        print("\n".join(lines), file=sys.stderr)


def _rate(report: StressReport) -> str:
    return f"{report.cases} cases, {report.runs / max(report.seconds, 1e-9):.0f} runs/s"


def _table(report: StressReport) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("tried")
    table.add_column("times", justify="right")
    for name, count in sorted(report.tried.items()):
        if count:
            table.add_row(name, f"{count:,}")
    return table
