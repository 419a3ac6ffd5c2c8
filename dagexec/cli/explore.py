"""`dagexec explore`: run a model under schedules chosen by a seed or a search, and compare with SimpleNet."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from rich.text import Text

from dagexec.analysis.schedules import FailingModel, ModelScenario, shrink_model
from dagexec.analysis.story import Story, explain
from dagexec.cli.arguments import OptimizeOption, PolicyOption, SetOption, parse_arguments
from dagexec.cli.completion import complete_net_type
from dagexec.cli.feeds import AllowIoOption, InputOption, JsonOption, ModelArgument, ShapeOption, read_feeds, read_model
from dagexec.cli.json_output import print_json
from dagexec.cli.reports import ReportOption, write_report
from dagexec.errors import SchemaError
from dagexec.options import CompileOptions
from dagexec.report.document import Figure, Report, check_report
from dagexec.report.exploration import ExplorationSection
from dagexec.scheduler.exploration import (
    Exploration,
    ExploredSchedule,
    ReplayStrategy,
    Sampling,
    Strategy,
    compact,
    expand,
    explore,
    explore_all,
    reduction,
    sampling,
    systematic,
)
from dagexec.scheduler.exploration.nondeterminism import parting, parting_from
from dagexec.scheduler.exploration.schedule_file import SavedSchedule, read_schedule, write_schedule
from dagexec.storage.net_file import save_net

Chosen = Literal["portfolio", "surw", "pos", "pct", "random", "reduction"]

_FAILED = 1
_SHRINK_SEEDS = 40


def explore_command(
    model: ModelArgument,
    net_type: Annotated[
        str, typer.Option("--net-type", help="simple, dag or async_dag.", autocompletion=complete_net_type)
    ] = "dag",
    device: Annotated[str, typer.Option("--device", help="cpu, or sim:N to explore its streams, too.")] = "cpu",
    num_workers: Annotated[int, typer.Option("--num-workers", min=1, help="Threads in the pool.")] = 2,
    policy: PolicyOption = None,
    replicas: Annotated[int, typer.Option("--replicas", min=1, help="Maximum number of runs in flight.")] = 1,
    callers: Annotated[int, typer.Option("--callers", min=1, help="Threads that run the model concurrently.")] = 1,
    max_batch: Annotated[
        int, typer.Option("--max-batch", min=1, help="Join requests that wait, up to so many rows.")
    ] = 1,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Number of schedules, from seeds 0, 1, 2, ...")] = 100,
    seed: Annotated[int | None, typer.Option("--seed", min=0, help="Run only the schedule of this seed.")] = None,
    replay: Annotated[
        str | None,
        typer.Option(
            "--replay", metavar="DECISIONS|FILE.json", help="Run only this schedule, printed or saved before."
        ),
    ] = None,
    saved: Annotated[
        Path | None, typer.Option("--save", metavar="FILE.json", help="On failure, save the schedule, for --replay.")
    ] = None,
    strategy: Annotated[
        Chosen,
        typer.Option(
            "--strategy",
            help="What decides: a portfolio takes turns with the seeds, one of its strategies has them all, or the "
            "reduction runs all schedules, up to --limit, that differ in more than the order of independent steps.",
        ),
    ] = "portfolio",
    search: Annotated[
        bool, typer.Option("--systematic", help="Run all schedules with few preemptions instead of random ones.")
    ] = False,
    preemptions: Annotated[int, typer.Option("--preemptions", min=0, help="Maximum preemptions for --systematic.")] = 2,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Maximum number of schedules of a search.")] = 2000,
    shrunk: Annotated[
        Path | None, typer.Option("--shrink", metavar="FILE.pbtxt", help="On failure, save a smaller net that fails.")
    ] = None,
    input_file: InputOption = None,
    shape: ShapeOption = None,
    input_seed: Annotated[int, typer.Option("--input-seed", min=0, help="Seed of the random inputs.")] = 0,
    settings: SetOption = None,
    optimize: OptimizeOption = False,
    report: ReportOption = None,
    allow_io: AllowIoOption = False,
    as_json: JsonOption = False,
) -> None:
    """Run MODEL under controlled schedules; exit with status 1 if one fails or differs from SimpleNet, and show it."""
    if report is not None:
        check_report(report)
    if strategy == "reduction" and (search or seed is not None or replay is not None):
        raise SchemaError("--strategy reduction runs many schedules and has no seeds: give it alone")
    sampled: Sampling = "portfolio" if strategy == "reduction" else strategy
    given = read_schedule(Path(replay)) if replay is not None and replay.endswith(".json") else None
    single = _single(sampled, seed, replay, given)
    if single is not None and search:
        raise SchemaError("--systematic runs many schedules; it cannot be combined with --seed or --replay")
    loaded = read_model(model, allow_io, device)
    feeds = read_feeds(loaded, input_file, shape, input_seed)
    options = CompileOptions(
        net_type=net_type,
        num_workers=num_workers,
        policy=policy,
        replicas=replicas,
        max_batch=max_batch,
        device=device,
        optimize=optimize,
        operator_arguments=parse_arguments(settings),
    )
    scenario = ModelScenario(loaded, feeds, options, callers)
    expected = scenario.reference()
    run = partial(scenario.run, expected)
    if search or strategy == "reduction":
        with Console(stderr=True).status("Searching"):
            result = systematic(run, preemptions, limit) if search else reduction(run, limit, race_free=True)
    else:
        strategies: Iterable[Strategy] = [single] if single else [sampling(sampled, n) for n in range(seeds)]
        console, is_quiet = Console(stderr=True), as_json or single is not None
        result = explore_all(run, track(strategies, "Exploring", console=console, transient=True, disable=is_quiet))
    with Console(stderr=True).status("Running one schedule twice"):
        uncontrolled = _uncontrolled(run, result, given)
    story, command, operators = None, "", None
    if result.failed is not None:
        with Console(stderr=True).status("Explaining"):
            story = explain(run, result.failed)
        words = _words(model, scenario, policy, input_file, shape, input_seed, settings, allow_io)
        command = shlex.join([*words, *_selected(sampled, result.failed, story, saved)])
        if shrunk is not None:
            with Console(stderr=True).status("Explaining a smaller net"):
                smaller = shrink_model(FailingModel(scenario, expected, story.schedule), range(_SHRINK_SEEDS))
                save_net(smaller.scenario.model.net, shrunk)
                story, operators = explain(smaller.run, smaller.schedule), len(smaller.scenario.model.net.op)
    if as_json:
        print_json(_as_dict(loaded.name, result, uncontrolled, story, command, operators))
    else:
        _print(loaded.name, f"{net_type} on {device}", search or strategy == "reduction", result, uncontrolled)
        if story is not None:
            found = "" if operators is None else f"a failing net of {operators} operators: {shrunk}"
            _tell(result, story, command, found)
    if report is not None:
        if single is not None:
            chosen = "one schedule" if seed is None else f"seed {seed}"
        elif strategy == "reduction":
            chosen = f"all that differ, up to {limit:,}"
        else:
            few = f"all of at most {preemptions} preemptions, up to {limit:,}"
            chosen = few if search else f"seeds 0 to {seeds - 1:,}"
        section = ExplorationSection(result, chosen, command, story)
        write_report(_report(loaded.name, f"{net_type} on {device}", section), report)
    if result.failed is not None:
        raise typer.Exit(_FAILED)


def _report(name: str, how: str, section: ExplorationSection) -> Report:
    result = section.result
    figures = (
        Figure(f"{result.tried:,}", "schedules tried", section.chosen),
        Figure(f"{0 if result.failed is None else 1}", "failed", "the search ends with the first that fails"),
        Figure(
            f"{max(result.handovers, default=0):,}", "handovers met", "a step of one thread and the next of another"
        ),
    )
    said = "none failed" if result.failed is None else "1 failed"
    said += ", and no other is within the bounds" if result.exhausted else ""
    return Report(name, (f"{how}: {result.tried:,} schedules tried, {said}",), [section], figures)


def _uncontrolled(run: Callable[[], None], result: Exploration[None], given: SavedSchedule | None) -> str:
    """What no schedule controls, by a schedule that is run twice, or one that does not fail as it did; empty if none.

    The story of a schedule that fails says it, too.
    """
    failure = None if result.failed is None else result.failed.failure
    if given is not None and not given.is_kind_of(failure):
        parted = parting_from(run, given)
        where = "each thread does what it did then" if parted is None else str(parted)
        return f"the saved schedule ended with {given.failure!r}, and does not now: {where}"
    if failure is not None or given is not None:
        return ""
    parted = parting(run, explore(run))
    return "" if parted is None else str(parted)


def _single(strategy: Sampling, seed: int | None, replay: str | None, given: SavedSchedule | None) -> Strategy | None:
    if seed is not None and replay is not None:
        raise SchemaError("--seed and --replay each select one schedule: give only one of them")
    if seed is not None:
        return sampling(strategy, seed)
    if replay is None:
        return None
    if given is not None:
        return given.strategy()
    try:
        return ReplayStrategy(expand(replay))
    except ValueError as error:
        raise SchemaError(f"--replay: {error}") from None


def _selected(strategy: Sampling, failed: ExploredSchedule[None], story: Story, saved: Path | None) -> list[str]:
    """The options that select the failing schedule, which is saved if it is to be."""
    if story.preemptions is None and failed.seed is not None:
        return [*(["--strategy", strategy] if strategy != "portfolio" else []), "--seed", str(failed.seed)]
    if saved is None:
        return ["--replay", compact(story.schedule.decisions)]
    write_schedule(saved, story.schedule, story.deviations)
    return ["--replay", str(saved)]


def _words(
    model: str,
    scenario: ModelScenario,
    policy: str | None,
    input_file: Path | None,
    shape: Sequence[str] | None,
    input_seed: int,
    settings: Sequence[str] | None,
    allow_io: bool,
) -> list[str]:
    """The command with its options, those left out that select schedules."""
    options = scenario.options
    words = ["dagexec", "explore", model, "--net-type", str(options.net_type), "--device", str(options.device)]
    words += ["--num-workers", str(options.num_workers), "--replicas", str(options.replicas)]
    words += ["--callers", str(scenario.callers)]
    words += [] if policy is None else ["--policy", policy]
    words += ["--max-batch", str(options.max_batch)] if options.max_batch > 1 else []
    words += [] if input_file is None else ["--input", str(input_file)]
    words += [word for text in shape or () for word in ("--shape", text)]
    words += [word for text in settings or () for word in ("--set", text)]
    words += ["--allow-io"] if allow_io else []
    words += ["--input-seed", str(input_seed)] if input_seed else []
    words += ["--optimize"] if options.optimize else []
    return words


def _as_dict(
    model: str, result: Exploration[None], uncontrolled: str, story: Story | None, command: str, smaller: int | None
) -> dict[str, object]:
    failed = result.failed
    return {
        "model": model,
        "schedules": result.tried,
        "exhausted": result.exhausted,
        "cut": result.cut,
        "steps": result.steps,
        "seconds": result.seconds,
        "different": result.different,
        "strategies": dict(result.by_strategy),
        "handovers": max(result.handovers, default=0),
        "failure": None if failed is None else f"{type(failed.failure).__name__}: {failed.failure}",
        "strategy": None if failed is None else failed.strategy,
        "seed": None if failed is None else failed.seed,
        "decisions": None if failed is None else compact(failed.decisions),
        "replay": command or None,
        "nondeterminism": uncontrolled or None,
        "story": None if story is None else story.as_json(),
        "shrunk_operators": smaller,
    }


def _print(name: str, how: str, search: bool, result: Exploration[None], uncontrolled: str) -> None:
    table = Table(title=Text(f"{name}: {how}", "table.title"), show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_row("schedules tried", str(result.tried))
    if search:
        table.add_row("all that there are within the bounds", "yes" if result.exhausted else "no")
    for name, count in result.by_strategy.items() if len(result.by_strategy) > 1 else ():
        table.add_row(f"of them by {name}", str(count))
    table.add_row("different schedules", str(result.different))
    table.add_row("different handovers between threads", str(max(result.handovers, default=0)))
    table.add_row("steps of a schedule", f"{result.steps / max(result.tried, 1):.0f}")
    table.add_row("milliseconds of a schedule", f"{result.seconds / max(result.tried, 1) * 1e3:.2f}")
    table.add_row("failed", "0" if result.failed is None else "1")
    console = Console()
    console.print(table)
    if uncontrolled:
        console.print(f"not controlled: {uncontrolled}", style="yellow", markup=False, highlight=False, soft_wrap=True)


def _tell(result: Exploration[None], story: Story, command: str, smaller: str) -> None:
    """Print the story; that of the `smaller` net if there is one."""
    console = Console()
    assert result.failed is not None
    for line in filter(None, (f"found by: {result.failed.strategy}", f"again: {command}", smaller)):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    failure, *lines = story.lines()
    console.print(failure, style="red", markup=False, highlight=False)
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
