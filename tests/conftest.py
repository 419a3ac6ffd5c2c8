"""Fixtures that several test modules use."""

from __future__ import annotations

import os
import sys

os.environ["DAGEXEC_CHOICES"] = "off"  # before anything of dagexec looks: what was measured elsewhere decides nothing
os.environ["DAGEXEC_TUNING_SECONDS"] = "0"

import pytest

from dagexec.cli import main
from tests.command_line import Cli


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Run the command line in this process: exit status, standard output, standard error."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["dagexec", *map(str, arguments)])
        monkeypatch.setenv("COLUMNS", "200")
        try:
            main()
            status = 0
        except SystemExit as end:
            status = int(end.code or 0)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run
