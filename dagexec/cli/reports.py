"""The option `--report` of several commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from dagexec.report.document import Report

ReportOption = Annotated[
    Path | None,
    typer.Option("--report", metavar="FILE.html", help="Write a page that shows it; see docs/reports.md."),
]


def write_report(report: Report, path: Path) -> None:
    """Write the page and say so. Raises OutputError if it cannot be written."""
    report.write(path)
    Console(stderr=True).print(f"the report is in {path}", markup=False, highlight=False)
