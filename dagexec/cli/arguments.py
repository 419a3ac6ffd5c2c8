"""The options `--set` and `--choices`: arguments for the operators, and a file of convolution algorithms."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated

import typer

from dagexec.core.choices import choices
from dagexec.errors import ArgumentError, ModelFormatError

Value = int | float | str

SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="An argument for every operator that knows it and has it not, such as exhaustive_search=1 or "
        "shared_buffer=1; may be given several times.",
    ),
]
ChoicesOption = Annotated[
    Path | None,
    typer.Option(
        "--choices",
        metavar="FILE.json",
        help="Choices by measurement made earlier, if the file exists; those made now are added to it.",
    ),
]
TuningSecondsOption = Annotated[
    float | None,
    typer.Option(
        "--tuning-seconds",
        min=0,
        help="Measure layouts, kernels and schedules for so long. Default: $DAGEXEC_TUNING_SECONDS, or 0, by rules.",
    ),
]
OptimizeOption = Annotated[
    bool,
    typer.Option("--optimize/--no-optimize", help="Rewrite the net for speed first, or take it as it is given."),
]


def parse_arguments(texts: Sequence[str] | None) -> dict[str, Value]:
    """`NAME=VALUE` texts by name; a VALUE is an integer, else a float, else a string. Raises ArgumentError."""
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
    """Load the choices of `file`, if it is given and exists; save all to it if the block measured others, even in part.

    Raises ModelFormatError when it cannot be read or written, or is something else; before the block, as far as can be
    told then.
    """
    if file is None:
        yield
        return
    if file.exists():
        choices.load(file)
    elif not file.parent.is_dir():
        raise ModelFormatError(f"{file}: choices of algorithms cannot be kept: {file.parent} is not a folder")
    before = choices.all()
    try:
        yield
    finally:
        if choices.all() != before:
            choices.save(file)
