"""`dagexec compare`: times and results of one model under several runtimes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dagexec.analysis.comparison import Comparison, RuntimeResult, compare
from dagexec.analysis.foreign_share import in_words
from dagexec.analysis.plot import check_picture, plot_comparison
from dagexec.analysis.precision_report import RANDOM_INPUTS, LowPrecision, precision_report
from dagexec.analysis.rounds import Limits
from dagexec.analysis.statistics import Verdict
from dagexec.analysis.what_if import LAUNCH_SECONDS
from dagexec.cli.arguments import (
    ChoicesOption,
    OptimizeOption,
    SetOption,
    TuningSecondsOption,
    kept_choices,
    parse_arguments,
    parse_counts,
    parse_names,
)
from dagexec.cli.completion import complete_policy
from dagexec.cli.feeds import (
    AllowIoOption,
    InputOption,
    JsonOption,
    ModelArgument,
    SeedOption,
    ShapeOption,
    read_feeds,
    read_model,
)
from dagexec.cli.json_output import print_json
from dagexec.cli.precision import DtypeOption, LayersOption, SamplesOption, layers_table, precision_table
from dagexec.cli.progress import progress_line
from dagexec.cli.reports import ReportOption, write_report
from dagexec.errors import SchemaError
from dagexec.options import CompileOptions
from dagexec.report.document import check_report
from dagexec.report.gather import TracedRuntimes

_PRECISION_ROUNDS = 15

_REPORTED_WORKERS = [1, 2, 4, 8, 16, 32, 64]


def compare_command(
    model: ModelArgument,
    net_type: Annotated[
        str | None,
        typer.Option(
            "--net-type",
            help="Runtimes to compare with SimpleNet, separated by commas. Default: dag,async_dag; with --policy, dag.",
        ),
    ] = None,
    policy: Annotated[
        str,
        typer.Option(
            "--policy",
            metavar="NAMES",
            help="Also these policies, separated by commas, such as heft,fifo. --what-if predicts with the first.",
            autocompletion=complete_policy,
        ),
    ] = "",
    num_workers: Annotated[str, typer.Option("--num-workers", help="Worker counts, separated by commas.")] = "1,2",
    repeat: Annotated[
        int | None,
        typer.Option("--repeat", min=1, help="Rounds, in each of which every runtime runs once."),
    ] = None,
    seconds: Annotated[
        float, typer.Option("--seconds", min=0, help="Without --repeat: measure for at most so long.")
    ] = Limits.seconds,
    against: Annotated[
        str, typer.Option("--against", metavar="PEERS", help="Also onnxruntime, openvino or both, in the same rounds.")
    ] = "",
    input_file: InputOption = None,
    shape: ShapeOption = None,
    seed: SeedOption = 0,
    settings: SetOption = None,
    choices: ChoicesOption = None,
    optimize: OptimizeOption = True,
    tuning_seconds: TuningSecondsOption = None,
    what_if: Annotated[
        str | None,
        typer.Option("--what-if", metavar="COUNTS", help="Predict times for other worker counts, such as 4,16,64."),
    ] = None,
    streams: Annotated[
        str | None,
        typer.Option("--streams", metavar="COUNTS", help="With --what-if: also predict these numbers of streams."),
    ] = None,
    launch_us: Annotated[
        float, typer.Option("--launch-us", min=0, help="Assumed cost of a launch on a stream, in microseconds.")
    ] = LAUNCH_SECONDS * 1e6,
    plot: Annotated[Path | None, typer.Option("--plot", metavar="FILE.png", help="Draw the times as bars.")] = None,
    explanation: Annotated[
        bool,
        typer.Option("--explain", help="Say in three sentences what bounds the fastest runtime of several workers."),
    ] = False,
    report: ReportOption = None,
    dtype: DtypeOption = None,
    samples: SamplesOption = RANDOM_INPUTS,
    layers: LayersOption = False,
    allow_io: AllowIoOption = False,
    as_json: JsonOption = False,
) -> None:
    """Run MODEL under SimpleNet and other runtimes; exit with status 1 if a result differs from SimpleNet's bytes."""
    if plot is not None:
        check_picture(plot)
    if report is not None:
        check_report(report)
    if dtype is not None:
        _refuse_with_dtype({"--plot": plot is not None, "--report": report is not None, "--explain": explanation})
        rounds = repeat or _PRECISION_ROUNDS
        _compare_precision(model, dtype, samples, layers, rounds, input_file, shape, seed, allow_io, as_json)
        return
    net_types = _net_types(net_type, parse_names(policy))
    workers = parse_counts("--num-workers", num_workers)
    other_workers = parse_counts("--what-if", what_if) if what_if is not None else []
    if report is not None and what_if is None:
        other_workers = _REPORTED_WORKERS
    other_streams = parse_counts("--streams", streams) if streams is not None else []
    if other_streams and not other_workers:
        raise SchemaError(f"--streams {streams!r} needs --what-if with the numbers of workers that launch on them")
    names = parse_names(against)
    arguments = parse_arguments(settings)
    options = CompileOptions(optimize=optimize, tuning_seconds=tuning_seconds, operator_arguments=arguments)
    loaded = read_model(model, allow_io)
    feeds = read_feeds(loaded, input_file, shape, seed)
    traced = TracedRuntimes(loaded) if explanation or report is not None else None
    with kept_choices(choices), progress_line(f"Comparing runtimes on {loaded.name}", bar=True, quiet=as_json) as line:
        comparison = compare(
            model if names and model.endswith(".onnx") else loaded,
            options,
            net_types=net_types,
            workers=workers,
            repeat=repeat,
            seconds=seconds,
            against=names,
            feeds=feeds,
            what_if_workers=other_workers,
            what_if_streams=other_streams,
            launch_seconds=launch_us / 1e6,
            progress=line.done,
            on_stage=line,
            on_measured=traced.add if traced is not None else lambda *_: None,
        )
    sentences = () if traced is None or not explanation else traced.explanation(comparison)
    if as_json:
        print_json(comparison.as_dict() | ({"explanation": sentences} if explanation else {}))
    else:
        _print_comparison(comparison, sentences)
    if plot is not None:
        plot_comparison(comparison, plot)
    if report is not None and traced is not None:
        write_report(traced.report(comparison), report)
    if not comparison.agrees:
        Console(stderr=True).print("results differ from SimpleNet's", style="red")
        raise typer.Exit(1)


