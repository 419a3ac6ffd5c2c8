"""Mutants fit the code, and a trial tells killed ones from others."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mutants import trial
from tests.mutants.__main__ import GROUPS
from tests.mutants.mutant import Mutant
from tests.mutants.trial import MutantError, attempt, check, failing

CODE = "def double(x):\n    return 2 * x\n"
TEST = "from code_of_the_test import double\n\n\ndef test_double():\n    assert double(2) == 4\n"


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "code_of_the_test.py").write_text(CODE)
    (tmp_path / "test_code.py").write_text(TEST)
    yield tmp_path
    assert (tmp_path / "code_of_the_test.py").read_text() == CODE


def mutant(before: str, after: str, file: str = "code_of_the_test.py") -> Mutant:
    return Mutant("it is", file, before, after, ("test_code.py",))


def test_every_mutant_stands_in_the_code_once() -> None:
    check([mutant for mutants in GROUPS.values() for mutant in mutants])
    assert sum(map(len, GROUPS.values())) >= 35


@pytest.mark.parametrize(
    ("mutants", "problem"),
    [
        ([mutant("3 * x", "x")], "has its text 0 times"),
        ([mutant("x", "y")], "has its text 2 times"),
        ([mutant("2 * x", "2 * x")], "changes nothing"),
        ([mutant("2 * x", "x"), mutant("2 * x", "x + 1")], "it is: twice"),
        ([Mutant("it is", "code_of_the_test.py", "2 * x", "x", ("test_gone.py",))], "no test_gone.py"),
    ],
)
def test_a_mutant_that_does_not_fit_is_refused(mutants: list[Mutant], problem: str, root: Path) -> None:
    with pytest.raises(MutantError, match=problem):
        check(mutants, root)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("after", "outcome", "seen_by"),
    [
        ("3 * x", "killed", "test_code.py::test_double"),
        ("x * 2", "survived", ""),
        ("2 *", "broken", ""),
        ("__import__('os').abort()", "ended", ""),
        ("__import__('signal').pause()", "hung", ""),
    ],
)
def test_a_trial_says_what_came_of_a_mutant(after: str, outcome: str, seen_by: str, root: Path) -> None:
    found = attempt(mutant("2 * x", after), root, seconds=10.0 if outcome == "hung" else trial.SECONDS)
    assert (found.outcome, found.seen_by) == (outcome, seen_by)
    assert found.is_killed == (outcome in ("killed", "ended", "hung"))


@pytest.mark.slow
def test_tests_that_fail_without_a_mutant_are_named(root: Path) -> None:
    assert not failing(["test_code.py"], root)
    (root / "test_code.py").write_text(TEST.replace("4", "5"))
    assert failing(["test_code.py"], root) == "test_code.py::test_double"
    shutil.rmtree(root / "__pycache__", ignore_errors=True)
