"""`dagexec train`."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from tests.command_line import Cli

SCRIPT = Path(__file__).parents[1] / "training" / "small_task.py"


@pytest.mark.slow
def test_a_script_is_trained_and_its_curve_drawn(cli: Cli, tmp_path: Path) -> None:
    picture = tmp_path / "curve.png"
    status, out, err = cli("train", SCRIPT, "--plot", picture, "--net-type", "async_dag")
    assert status == 0
    number = r"\d+\.\d{4}"
    for line, epoch in zip(err.splitlines(), (1, 2), strict=True):  # no terminal, so no bar
        metrics = f"loss {number}, accuracy {number}"
        assert re.fullmatch(f"epoch {epoch} of 2: {metrics}; held out: {metrics}", line), line
    assert "small: 10 steps" in out
    assert "images/s" in out
    assert {"loss", "accuracy"} <= set(out.split())
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.slow
def test_json_says_what_was_reached_and_resume_goes_on(cli: Cli, tmp_path: Path) -> None:
    first = json.loads(cli("train", SCRIPT, "--epochs", 1, "--json", "--checkpoint", tmp_path)[1])
    again = json.loads(cli("train", SCRIPT, "--epochs", 2, "--json", "--checkpoint", tmp_path, "--resume")[1])
    whole = json.loads(cli("train", SCRIPT, "--epochs", 2, "--json")[1])
    assert (first["steps_before"], first["steps"]) == (0, 5)
    assert (again["steps_before"], again["steps"]) == (5, 10)
    assert again["test"] == whole["test"]
    assert again["train"] == whole["train"]
    assert whole["test"]["accuracy"] > 0.5
    assert whole["images_per_second"] > 0


@pytest.mark.slow
def test_a_finished_training_is_only_measured_again(cli: Cli, tmp_path: Path) -> None:
    cli("train", SCRIPT, "--json", "--checkpoint", tmp_path)
    found = json.loads(cli("train", SCRIPT, "--json", "--checkpoint", tmp_path, "--resume")[1])
    assert found["steps_before"] == found["steps"] == 10
    assert found["train"] == {}
    assert found["test"]["accuracy"] > 0.5


@pytest.mark.parametrize(
    "reduction", ["allreduce", *(pytest.param(name, marks=pytest.mark.slow) for name in ("tree", "ring"))]
)
def test_several_devices(cli: Cli, reduction: str) -> None:
    status, out, err = cli(
        "train", SCRIPT, "--json", "--epochs", 1, "--device", "sim:0", "--device", "sim:1", "--reduction", reduction
    )
    assert status == 0, err
    assert json.loads(out)["steps"] == 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["lenet_digit"], "did you mean lenet_digits"),
        (["nothing.py"], "nothing.py: no such script"),
        ([SCRIPT, "--resume"], "--resume needs --checkpoint DIR"),
        ([SCRIPT, "--device", "cuda:5"], "cuda:5"),
        ([SCRIPT, "--device", "sim:0", "--device", "sim:1", "--reduction", "star"], "one of allreduce, tree, ring"),
        ([SCRIPT, "--net-type", "diagonal"], "diagonal"),
        ([SCRIPT, "--reduction", "star"], "one of allreduce, tree, ring"),
        ([SCRIPT, "--checkpoint", SCRIPT], "small_task.py: checkpoints cannot be written there"),
    ],
)
def test_what_cannot_be_trained_is_an_error(cli: Cli, arguments: list[object], message: str) -> None:
    status, _out, err = cli("train", *arguments)
    assert status == 2
    assert message in " ".join(err.split())


@pytest.mark.parametrize(
    ("text", "message"),
    [("x = 1", "expected a function `make_task(seed)`"), ("def make_task(seed): return 3", "found a int")],
)
def test_a_script_without_a_task_is_refused(cli: Cli, tmp_path: Path, text: str, message: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(text)
    status, _out, err = cli("train", script)
    assert status == 2
    assert message in " ".join(err.split())


@pytest.mark.parametrize(
    ("name", "message"), [("curve.text", "ends with one of"), ("none/curve.png", "is not a folder")]
)
def test_a_picture_that_cannot_be_drawn_is_refused_before_the_training(
    cli: Cli, tmp_path: Path, name: str, message: str
) -> None:
    status, _out, err = cli("train", SCRIPT, "--checkpoint", tmp_path / "run", "--plot", tmp_path / name)
    assert status == 2
    assert message in " ".join(err.split())
    assert list(tmp_path.iterdir()) == []


def test_a_script_imports_what_is_beside_it(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "beside_the_script.py").write_text(SCRIPT.read_text())
    script = tmp_path / "script.py"
    script.write_text("from beside_the_script import make_task")
    status, out, err = cli("train", script, "--json", "--epochs", 0)
    assert status == 0, err
    assert json.loads(out)["steps"] == 0


@pytest.mark.slow
def test_a_training_begun_anew_in_a_folder_with_checkpoints_is_refused(cli: Cli, tmp_path: Path) -> None:
    cli("train", SCRIPT, "--json", "--epochs", 1, "--checkpoint", tmp_path)
    status, _out, err = cli("train", SCRIPT, "--epochs", 1, "--checkpoint", tmp_path)
    assert status == 2
    assert "holds checkpoints of an earlier training" in " ".join(err.split())
    status, _out, err = cli("train", SCRIPT, "--seed", 3, "--checkpoint", tmp_path, "--resume")
    assert status == 2
    assert "was written with seed 0, and this training has 3" in " ".join(err.split())
