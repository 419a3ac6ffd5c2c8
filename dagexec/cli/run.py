"""`dagexec run`: run a model, and show, save or trace its outputs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Annotated, Any, BinaryIO
from zipfile import ZipFile

import numpy as np
import numpy.typing as npt
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from rich.text import Text

from dagexec.analysis.explanation import traced_runtime
from dagexec.analysis.foreign_share import foreign_share, in_words
from dagexec.analysis.what_if import LAUNCH_SECONDS
from dagexec.cli.arguments import (
    ChoicesOption,
    IntraOpThreadsOption,
    IslandsOption,
    NetTypeOption,
    NumWorkersOption,
    OptimizeOption,
    PassOption,
    PolicyOption,
    SetOption,
    TuningSecondsOption,
    kept_choices,
    parse_arguments,
)
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
from dagexec.cli.plan import plan_in, run_plan_file
from dagexec.cli.progress import progress_line
from dagexec.cli.reports import ReportOption, write_report
from dagexec.core.device import Device
from dagexec.core.tensor import as_bytes_objects
from dagexec.devices.sim import simulated
from dagexec.errors import SettingError
from dagexec.executor.compile import compile
from dagexec.executor.source.loading import is_plan
from dagexec.platform.files import written_atomically
from dagexec.report.document import check_report
from dagexec.report.gather import run_report
from dagexec.scheduler.observe.trace import Trace
from dagexec.scheduler.observe.trace_lines import line_observer


def run_command(
    model: ModelArgument,
    net_type: NetTypeOption = None,
    num_workers: NumWorkersOption = None,
    intra_op_threads: IntraOpThreadsOption = None,
    policy: PolicyOption = None,
    optimize: OptimizeOption = True,
    own_passes: PassOption = None,
    tuning_seconds: TuningSecondsOption = None,
    islands: IslandsOption = None,
    device: Annotated[
        str | None,
        typer.Option("--device", help="cpu, sim:N or cuda:N. Default: the devices that the net names, or else cpu."),
    ] = None,
    streams_per_worker: Annotated[
        int, typer.Option("--streams-per-worker", min=1, help="Device streams on which each worker launches.")
    ] = 1,
    repeat: Annotated[int, typer.Option("--repeat", min=1, help="Number of runs.")] = 1,
    input_file: InputOption = None,
    shape: ShapeOption = None,
    seed: SeedOption = 0,
    settings: SetOption = None,
    choices: ChoicesOption = None,
    output: Annotated[Path | None, typer.Option("--output", metavar="FILE.npz", help="Save the outputs.")] = None,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", metavar="FILE.json", help="Save a trace of the first run, for Perfetto."),
    ] = None,
    report: ReportOption = None,
    allow_io: AllowIoOption = False,
    as_json: JsonOption = False,
) -> None:
    """Run MODEL, or a plan of Caffe2 (a PlanDef file), one or more times and show its outputs."""
    if report is not None:
        check_report(report)
    if (plan := plan_in(model)) is not None:
        unfit = {
            "--net-type": net_type, "--num-workers": num_workers, "--intra-op-threads": intra_op_threads,
            "--policy": policy, "--device": device, "--shape": shape, "--set": settings, "--choices": choices,
            "--pass": own_passes, "--trace": trace, "--report": report, "--tuning-seconds": tuning_seconds,
        }  # fmt: skip
        if given := [name for name, value in unfit.items() if value is not None]:
            raise SettingError(
                f"{model} is a plan, whose steps and nets say how they run: leave out {', '.join(given)}"
            )
        results = run_plan_file(plan, Path(model).parent, input_file, repeat, allow_io)
        _show(plan.name, "plan", *results, output, as_json=as_json)
        return
    arguments = parse_arguments(settings)
    loaded = read_model(model, allow_io, device)
    feeds = read_feeds(loaded, input_file, shape, seed)
    record = Trace() if trace is not None else None
    seconds: list[float] = []
    quiet = as_json or line_observer() is not None  # a progress display would break the observer's lines
    modeled = record is not None or report is not None
    with kept_choices(choices), _modeled(device) if modeled else nullcontext(), ExitStack() as stack:
        with progress_line(f"Compiling {loaded.name}", quiet=quiet) as line:
            executor = stack.enter_context(
                compile(
                    model if is_plan(model) else loaded,
                    optimize=optimize,
                    passes=own_passes or (),
                    tuning_seconds=tuning_seconds,
                    islands=islands,
                    net_type=net_type,
                    num_workers=num_workers,
                    intra_op_threads=intra_op_threads,
                    policy=policy,
                    device=device,
                    streams_per_worker=streams_per_worker,
                    operator_arguments=arguments or None,
                    any_length=not modeled,
                    progress=line,
                )
            )
        try:
            with progress_line(f"Running {loaded.name} for the first time", quiet=quiet):
                outputs = executor.run(feeds, trace=record)
        finally:  # write the trace of a failed run, too
            if trace is not None and record is not None:
                record.write(trace)
        console = Console(stderr=True)
        for _ in track(range(repeat), "Running", console=console, transient=True, disable=quiet or repeat == 1):
            start = time.perf_counter()
            outputs = executor.run(feeds)
            seconds.append(time.perf_counter() - start)
        share = None
        if record is not None:
            graph = executor.net().plan.graph
            share = foreign_share(graph, record.operator_seconds(len(graph)))
        if report is not None:
            runtime = traced_runtime(executor.net_type, executor.num_workers, executor, feeds)
            write_report(run_report(runtime, executor.model, feeds, loaded), report)
    _show(loaded.name, executor.net_type, outputs, seconds, output, as_json=as_json)
    if share is not None and not as_json:
        Console().print(in_words(share), markup=False, highlight=False)


def _show(
    name: str,
    kind: str,
    outputs: Mapping[str, npt.NDArray[Any]],
    seconds: list[float],
    output: Path | None,
    *,
    as_json: bool,
) -> None:
    """Save and show outputs; `kind` is the type of the net."""
    if output is not None:
        with written_atomically(output) as file:
            save_arrays(file, outputs)
    median = statistics.median(seconds) * 1e3
    if as_json:
        summary = {blob: _summary(array) for blob, array in outputs.items()}
        print_json({"model": name, "net_type": kind, "median_ms": median, "outputs": summary})
        return
    table = Table(title=Text(f"{name}: median {median:.2f} ms over {len(seconds)} run(s), {kind}", "table.title"))
    for column in ("output", "dtype", "shape", "min", "max", "mean"):
        table.add_column(column)
    for blob, array in outputs.items():
        row = _summary(array)
        figures = (row[key] for key in ("min", "max", "mean"))
        figures_shown = ("" if figure is None else f"{figure:.6g}" for figure in figures)
        table.add_row(Text(blob), str(row["dtype"]), str(row["shape"]), *figures_shown)
    Console().print(table)


def _modeled(device: str | None) -> AbstractContextManager[object]:
    """Give a simulated device, which takes no time by default, estimated kernel times and a launch time."""
    if device is None or Device.parse(device).kind != "sim":
        return nullcontext()
    return simulated(device, launch_seconds=LAUNCH_SECONDS, kernel_seconds=None)


def _summary(array: npt.NDArray[Any]) -> dict[str, object]:
    numbers = array.dtype != np.object_ and array.size > 0
    values = array.astype(np.float64) if numbers else None
    return {
        "dtype": str(array.dtype),
        "shape": list(array.shape),
        "min": None if values is None else float(values.min()),
        "max": None if values is None else float(values.max()),
        "mean": None if values is None else float(values.mean()),
    }


def save_arrays(file: BinaryIO, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """Write an .npz file like `numpy.savez`, but allow any array name. Strings become fixed-width bytes."""
    with ZipFile(file, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                plain = as_bytes_objects(array).astype(np.bytes_) if array.dtype == np.object_ else array
                np.lib.format.write_array(member, plain, allow_pickle=False)
