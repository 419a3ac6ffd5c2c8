"""`pytest --explore` and `dagexec.testing.explore`: what fails, and what dies, says how it is repeated."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import tomllib
from pathlib import Path

import pytest

from dagexec.errors import DeadlockError
from dagexec.testing import explore

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parents[1]
TESTS = """
    import asyncio, threading
    import pytest, trio

    @pytest.mark.explore
    def test_update(value):
        def add():
            with lock:
                before = value[0]
            with lock:
                value[0] = before + 1
        lock = threading.Lock()
        value[0] = 0
        threads = [threading.Thread(target=add) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert value[0] == 2

    @pytest.fixture
    def value():
        return [0]

    @pytest.mark.explore(backend="trio")
    async def test_trio():
        await trio.sleep(86_400)

    @pytest.mark.explore
    async def test_asyncio():
        await asyncio.sleep(86_400)

    def test_other():
        print("once")
"""


@pytest.fixture
def plugged(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A folder with tests, where the plugin is the only one."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    pytester.makeini("[pytest]\naddopts = -p dagexec_pytest -p no:cacheprovider -rA --strict-markers")
    pytester.makepyfile(TESTS)
    return pytester


@pytest.mark.slow
def test_a_race_fails_and_its_seed_fails_again(plugged: pytest.Pytester) -> None:
    result = plugged.runpytest("--explore", "--", "test_a_race_fails_and_its_seed_fails_again.py")
    result.assert_outcomes(failed=1, passed=3)
    result.stdout.fnmatch_lines(["explore: seeds 0 to 99", "*assert 1 == 2*"])
    again = next(line for line in result.outlines if "again: pytest" in line)
    seed = again.rpartition("=")[2]
    once = plugged.runpytest("-k", "update", f"--explore-seed={seed}")
    once.assert_outcomes(failed=1, deselected=3)
    assert any(line.endswith(again.rpartition("again:")[2]) for line in once.outlines)


@pytest.mark.slow
def test_the_example_of_the_page_finds_its_bug(plugged: pytest.Pytester) -> None:
    page = (ROOT / "docs/exploration.md").read_text().partition("## Your own code")[2]
    plugged.makepyfile(test_cache=page.partition("```python\n")[2].partition("```")[0])
    plugged.runpytest("test_cache.py").assert_outcomes(passed=1)
    result = plugged.runpytest("--explore=30", "test_cache.py")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*again: pytest test_cache.py::test_a_value_is_computed_once --explore-seed=*"])


@pytest.mark.slow
def test_who_does_not_ask_is_not_disturbed(plugged: pytest.Pytester) -> None:
    plugged.makepyfile("import sys\ndef test_nothing_is_imported(): assert 'dagexec' not in sys.modules")
    plugged.runpytest_subprocess("-k", "nothing").assert_outcomes(passed=1)


def test_a_path_in_place_of_a_number_is_explained(plugged: pytest.Pytester) -> None:
    result = plugged.runpytest("--explore", "tests")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*write --explore=100 tests*"])


def test_installing_dagexec_gives_the_plugin() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    [(_, module)] = project["project"]["entry-points"]["pytest11"].items()
    assert (ROOT / f"{module}.py").exists()
    assert f"{module}.py" in project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]


DIES = """
import os, signal, threading

def dies():
    thread = threading.Thread(target=os.getpid)
    thread.start()
    if not thread.is_alive():  # so soon
        os.kill(os.getpid(), signal.SIGKILL)
    thread.join()
"""


@pytest.mark.slow
def test_the_seed_of_a_process_that_was_killed_is_left_behind(tmp_path: Path) -> None:
    program = DIES + "from dagexec.testing import explore\nexplore(dies)"
    environment = {"TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    ended = subprocess.run([sys.executable, "-c", program], env=environment, check=False)
    assert ended.returncode == -signal.SIGKILL
    [note] = tmp_path.glob("dagexec-explore-*.txt")
    line = note.read_text().strip()
    assert line.startswith("explore(__main__.dies, seed=")
    only = program.replace("explore(dies)", line.replace("__main__.", ""))
    assert subprocess.run([sys.executable, "-c", only], env=environment, check=False).returncode == -signal.SIGKILL


@pytest.mark.slow
def test_pytest_tells_of_the_schedule_in_which_it_was_killed(plugged: pytest.Pytester) -> None:
    plugged.makeini("[pytest]\naddopts = -p dagexec_pytest")
    plugged.makepyfile(DIES + "import pytest\n@pytest.mark.explore\ndef test_it(): dies()")
    assert plugged.runpytest_subprocess("--explore").ret == -signal.SIGKILL
    told = plugged.runpytest_subprocess("--explore", "--collect-only")
    told.stdout.fnmatch_lines(["explore: a process died in a schedule; again: pytest *::test_it --explore-seed=*"])
    assert "died" not in plugged.runpytest_subprocess("--explore", "--collect-only").stdout.str()


def deadlock() -> None:
    one, other = threading.Lock(), threading.Lock()

    def both(first: threading.Lock, second: threading.Lock) -> None:
        with first, second:
            pass

    threads = [threading.Thread(target=both, args=pair) for pair in ((one, other), (other, one))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_what_explore_raises_says_how_to_repeat_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(DeadlockError) as raised:
        explore(deadlock)
    again = raised.value.__notes__[-1]
    assert again.startswith(f"again: explore({__name__}.deadlock, seed=")
    with pytest.raises(DeadlockError):
        explore(deadlock, seed=int(again.rpartition("=")[2].rstrip(")")))
    assert list(tmp_path.iterdir()) == []


def test_explore_returns_what_it_tried() -> None:
    found = explore(threading.Event, schedules=3)
    assert (found.tried, found.failed) == (3, None)
    with pytest.raises(ValueError, match="at least 1"):
        explore(deadlock, schedules=0)
