"""Trying mutants: in a copy of the repository, one at a time, whether the tests that look there see it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.mutant import Mutant
from tests.selection import ROOT

SECONDS = 180.0
"""For the tests of one mutant; one that hangs is seen when they are over."""

_PARTS = ("dagexec", "ops", "scheduler", "tests", "pyproject.toml", "README.md")
_PASSED, _FAILED = 0, 1  # statuses of pytest
_OUTCOMES = {None: "hung", _FAILED: "killed", _PASSED: "survived"}


@dataclass(frozen=True)
class Trial:
    """What came of a mutant.

    Attributes:
        outcome: `killed` by a test that failed, `ended` when it ended the process and `hung` when time was over, which
            is killed too, `survived`, or `broken`: the tests did not run, so nothing is known.
        seen_by: the test that failed.
    """

    mutant: Mutant
    outcome: str
    seconds: float
    seen_by: str = ""

    @property
    def is_killed(self) -> bool:
        """True when a test saw it."""
        return self.outcome in ("killed", "ended", "hung")


class MutantError(Exception):
    """A mutant whose text is not in the file, or stands there more than once: the code has changed since."""


def check(mutants: Sequence[Mutant], root: Path = ROOT) -> None:
    """Raise MutantError, naming all of them, when mutants do not fit the code, change nothing or share a name."""
    problems = []
    for mutant in mutants:
        found = (root / mutant.file).read_text().count(mutant.before)
        if found != 1:
            problems.append(f"{mutant.name}: {mutant.file} has its text {found} times, expected once")
        if mutant.before == mutant.after:
            problems.append(f"{mutant.name}: changes nothing")
        problems += [
            f"{mutant.name}: no {test}" for test in mutant.tests if not (root / test.partition("::")[0]).exists()
        ]
    names = [mutant.name for mutant in mutants]
    problems += [f"{name}: twice" for name in sorted(set(names)) if names.count(name) > 1]
    if problems:
        raise MutantError("\n".join(problems))


@contextmanager
def copied_repository() -> Iterator[Path]:
    """A copy of what tests need, its links kept."""
    folder = Path(tempfile.mkdtemp(prefix="dagexec-mutants-"))
    try:
        for part in _PARTS:
            source = ROOT / part
            if source.is_dir():
                ignored = shutil.ignore_patterns("__pycache__", ".*_cache")
                shutil.copytree(source, folder / part, symlinks=True, ignore=ignored)
            else:
                shutil.copy(source, folder / part)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def failing(tests: Sequence[str], root: Path) -> str:
    """What fails of `tests` on the code as it is, empty when nothing does: only then is it a mutant that fails them."""
    status, seen_by = _run(tests, root)
    return "" if status == _PASSED else seen_by or f"pytest ends with status {status}"


def attempt(mutant: Mutant, root: Path, seconds: float = SECONDS) -> Trial:
    """Put the mutant into the copy at `root`, run its tests, and take it out again."""
    path = root / mutant.file
    whole = path.read_text()
    start = time.monotonic()
    try:
        path.write_text(whole.replace(mutant.before, mutant.after))
        status, seen_by = _run(mutant.tests, root, seconds)
    finally:
        path.write_text(whole)
    ended = status is not None and status < 0
    outcome = "ended" if ended else _OUTCOMES.get(status, "broken")
    return Trial(mutant, outcome, time.monotonic() - start, seen_by)


def _run(tests: Sequence[str], root: Path, seconds: float = SECONDS) -> tuple[int | None, str]:
    """The status of pytest, None when time was over, and the test that failed first."""
    command = [
        sys.executable,
        "-B",
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "-o",
        "faulthandler_timeout=0",
    ]
    process = subprocess.Popen(
        [*command, *tests], cwd=root, env=os.environ | {"PYTHONPATH": str(root)}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.communicate()
        return None, ""
    failed = [
        line.split(" - ")[0].removeprefix("FAILED ") for line in output.splitlines() if line.startswith("FAILED ")
    ]
    return process.returncode, failed[0] if failed else ""
