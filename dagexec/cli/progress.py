"""What a command is doing, for how long already: a line on the terminal that changes, from the first second on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, TextColumn, TimeElapsedColumn

_REFRESHES = 4  # a second: few, as they take processor time from what is measured


class Shown:
    """The line. Call it with what is done next."""

    def __init__(self, progress: Progress, subject: str) -> None:
        self._progress = progress
        self._subject = subject
        self._task = progress.add_task(subject, total=1.0)

    def __call__(self, stage: str) -> None:
        """Say what is done next."""
        self._progress.update(self._task, description=f"{self._subject}: {stage}")

    def done(self, share: float) -> None:
        """Show how much is done, up to 1."""
        self._progress.update(self._task, completed=share)


@contextmanager
def shown(subject: str, *, bar: bool = False, quiet: bool = False) -> Iterator[Shown]:
    """Within the block, a line says what is done to `subject`, and for how long; with a `bar`, how much is done.

    It is on standard error where that is a terminal, and gone afterwards. Nothing is shown when it is `quiet`.
    """
    bars: list[ProgressColumn] = [BarColumn()] if bar else []
    text = TextColumn("{task.description}", markup=False)
    columns = (SpinnerColumn(), text, *bars, TimeElapsedColumn())
    console = Console(stderr=True)
    hidden = quiet or not console.is_terminal  # which ends with an empty line elsewhere
    with Progress(*columns, console=console, transient=True, disable=hidden, refresh_per_second=_REFRESHES) as progress:
        yield Shown(progress, subject)
