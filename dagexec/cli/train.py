"""`dagexec train`: train a bundled task or a script's, on one device, several devices, or in several processes."""

from __future__ import annotations

import os
import runpy
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from dagexec.analysis.plot import check_picture
from dagexec.cli.completion import complete_net_type, complete_task
from dagexec.cli.feeds import JsonOption, SeedOption
from dagexec.cli.json_output import print_json
from dagexec.cli.learning_curve import Curve
from dagexec.cli.reports import ReportOption, write_report
from dagexec.errors import ModelFormatError, SettingError
from dagexec.ops.families.communication import CommonWorld
from dagexec.report.document import Report, check_report
from dagexec.training.task import TrainingTask
from dagexec.training.trainer import StepReport, Trainer
from dagexec.zoo import tasks

_LAUNCHERS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
"""Where the mpiexec of Open MPI, and that of MPICH and Intel, put the number of processes."""


def train_command(
    task: Annotated[
        str,
        typer.Argument(
            help=f"One of {', '.join(tasks.names())}, or a Python script that defines `make_task(seed)`, which returns "
            f"a dagexec.training.task.TrainingTask.",
            autocompletion=complete_task,
        ),
    ],
    net_type: Annotated[
        str, typer.Option("--net-type", help="simple, dag or async_dag.", autocompletion=complete_net_type)
    ] = "dag",
    num_workers: Annotated[
        int | None, typer.Option("--num-workers", min=1, help="Threads of a net. Default: one per core.")
    ] = None,
    device: Annotated[
        list[str] | None,
        typer.Option("--device", help="cpu or sim:N. Repeat it to train on several devices. Default: cpu."),
    ] = None,
    reduction: Annotated[
        str, typer.Option("--reduction", help="How several devices sum their gradients: allreduce, tree or ring.")
    ] = "allreduce",
    epochs: Annotated[int | None, typer.Option("--epochs", min=0, help="Default: the task's.")] = None,
    seed: SeedOption = 0,
    checkpoint: Annotated[
        Path | None, typer.Option("--checkpoint", metavar="DIR", help="Save checkpoints here.")
    ] = None,
    checkpoint_steps: Annotated[
        int | None, typer.Option("--checkpoint-steps", min=1, help="Steps between checkpoints. Default: an epoch.")
    ] = None,
    iter_size: Annotated[int, typer.Option("--iter-size", min=1, help="Micro-batches per batch on each device.")] = 1,
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume from the newest checkpoint in DIR, if there is one.")
    ] = False,
    ignore_damaged: Annotated[
        bool,
        typer.Option(
            "--ignore-damaged",
            help="With --resume: start over if all checkpoints in DIR are damaged, which is an error by default.",
        ),
    ] = False,
    stop_on_nan: Annotated[
        bool, typer.Option("--stop-on-nan", help="Stop at the operator that produces the first NaN.")
    ] = False,
    rank_timeout: Annotated[
        float, typer.Option("--rank-timeout", min=0.1, help="Under mpiexec: seconds that a rank waits for another.")
    ] = 10.0,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE.png", help="Draw the learning curve. Needs matplotlib.")
    ] = None,
    report: ReportOption = None,
    allow_io: Annotated[
        bool,
        typer.Option(
            "--allow-io",
            help="Allow operators to read and write files anywhere and to communicate with other processes. By default "
            "they can only use databases in the working directory.",
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Train TASK, and evaluate it on held-out samples."""
    if resume and checkpoint is None:
        raise ModelFormatError("--resume needs --checkpoint DIR, the folder with the checkpoints")
    if plot is not None:
        check_picture(plot)
    if report is not None:
        check_report(report)
    found = _read_task(task, seed)
    curve = Curve()
    with _ranks(rank_timeout) as world:
        first = world is None or world.rank == 0
        started = time.perf_counter()
        with Trainer(
            found,
            net_type=net_type,
            num_workers=num_workers,
            devices=device or ["cpu"],
            reduction=reduction,
            iter_size=iter_size,
            seed=seed,
            checkpoints=checkpoint,
            checkpoint_steps=checkpoint_steps,
            resume=resume,
            ignore_damaged=ignore_damaged,
            stop_on_nan=stop_on_nan,
            world=world,
            allow_io=allow_io,
        ) as trainer:
            begun_at = trainer.step
            last = found.epochs if epochs is None else epochs
            total = last * found.steps_per_epoch
            with _progress(found, total, begun_at, quiet=as_json or not first) as progress:

                def on_step(done: StepReport) -> None:
                    curve.add(done)
                    progress(done)

                def on_epoch(epoch: int) -> None:
                    measured = trainer.evaluate()
                    curve.add_measure(measured)
                    if first and not as_json and not sys.stderr.isatty():
                        _print_epoch(f"epoch {epoch} of {last}", curve.last_epoch(), measured)

                trainer.train(last, on_step=on_step, on_epoch=on_epoch)
            measured = curve.last_measure() or trainer.evaluate()
            steps = trainer.step
    if not first:
        return
    seconds = time.perf_counter() - started
    rate = (steps - begun_at) * found.batch_size / curve.seconds if curve.seconds else 0.0
    summary = {
        "task": found.name,
        "steps": steps,
        "steps_before": begun_at,
        "epochs": steps // found.steps_per_epoch,
        "train": curve.last_epoch(),
        "test": measured,
        f"{found.unit}_per_second": rate,
        "seconds": seconds,
    }
    if as_json:
        print_json(summary)
    else:
        _print_table(found, summary, curve.last_epoch(), measured)
    if plot is not None:
        curve.plot(found.name, plot)
    if report is not None:
        lines = (f"{steps} steps, {rate:,.0f} {found.unit}/s",)
        write_report(Report(found.name, lines, [curve.section()]), report)


def _print_epoch(title: str, trained: Mapping[str, float], measured: Mapping[str, float]) -> None:
    """Print one line per epoch when there is no terminal for a progress bar: under mpiexec, or into a file."""
    parts = [("", trained), ("held out: ", measured)]
    texts = [what + ", ".join(f"{name} {value:.4f}" for name, value in values.items()) for what, values in parts]
    print(
        f"{title}: {'; '.join(text for text, (_, values) in zip(texts, parts, strict=True) if values)}", file=sys.stderr
    )


def _print_table(
    task: TrainingTask, summary: Mapping[str, Any], trained: Mapping[str, float], measured: Mapping[str, float]
) -> None:
    """Print the metrics of the last epoch and of the held-out samples."""
    rate = summary[f"{task.unit}_per_second"]
    title = f"{task.name}: {summary['steps']} steps, {rate:,.0f} {task.unit}/s, {summary['seconds']:.1f} s"
    table = Table(title=Text(title, "table.title"))
    for column in ("metric", "last epoch", "held out"):
        table.add_column(column)
    for name in {**trained, **measured}:
        cells = (values.get(name) for values in (trained, measured))
        table.add_row(name, *("" if value is None else f"{value:.4f}" for value in cells))
    Console().print(table)


def _read_task(task: str, seed: int) -> TrainingTask:
    """The bundled task, or that of a script. Raises ModelFormatError for anything else."""
    if not task.endswith(".py"):
        return tasks.make(task, seed)
    if not Path(task).is_file():
        raise ModelFormatError(f"{task}: no such script")
    folder = str(Path(task).resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)  # as `python SCRIPT` does, so that the script can import its neighbors
    make = runpy.run_path(task, run_name="dagexec_task").get("make_task")
    if not callable(make):
        raise ModelFormatError(f"{task}: expected a function `make_task(seed)` that returns a TrainingTask")
    made = make(seed)
    if not isinstance(made, TrainingTask):
        raise ModelFormatError(f"{task}: make_task must return a TrainingTask, found a {type(made).__name__}")
    return made


@contextmanager
def _ranks(timeout: float) -> Iterator[CommonWorld | None]:
    """The world of the processes that mpiexec started, or None. An error in one ends all, and names the rank."""
    if not any(_processes(name) > 1 for name in _LAUNCHERS):
        yield None
        return
    from dagexec.ops.families.communication import join_mpi
    from dagexec.ops.families.communication.mpi import require_mpi

    world = join_mpi("train", -1, -1, timeout)
    try:
        yield world
    except BaseException as error:
        text = f"dagexec: rank {world.rank} of {world.size}: {type(error).__name__}: {error}"
        print(text, file=sys.stderr, flush=True)
        require_mpi().COMM_WORLD.Abort(2)
        raise
    world.close()


def _processes(variable: str) -> int:
    """The number of processes according to a launcher. Raises SettingError."""
    text = os.environ.get(variable, "1")
    if not (text.isascii() and text.isdigit()):
        raise SettingError(f"{variable} must be a number of processes, found {text!r:.80}")
    return int(text)


@contextmanager
def _progress(task: TrainingTask, steps: int, begun_at: int, *, quiet: bool) -> Iterator[Callable[[StepReport], None]]:
    """Show a progress bar; call the result after every step."""
    columns = (
        TextColumn("epoch {task.fields[epoch]}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[shown]}"),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as progress:
        bar = progress.add_task(
            "", total=steps, completed=begun_at, epoch=begun_at // task.steps_per_epoch + 1, shown=""
        )

        def show(report: StepReport) -> None:
            values = "  ".join(f"{name} {value:.4f}" for name, value in report.metrics.items())
            shown = f"{values}  {report.samples / report.seconds:,.0f} {task.unit}/s"
            progress.update(bar, completed=report.step, epoch=report.epoch, shown=shown)

        yield show