def _refuse_with_dtype(given: Mapping[str, bool]) -> None:
    """Raise SchemaError when one of these options is given."""
    for option, is_given in given.items():
        if is_given:
            raise SchemaError(f"{option} is about the times of runtimes; it cannot be combined with --dtype")


def _net_types(given: str | None, policies: list[str]) -> list[str]:
    """The net types to compare, also under each of the policies."""
    names = parse_names(("dag" if policies else "dag,async_dag") if given is None else given)
    return [*names, *(f"{name}:{policy}" for name in names if name != "simple" for policy in policies)]


def _print_comparison(comparison: Comparison, sentences: Iterable[str]) -> None:
    """For people; `sentences` explain it."""
    console = Console()
    say = partial(console.print, markup=False, highlight=False)
    say(comparison.finding)
    console.print(compare_table(comparison))
    for row in comparison.contenders:
        for remark in row.remarks:
            say(f"{row.runtime}: {remark}")
    say(f"layout and kernels: {comparison.choices}")
    if comparison.foreign_share is not None:
        say(in_words(comparison.foreign_share))
    if comparison.what_if:
        console.print(_what_if_table(comparison), _WHAT_IF_NOTES, highlight=False)
    if weakness := comparison.cost_model.weakness:
        say(f"predictions say little here: {weakness}")
    for sentence in sentences:
        say(sentence)


def _compare_precision(
    source: str,
    dtype: str,
    samples: int,
    layers: bool,
    repeat: int,
    input_file: Path | None,
    shape: list[str] | None,
    seed: int,
    allow_io: bool,
    as_json: bool,
) -> None:
    """Print the report of `--dtype` on random inputs, calibrated on other ones, or on the inputs of a file."""
    if dtype not in ("bfloat16", "int8"):
        raise SchemaError(f"--dtype {dtype!r}: expected bfloat16 or int8")
    loaded = read_model(source, allow_io)
    count = 1 if input_file is not None else samples
    feeds, others = (
        [read_feeds(loaded, input_file, shape, seed + start + number) for number in range(count)]
        for start in (0, count)
    )
    with progress_line(f"Comparing {dtype} with float32", quiet=as_json) as line:
        kind: LowPrecision = "int8" if dtype == "int8" else "bfloat16"
        report = precision_report(
            loaded, kind, feeds, calibration=others, repeat=repeat, per_layer=layers, on_stage=line
        )
    if as_json:
        print_json(report.as_dict())
        return
    Console().print(precision_table(report))
    if layers:
        Console().print(layers_table(report.layers))


