"""`dagexec compare`: the same model under several runtimes, times and results side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from dagexec.cli.arguments import ChoicesOption, SetOption, kept_choices, parse_arguments
from dagexec.cli.feeds import InputOption, JsonOption, ModelArgument, SeedOption, ShapeOption, read_feeds, read_model
from dagexec.cli.json_output import print_json
from dagexec.cli.plot import plot_comparison
from dagexec.comparison import Comparison, compare
from dagexec.core.errors import SchemaError


def compare_command(
    model: ModelArgument,
    net_type: Annotated[
        str, typer.Option("--net-type", help="Runtimes beside SimpleNet, separated by commas.")
    ] = "dag,async_dag",
    num_workers: Annotated[str, typer.Option("--num-workers", help="Worker counts, separated by commas.")] = "1,2",
    repeat: Annotated[int, typer.Option("--repeat", min=1, help="Runs of each runtime, interleaved.")] = 15,
    input_file: InputOption = None,
    shape: ShapeOption = None,
    seed: SeedOption = 0,
    settings: SetOption = None,
    choices: ChoicesOption = None,
    plot: Annotated[Path | None, typer.Option("--plot", metavar="FILE.png", help="Draw the times as bars.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Run MODEL under SimpleNet and other runtimes; exit 1 when any result differs from SimpleNet's bytes."""
    net_types = [name.strip() for name in net_type.split(",") if name.strip()]
    workers = _parse_workers(num_workers)
    arguments = parse_arguments(settings)
    loaded = read_model(model)
    feeds = read_feeds(loaded, input_file, shape, seed)
    runtimes = 1 + len(set(net_types) - {"simple"}) * len(set(workers))
    progress = Progress(console=Console(stderr=True), transient=True, disable=as_json)
    with kept_choices(choices), progress as bar:
        task = bar.add_task(escape(f"Comparing runtimes on {loaded.name}"), total=repeat * runtimes)
        comparison = compare(
            loaded,
            net_types=net_types,
            workers=workers,
            repeat=repeat,
            feeds=feeds,
            operator_arguments=arguments,
            progress=lambda: bar.advance(task),
        )
    if as_json:
        print_json(comparison.as_dict())
    else:
        Console().print(_table(comparison))
    if plot is not None:
        plot_comparison(comparison, plot)
    if not comparison.agrees:
        Console(stderr=True).print("results differ from SimpleNet's", style="red")
        raise typer.Exit(1)


def _parse_workers(text: str) -> list[int]:
    try:
        workers = [int(count) for count in text.split(",")]
    except ValueError:
        workers = []
    if not workers or min(workers) < 1:
        raise SchemaError(f"--num-workers {text!r}: expected counts of 1 or more, separated by commas")
    return workers


def _table(comparison: Comparison) -> Table:
    """Narrow enough for a terminal of 80 columns."""
    table = Table(
        title=Text(
            f"{comparison.model}: {comparison.operators} operators, {comparison.repeat} interleaved runs", "table.title"
        ),
        caption="spread: between the quartiles; speed-up: over SimpleNet's median;\n"
        "predicted: what list scheduling reaches with these workers and the\n"
        "measured operator times; bound: what the critical path allows; diff.:\n"
        "largest difference from SimpleNet's outputs. One thread an operator.",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("runtime")
    for column in ("chains", "workers", "median\nms", "spread\nms", "speed-\nup", "pre-\ndicted", "bound", "diff."):
        table.add_column(column, justify="right")
    for row in comparison.rows:
        table.add_row(
            row.net_type,
            str(row.chains),
            str(row.workers),
            f"{row.median_ms:.2f}",
            f"{row.quartile_3_ms - row.quartile_1_ms:.2f}",
            f"{row.speed_up:.2f}",
            f"{row.predicted:.2f}",
            f"{row.bound:.2f}",
            "0" if row.same_bytes else f"{row.largest_difference:.3g}",
        )
    return table
