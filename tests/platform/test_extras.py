"""What is not installed: the command that installs it, and that commands refuse before they work for minutes."""

from __future__ import annotations

import shlex
import sys
import tomllib
from pathlib import Path

import pytest

import dagexec
from dagexec.cli import compare, inspect, train
from dagexec.compiler import compilation
from dagexec.errors import DagexecError
from dagexec.platform.extras import REQUIREMENTS, install_command
from tests.command_line import Cli

PROJECT = Path(__file__).parents[2] / "pyproject.toml"


def test_the_commands_install_what_pyproject_names() -> None:
    extras = tomllib.loads(PROJECT.read_text())["project"]["optional-dependencies"]
    declared = {
        name: tuple(requirement.partition(";")[0].strip() for requirement in extras[name])
        for name in extras.keys() - {"bench", "bench-models", "browser", "docs", "test", "release", "dev"}
    }
    assert declared == REQUIREMENTS


def test_the_command_is_for_the_python_that_runs() -> None:
    assert shlex.split(install_command("plot")) == [sys.executable, "-m", "pip", "install", "matplotlib>=3.8"]


@pytest.fixture
def without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that read a model or a task fail the test."""

    def work(*_arguments: object) -> None:
        pytest.fail("worked before it looked for matplotlib")

    monkeypatch.setattr(compare, "read_model", work)
    monkeypatch.setattr(inspect, "read_model", work)
    monkeypatch.setattr(train, "_read_task", work)


@pytest.mark.usefixtures("without_matplotlib", "no_work")
@pytest.mark.parametrize(
    "words",
    ["compare zoo:lenet --plot times.png", "inspect zoo:lenet --draw net.png", "train lenet_digits --plot curve.png"],
)
def test_a_picture_without_matplotlib_is_refused_before_any_work_with_a_command_that_installs_it(
    words: str, cli: Cli
) -> None:
    status, out, err = cli(*words.split())
    assert (status, out) == (2, "")
    assert f"drawing needs matplotlib; install it with: {install_command('plot')}\n" in err


@pytest.mark.slow
@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize("name", ["nowhere/a.png", "a.xyz"])
@pytest.mark.parametrize("words", ["compare zoo:lenet --plot", "inspect zoo:lenet --draw", "train lenet_digits --plot"])
def test_a_picture_that_cannot_be_written_is_refused_before_any_work(words: str, name: str, cli: Cli) -> None:
    status, _, err = cli(*words.split(), name)
    assert status == 2
    assert f"{name}: cannot be drawn" in err


@pytest.mark.usefixtures("without_matplotlib")
def test_a_drawing_for_graphviz_needs_no_matplotlib(cli: Cli, tmp_path: Path) -> None:
    assert cli("inspect", "zoo:lenet", "--draw", tmp_path / "net.dot")[0] == 0
    assert (tmp_path / "net.dot").read_text().startswith("digraph")


def test_a_picture_of_low_precision_is_refused(cli: Cli) -> None:
    status, _, err = cli("compare", "zoo:lenet", "--dtype", "bfloat16", "--plot", "times.png")
    assert status == 2
    assert "--plot is about the times of runtimes" in err


def test_telemetry_without_opentelemetry_is_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    monkeypatch.setattr(compilation, "compile_model", lambda *_: pytest.fail("compiled"))
    with pytest.raises(DagexecError, match="telemetry needs opentelemetry-api; install it with: "):
        dagexec.compile("zoo:lenet", telemetry=True)


def test_the_version_is_printed(cli: Cli) -> None:
    assert cli("--version") == (0, f"dagexec {dagexec.__version__}\n", "")


def test_a_command_is_still_asked_for(cli: Cli) -> None:
    status, out, err = cli()
    assert status == 2
    assert "--version" in out + err