def compare_table(comparison: Comparison) -> Table:
    """A table narrow enough for a terminal of 80 columns."""
    table = Table(
        title=Text(f"{comparison.model}: {comparison.operators} operators, {comparison.repeat} rounds", "table.title"),
        caption="\nspread: interquartile range; predicted: ms, by list scheduling from the\n"
        "operator times and costs under SimpleNet; ratio: predicted / median;\n"
        "speed-up: over SimpleNet, with its interval; bound: what the critical path\n"
        "allows; diff.: largest difference from SimpleNet's outputs.",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
        pad_edge=False,
    )
    table.add_column("runtime", max_width=9, overflow="fold")
    for column in ("chains", "work-\ners", "median\nms", "spread\nms"):
        table.add_column(column, justify="right")
    for column in ("pre-\ndicted", "ratio", "speed-\nup", "bound", "diff."):
        table.add_column(column, justify="right")
    for row in comparison.rows:
        net_type, _, policy = row.net_type.partition(":")
        table.add_row(
            net_type if not policy else "\n".join((f"{net_type}:", policy.replace("_", "_\n"))),
            str(row.chains),
            str(row.workers),
            _six_characters(row.median_ms),
            _six_characters(row.quartile_3_ms - row.quartile_1_ms),
            _six_characters(row.predicted_ms),
            f"{row.predicted_ratio:.2f}",
            _speed_up(row),
            f"{row.bound:.2f}",
            "0" if row.same_bytes else f"{row.largest_difference:.2g}",
        )
    for peer in comparison.peers:
        ratio = "" if peer.verdict is None else f"{1 / peer.verdict.ratio:.2f}"
        times = _six_characters(peer.median_ms), _six_characters(peer.quartile_3_ms - peer.quartile_1_ms)
        table.add_row(
            peer.name.replace("onnxruntime", "onnx-\nruntime"),
            "-",
            str(peer.threads),
            *times,
            "-",
            "-",
            f"{ratio}{_interval(peer.verdict)}",
            "-",
            f"{peer.largest_difference:.2g}",
        )
    return table


def _speed_up(row: RuntimeResult) -> str:
    """With the interval, if there is one, in the two lines below."""
    return f"{row.speed_up:.2f}{_interval(row.verdict)}"


def _interval(verdict: Verdict | None) -> str:
    return "" if verdict is None else f"\n{1 / verdict.high:.2f}-\n{1 / verdict.low:.2f}"


def _six_characters(milliseconds: float) -> str:
    """Format with as many decimals as fit into six characters, for times below a quarter of an hour."""
    return f"{milliseconds:.{2 if milliseconds < 1e3 else 1 if milliseconds < 1e4 else 0}f}"


_WHAT_IF_NOTES = """predicted: includes a run's costs beyond its operators; each worker has a core
or at least one stream, and each stream computes like a core of this machine;
speed-up: over one worker on the host; bound: max(critical path, work /
workers), or the launches; no schedule is shorter."""


def _what_if_table(comparison: Comparison) -> Table:
    table = Table(
        title=Text(f"{comparison.model}: what if", "table.title"),
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for column in ("workers", "streams", "predicted\nms", "quartiles\nms", "speed-\nup", "bound\nms"):
        table.add_column(column, justify="right")
    for row in comparison.what_if:
        ends = f"{row.low_ms:.2f} to {row.high_ms:.2f}"
        figures = (f"{row.predicted_ms:.2f}", ends, f"{row.speed_up:.2f}", f"{row.bound_ms:.2f}")
        table.add_row(str(row.workers), str(row.streams) if row.streams else "-", *figures)
    return table
