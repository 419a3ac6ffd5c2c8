"""Which tests run: parts by the name of a test, and by the commit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from _pytest.assertion import rewrite

from tests import rewriting, selection

pytest_plugins = ["pytester"]

NAMES = [f"tests/test_a.py::test_b[{number}]" for number in range(300)]


def test_every_test_is_in_one_part_and_every_part_has_some() -> None:
    parts = [{name for name in NAMES if selection.part_of_test(name) == part} for part in range(selection.PARTS)]
    assert all(parts)
    assert sum(map(len, parts)) == len(set().union(*parts)) == len(NAMES)


def _commit(folder: Path) -> None:
    author = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *author, "commit", "--quiet", "--allow-empty", "-m", "one more"], cwd=folder, check=True)


def test_commits_one_after_another_run_every_part(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    found = []
    for _ in range(selection.PARTS):
        _commit(tmp_path)
        found.append(selection.part_of_commit(tmp_path))
        assert selection.part_of_commit(tmp_path) == found[-1]
    assert sorted(found) == list(range(selection.PARTS))


def test_without_a_history_the_files_decide(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    parts = set()
    for number in range(20):
        (tmp_path / "tests" / "test_a.py").write_text(f"x = {number}")
        parts.add(selection.part_of_commit(tmp_path))
    assert len(parts) > 1
    assert parts <= set(range(selection.PARTS))


def test_a_part_is_all_the_commits_or_a_number() -> None:
    assert selection.chosen_part("all") is None
    assert selection.chosen_part("commit") == selection.part_of_commit()
    assert selection.chosen_part("3") == 3
    for wrong in ("-1", str(selection.PARTS), "some"):
        with pytest.raises(pytest.UsageError, match="all, commit, or a number below"):
            selection.chosen_part(wrong)


@pytest.mark.slow
def test_slow_tests_of_one_part_run_beside_all_others_and_the_rest_is_told(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["tests.selection"]\n')
    (tmp_path / "test_a.py").write_text(
        "import pytest\n"
        "def test_quick(): pass\n"
        "@pytest.mark.slow\n"
        '@pytest.mark.parametrize("n", range(99))\n'
        "def test_slow(n): pass\n"
    )
    options = ["-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), "--part=3", "-n", "1"]
    command = [sys.executable, "-m", "pytest", *options, str(tmp_path)]
    done = subprocess.run(command, cwd=selection.ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    mine = sum(selection.part_of_test(f"test_a.py::test_slow[{n}]") == 3 for n in range(99))
    assert 0 < mine < 99
    assert f"{1 + mine} passed" in done.stdout
    assert f"part 3 of {selection.PARTS}: {99 - mine} tests of other parts were left out" in done.stdout


def test_of_quick_tests_with_many_cases_every_case_runs_in_one_part_of_a_few(pytester: pytest.Pytester) -> None:
    pytester.makeconftest('pytest_plugins = ["tests.selection"]\n')
    pytester.makepyfile(
        "import pytest\n"
        f'@pytest.mark.parametrize("n", range({selection.MANY + 1}))\n'
        "def test_many(n): pass\n"
        f'@pytest.mark.parametrize("n", range({selection.MANY}))\n'
        "def test_few(n): pass\n"
    )
    runs = []
    for part in range(selection.QUICK_PARTS):
        passed, _, _ = pytester.inline_run(f"--part={part}").listoutcomes()
        runs.append({report.nodeid.partition("::")[2] for report in passed})
    assert all({f"test_few[{n}]" for n in range(selection.MANY)} <= run for run in runs)
    many = sorted(name for run in runs for name in run if "many" in name)
    assert many == sorted(f"test_many[{n}]" for n in range(selection.MANY + 1))


def test_asserts_are_rewritten_where_pytest_looks_for_them(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    file = tmp_path / "test_a.py"
    file.write_text("def test_a():\n    assert 1 == 2\n")
    rewriting.rewrite_asserts([file], pytestconfig)
    [written] = tmp_path.rglob(f"*{rewrite.PYC_TAIL}")
    assert written == rewrite.get_cache_dir(file) / written.name
    code = rewrite._read_pyc(file, written)
    assert code is not None
    assert "@pytest_ar" in code.co_names
