"""`dagexec lab`: task graphs that are no neural nets, and the smallest task that is worth its cost."""

from __future__ import annotations

import dataclasses
from itertools import permutations
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from dagexec.analysis.environment import environment
from dagexec.analysis.rounds import Limits
from dagexec.analysis.statistics import FEWEST_ROUNDS, Verdict
from dagexec.cli.arguments import parse_counts, parse_names
from dagexec.cli.completion import complete_policy
from dagexec.cli.feeds import JsonOption
from dagexec.cli.json_output import print_json
from dagexec.cli.progress import progress_line
from dagexec.errors import OutputError, SettingError
from dagexec.platform.disk import make_folders
from dagexec.platform.files import reason
from dagexec.scheduler.nets.options import NET_TYPES
from dagexec.scheduling.catalog import find_policy, policy_names

if TYPE_CHECKING:
    from dagexec.lab.adversary import Loss
    from dagexec.lab.running import Measured

_ORDER_BROKEN = 1

lab = typer.Typer(no_args_is_help=True, help="Run task graphs that are no neural nets, and measure schedules on them.")

WorkersOption = Annotated[str, typer.Option("--workers", help="Worker counts, separated by commas.")]
NetTypeOption = Annotated[str, typer.Option("--net-type", help="Runtimes, separated by commas.")]
PolicyOption = Annotated[
    str,
    typer.Option("--policy", metavar="NAMES", help="Also these policies, by commas.", autocompletion=complete_policy),
]
KindOption = Annotated[str, typer.Option("--kind", help="What tasks do: compute, memory or sleep.")]
WidthOption = Annotated[int, typer.Option("--width", help="Of Task Bench's patterns: points of a step.")]
RadixOption = Annotated[int, typer.Option("--radix", help="Of the patterns nearest and spread: points waited for.")]
ImbalanceOption = Annotated[
    float, typer.Option("--imbalance", help="Of Task Bench's patterns: tasks differ by up to that part, 0 to 1.")
]


@lab.command("run")
def lab_run_command(
    suite: Annotated[
        str, typer.Argument(help="taskbench, taskbench:PATTERN, randwire, or a file or folder of .stg and .json.")
    ],
    workers: WorkersOption = "1,2",
    net_type: NetTypeOption = "dag",
    policy: PolicyOption = "",
    kind: KindOption = "compute",
    task_us: Annotated[
        float, typer.Option("--task-us", help="Microseconds of work of a task, on average; times are scaled to that.")
    ] = 100.0,
    width: WidthOption = 4,
    steps: Annotated[int, typer.Option("--steps", help="Of Task Bench's patterns: how many there are.")] = 50,
    radix: RadixOption = 3,
    imbalance: ImbalanceOption = 0.0,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of random graphs.")] = 0,
    repeat: Annotated[int, typer.Option("--repeat", min=1, help="Rounds, in each of which every runtime runs.")] = 9,
    as_json: JsonOption = False,
) -> None:
    """Run the graphs of SUITE, and print makespans and measures; exit with status 1 if a run broke a graph's order."""
    from dagexec.lab.patterns import Bench
    from dagexec.lab.running import MEASURES, run_graph  # registers an operator for this command only
    from dagexec.lab.suites import suite_graphs

    seconds = _task_seconds(task_us)
    runtimes = _runtimes(net_type, policy, workers)
    bench = Bench(width=width, steps=steps, radix=radix, imbalance=imbalance, seed=seed)
    rows: list[Measured] = []
    with progress_line(f"Running {suite}", quiet=as_json) as line:
        for graph in suite_graphs(suite, bench):
            line(graph.name)
            rows += run_graph(graph.taking(seconds), kind, runtimes, Limits(rounds=repeat))
    if as_json:
        found = [
            dataclasses.asdict(row) | {name.replace(" ", "_"): of(row) for name, of in MEASURES.items()} for row in rows
        ]
        print_json({"suite": suite, "kind": kind, "rows": found, "environment": environment()})
    else:
        Console().print(_table(rows))
    if broken := [row for row in rows if not row.kept_order]:
        Console(stderr=True).print(f"{broken[0].graph}: {broken[0].net_type} broke the order of tasks", style="red")
        raise typer.Exit(_ORDER_BROKEN)


@lab.command("metg")
def lab_metg_command(
    pattern: Annotated[str, typer.Argument(help="One of Task Bench's patterns.")] = "stencil_1d",
    workers: WorkersOption = "1,2",
    net_type: NetTypeOption = "dag",
    policy: PolicyOption = "",
    kind: KindOption = "compute",
    width: WidthOption = 4,
    steps: Annotated[int, typer.Option("--steps", help="How many there are.")] = 250,
    radix: RadixOption = 3,
    repeat: Annotated[int, typer.Option("--repeat", min=1, help="Runs of each size of tasks.")] = 5,
    as_json: JsonOption = False,
) -> None:
    """Find the smallest task that runtimes do with half of their efficiency: METG(50%), with the task's cost."""
    from dagexec.lab.metg import LONGEST
    from dagexec.lab.patterns import Bench
    from dagexec.lab.running import net_metg

    runtimes = _runtimes(net_type, policy, workers)
    bench = Bench(width=width, steps=steps, radix=radix)
    with progress_line(f"Searching on {pattern}", quiet=as_json):
        found = {key: net_metg(pattern, bench, key, kind, repeat) for key in runtimes}
    if as_json:
        rows = [{"net_type": name, "workers": count} | dataclasses.asdict(found[name, count]) for name, count in found]
        print_json({"pattern": pattern, "kind": kind, "rows": rows, "environment": environment()})
        return
    for (name, count), one in found.items():
        text = f"more than {1e3 * LONGEST:g} ms of work" if one.seconds is None else f"{1e6 * one.seconds:.2f} us"
        print(f"{pattern}, {name}, {count} worker{'s' if count > 1 else ''}: METG(50%) {text}")


