"""Options that several commands have, and what is read from them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Literal

import typer

from dagexec.cli.completion import complete_net_type, complete_pass, complete_policy
from dagexec.core.choices import choices
from dagexec.errors import ArgumentError, OutputError, SchemaError

Value = int | float | str

SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="Set an argument, such as exhaustive_search=1 or shared_buffer=1, on every operator that supports it and "
        "does not set it already. May be repeated.",
    ),
]
ChoicesOption = Annotated[
    Path | None,
    typer.Option(
        "--choices",
        metavar="FILE.json",
        help="Load measured choices from this file if it exists, and save new ones to it.",
    ),
]
TuningSecondsOption = Annotated[
    float | None,
    typer.Option(
        "--tuning-seconds",
        min=0,
        help="Time limit for measuring layouts, kernels and schedules; 0 uses rules. "
        "Default: $DAGEXEC_TUNING_SECONDS, or 0.",
    ),
]
IslandsOption = Annotated[
    Literal["none", "auto", "onnxruntime", "openvino"] | None,
    typer.Option(
        "--islands",
        help="Parts of the net that other runtimes compute: none, those measured to be faster (auto), or all that "
        "one can.",
    ),
]
NetTypeOption = Annotated[
    str | None,
    typer.Option("--net-type", help="simple, dag or async_dag. Default: automatic.", autocompletion=complete_net_type),
]
PolicyOption = Annotated[
    str | None,
    typer.Option(
        "--policy",
        help="What decides which chain runs next, such as fifo, heft or work_stealing. Default: the critical path.",
        autocompletion=complete_policy,
    ),
]
PassOption = Annotated[
    list[str] | None,
    typer.Option(
        "--pass",
        metavar="NAME",
        help="Run a pass that an installed package has, too (see `dagexec plugins`). May be repeated.",
        show_default=False,
        autocompletion=complete_pass,
    ),
]
NumWorkersOption = Annotated[int | None, typer.Option("--num-workers", min=1, help="Default: automatic.")]
IntraOpThreadsOption = Annotated[
    int | None,
    typer.Option(
        "--intra-op-threads",
        min=1,
        help="The most threads that work on one operator at the same time. Default: no limit.",
    ),
]
OptimizeOption = Annotated[
    bool,
    typer.Option("--optimize/--no-optimize", help="Rewrite the net for speed first, or run it as given."),
]


def parse_arguments(texts: Sequence[str] | None) -> dict[str, Value]:
    """Parse `NAME=VALUE` texts; a VALUE is an integer, else a float, else a string. Raises ArgumentError."""
    arguments: dict[str, Value] = {}
    for text in texts or ():
        name, _, value = text.partition("=")
        if not name or not value:
            raise ArgumentError(f"--set {text!r}: expected NAME=VALUE")
        if name in arguments:
            raise ArgumentError(f"--set {text!r}: {name} is given twice, first as {arguments[name]!r}")
        arguments[name] = _parsed(value)
    return arguments


def _parsed(text: str) -> Value:
    for read in (int, float):
        with suppress(ValueError):
            return read(text)
    return text


@contextmanager
def kept_choices(file: Path | None) -> Iterator[None]:
    """Load choices from `file`, if it exists; save all choices to it if the block measures new ones, even if it fails.

    Raises ModelFormatError if the file is not one of choices, OutputError if it cannot be written, if possible before
    the block runs.
    """
    if file is None:
        yield
        return
    if file.exists():
        choices.load(file)
    elif not file.parent.is_dir():
        raise OutputError(f"{file}: cannot save choices of algorithms: {file.parent} is not a folder")
    before = choices.all()
    try:
        yield
    finally:
        if choices.all() != before:
            choices.save(file)


def parse_counts(option: str, text: str) -> list[int]:
    """The numbers of an option, separated by commas. Raises SchemaError unless all are 1 or more."""
    try:
        counts = [int(count) for count in text.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise SchemaError(f"{option} {text!r}: expected counts of 1 or more, separated by commas")
    return counts


def parse_names(text: str) -> list[str]:
    """The names of an option, separated by commas."""
    return [name.strip() for name in text.split(",") if name.strip()]
