"""What users of other command lines expect: completion, the version, no color where none is wanted, `python -m`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import dagexec
from tests.command_line import Cli

ROOT = Path(__file__).parents[2]


def dagexec_process(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    return subprocess.run(
        [sys.executable, "-m", "dagexec", *words],
        cwd=ROOT,
        env=environment | variables,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_python_m_tells_the_version() -> None:
    assert dagexec_process("--version").stdout == f"dagexec {dagexec.__version__}\n"


@pytest.mark.slow
def test_colors_are_for_who_wants_them() -> None:
    failing = ("inspect", "missing.onnx")
    assert "\x1b[" not in dagexec_process(*failing).stderr  # no terminal
    assert "\x1b[31m" in dagexec_process(*failing, FORCE_COLOR="1").stderr
    assert "\x1b[31m" not in dagexec_process(*failing, FORCE_COLOR="1", NO_COLOR="1").stderr


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("dagexec comp", ["compare"]),
        ("dagexec compare --rep", ["--repeat", "--report"]),
        ("dagexec run zoo:goog", ["zoo:googlenet"]),
        ("dagexec train lenet_d", ["lenet_digits"]),
        ("dagexec operators ConvTransposeG", ["ConvTransposeGradient"]),
        ("dagexec run --net-type as", ["async_dag"]),
    ],
)
def test_words_are_completed(line: str, expected: list[str], cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_DAGEXEC_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(len(line.split()) - 1))
    _, found, _ = cli()
    assert sorted(found.split()) == expected


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_takes_the_script_of_the_completion(tmp_path: Path) -> None:
    tool = tmp_path / "dagexec"
    tool.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m dagexec "$@"\n')
    tool.chmod(0o755)
    script = f"""
        cd {ROOT}; export PATH="{tmp_path}:$PATH"
        eval "$(_DAGEXEC_COMPLETE=source_bash dagexec)"
        COMP_WORDS=(dagexec insp) COMP_CWORD=1
        $(complete -p dagexec | sed 's/.*-F \\([^ ]*\\) .*/\\1/') dagexec insp dagexec
        echo "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "inspect", done.stderr
