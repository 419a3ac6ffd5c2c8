"""A newcomer's walk through the tutorial: every command and program in order, and what the page says they print."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "tutorial.md"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)

Step = tuple[str, str, str]
"""`shell` or `python`, what is run, and what it prints."""


def steps(text: str) -> Iterator[Step]:
    program = ""
    for language, body in BLOCK.findall(text):
        if language == "python":
            if program:
                yield "python", program, ""
            program = body
        elif program:
            yield "python", program, body
            program = ""
        else:
            for part in re.split(r"^\$ ", body, flags=re.MULTILINE)[1:]:
                command, _, printed = part.partition("\n")
                yield "shell", command, printed
    if program:
        yield "python", program, ""


def agrees(shown: str, printed: str) -> bool:
    """`...` stands for any text; how wide the columns of a table are depends on the figures."""
    shown, printed = (re.sub(r" +", " ", text) for text in (shown, printed))
    pattern = ".*".join(re.escape(part.strip("\n")) for part in shown.strip().split("..."))
    return re.fullmatch(pattern, printed.strip(), re.DOTALL) is not None


def test_what_the_page_shows_is_told_from_what_it_does_not() -> None:
    assert agrees("a ...\nb", "a 1\nb\n")
    assert agrees("...\nb", "what\never\nb")
    assert not agrees("a ...\nb", "a 1\nc")
    assert not agrees("a", "a b")
    assert [step[:2] for step in steps("```\n$ one\n$ two\nout\n```\n```python\nx\n```\n")] == [
        ("shell", "one"),
        ("shell", "two"),
        ("python", "x\n"),
    ]


@pytest.mark.slow
def test_the_tutorial_does_what_it_says(tmp_path: Path) -> None:
    tool = tmp_path / "bin" / "dagexec"
    tool.parent.mkdir()
    tool.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m dagexec "$@"\n')
    tool.chmod(0o755)
    environment = os.environ | {
        "PATH": f"{tool.parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "COLUMNS": "120",
        "DAGEXEC_CHOICES": "",
    }
    walked = list(steps(PAGE.read_text()))
    assert len(walked) > 10
    for kind, what, shown in walked:
        command = ["bash", "-ec", what] if kind == "shell" else [sys.executable, "-c", what]
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, (what, done.stdout)
        assert agrees(shown, done.stdout), f"{what}\nshows\n{shown}\nand printed\n{done.stdout}"