@lab.command("adversary")
def lab_adversary_command(
    policy: Annotated[
        str, typer.Option("--policy", metavar="NAME", help="That shall lose.", autocompletion=complete_policy)
    ] = "",
    against: Annotated[
        str, typer.Option("--against", metavar="NAME", help="That shall win.", autocompletion=complete_policy)
    ] = "",
    every: Annotated[bool, typer.Option("--all", help="Search for every pair of policies.")] = False,
    workers: Annotated[int, typer.Option("--workers", min=2, max=64, help="How many there are.")] = 2,
    tasks: Annotated[int, typer.Option("--tasks", min=2, max=100, help="Of a graph.")] = 10,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Of the search: graphs that are looked at.")] = 4000,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the search; it alone decides what is found.")] = 0,
    kind: KindOption = "sleep",
    task_us: Annotated[
        float, typer.Option("--task-us", help="Microseconds of a task, on average, when the graph is run.")
    ] = 5000.0,
    repeat: Annotated[
        int, typer.Option("--repeat", min=FEWEST_ROUNDS, help="Rounds, in each of which both policies run.")
    ] = 15,
    output: Annotated[
        Path | None, typer.Option("--output", help="Save the graph as this WfFormat file; with --all, to this folder.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Search for a graph on which one policy loses most against another, and confirm that by running it."""
    from dagexec.lab.adversary import find_loss, measured_loss
    from dagexec.lab.wfformat import write_wfformat

    pairs = _pairs(policy, against, every=every)
    files = _files(pairs, output, every=every)
    seconds = _task_seconds(task_us)
    rows: list[tuple[str, str, Loss, Verdict]] = []
    with progress_line("Searching", quiet=as_json) as line:
        for one, other in pairs:
            line(f"{one} against {other}")
            loss = find_loss(find_policy(one), find_policy(other), workers, tasks=tasks, steps=steps, seed=seed)
            if files:
                write_wfformat(loss.graph, files[one, other])
            limits = Limits(rounds=repeat)
            verdict = measured_loss(loss.graph, one, other, workers, kind=kind, task_seconds=seconds, limits=limits)
            rows.append((one, other, loss, verdict))
    rows.sort(key=lambda row: -row[2].ratio)
    if as_json:
        found = [
            {"policy": one, "against": other, "predicted_ratio": loss.ratio, "measured": dataclasses.asdict(verdict)}
            | dataclasses.asdict(loss)
            for one, other, loss, verdict in rows
        ]
        print_json({"workers": workers, "seed": seed, "steps": steps, "rows": found, "environment": environment()})
        return
    for one, other, loss, verdict in rows:
        print(f"{one} against {other}: predicted {loss.ratio:.3f}; measured {verdict.sentence}")


def _pairs(policy: str, against: str, *, every: bool) -> list[tuple[str, str]]:
    """The policies that shall lose, and those that shall win."""
    if every:
        if policy or against:
            raise SettingError("--all is for every pair of policies: it cannot be combined with --policy and --against")
        return list(permutations(policy_names(), 2))
    for option, name in (("--policy", policy), ("--against", against)):
        if not name:
            raise SettingError(f"{option} is missing: expected two policies, or --all")
        find_policy(name)
    if policy == against:
        raise SettingError(f"--against {against!r}: expected another policy than --policy")
    return [(policy, against)]


def _files(pairs: list[tuple[str, str]], output: Path | None, *, every: bool) -> dict[tuple[str, str], Path]:
    """Where graphs are saved. Raises SettingError, and OutputError for a folder that cannot be made."""
    if output is None:
        return {}
    if not every:
        if output.suffix != ".json":
            raise SettingError(f"--output {str(output)!r}: expected a name that ends with .json")
        return {pairs[0]: output}
    try:
        make_folders(output)
    except OSError as error:
        raise OutputError(f"{output}: {reason(error)}") from None
    return {pair: output / f"{'-'.join(pair)}.json" for pair in pairs}


def _task_seconds(microseconds: float) -> float:
    if not 0 < microseconds <= 1e9:
        raise SettingError(f"--task-us {microseconds}: expected more than 0, and at most 1e9")
    return microseconds / 1e6


def _runtimes(net_types: str, policies: str, workers: str) -> list[tuple[str, int]]:
    names = parse_names(net_types)
    if unknown := [name for name in names if name not in NET_TYPES]:
        raise SettingError(f"--net-type {unknown[0]!r}: expected {', '.join(NET_TYPES)}")
    counts = parse_counts("--workers", workers)
    names += [f"{name}:{policy}" for name in names if name != "simple" for policy in parse_names(policies)]
    return [(name, count) for name in names for count in (counts if name != "simple" else [1])]


def _table(rows: list[Measured]) -> Table:
    from dagexec.lab.running import MEASURES

    table = Table(
        caption="\nmakespan: median of a run; bound: the shortest possible, *: known to be\nthe optimum; "
        "efficiency: the tasks' work of the workers' time; over bound:\nmakespan / bound; prediction error: "
        "predicted / measured - 1.",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
        pad_edge=False,
    )
    table.add_column("graph", overflow="fold")
    table.add_column("runtime,\nworkers", no_wrap=True)
    for column in ("make-\nspan ms", "bound ms", *(name.replace(" ", "\n") for name in MEASURES)):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.graph,
            f"{row.net_type.rpartition(':')[2]} {row.workers}",
            f"{1e3 * row.makespan:.3f}",
            f"{1e3 * row.bound:.3f}{'*' if row.is_optimum else ''}",
            *(f"{measure(row):.2f}" for measure in MEASURES.values()),
        )
    return table
