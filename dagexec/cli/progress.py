"""A progress line on the terminal: what a command is doing, and for how long it has been."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, TextColumn, TimeElapsedColumn

_REFRESHES = 4  # per second: few, because they take processor time from what is measured


class ProgressLine:
    """The progress line. Call it with a description of the next stage."""

    def __init__(self, progress: Progress, subject: str) -> None:
        self._progress = progress
        self._subject = subject
        self._task = progress.add_task(subject, total=1.0)

    def __call__(self, stage: str) -> None:
        """Show the next stage."""
        self._progress.update(self._task, description=f"{self._subject}: {stage}")

    def done(self, share: float) -> None:
        """Show which share of the work is done, up to 1."""
        self._progress.update(self._task, completed=share)


@contextmanager
def progress_line(subject: str, *, bar: bool = False, quiet: bool = False) -> Iterator[ProgressLine]:
    """Show a progress line for `subject` while the block runs, with a progress bar if `bar`.

    It appears on standard error if that is a terminal, and disappears afterwards. `quiet` shows nothing.
    """
    bars: list[ProgressColumn] = [BarColumn()] if bar else []
    text = TextColumn("{task.description}", markup=False)
    columns = (SpinnerColumn(), text, *bars, TimeElapsedColumn())
    console = Console(stderr=True)
    hidden = quiet or not console.is_terminal  # elsewhere it would leave an empty line
    with Progress(*columns, console=console, transient=True, disable=hidden, refresh_per_second=_REFRESHES) as progress:
        yield ProgressLine(progress, subject)
