"""`dagexec train` under mpiexec: ranks that train as one, one that is killed, ones that differ."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from dagexec.training.checkpoint import latest_checkpoint
from tests.mpi import run

SCRIPT = Path(__file__).parent / "small_task.py"


def train(ranks: int, *options: object) -> tuple[int, str, str]:
    return run(ranks, "-m", "dagexec", "train", SCRIPT, "--num-workers", "1", "--json", *options)


@pytest.fixture(scope="module")
def alone() -> dict[str, dict[str, float]]:
    status, out, err = train(1, "--epochs", 1)
    assert status == 0, err
    found: dict[str, dict[str, float]] = json.loads(out)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_train_as_one_process_does(ranks: int, alone: dict[str, dict[str, float]]) -> None:
    status, out, err = train(ranks, "--epochs", 1)
    assert status == 0, err
    [line] = out.splitlines()  # rank 0 alone prints
    found = json.loads(line)
    assert found["steps"] == 5
    # each rank normalizes its own part of a batch, and drops other pixels, so curves are near but not equal
    assert found["train"]["loss"] == pytest.approx(alone["train"]["loss"], rel=0.1)


@pytest.mark.slow
def test_a_killed_rank_is_named_and_the_job_goes_on_with_fewer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KILLED_RANK", "2")
    monkeypatch.setenv("KILLED_AT", "8")
    options = ("--epochs", 3, "--checkpoint", tmp_path, "--checkpoint-steps", 2)
    start = time.monotonic()
    status, out, err = train(4, *options)
    assert status != 0
    assert time.monotonic() - start < 60  # a fresh start of four interpreters on a busy machine included
    assert "rank 2" in " ".join((out + err).split()), err
    saved = latest_checkpoint(tmp_path)
    assert saved is not None
    monkeypatch.delenv("KILLED_RANK")
    status, out, err = train(2, *options, "--resume")
    assert status == 0, err
    found = json.loads(out)
    assert 2 <= found["steps_before"] <= 8
    assert found["steps"] == 15


@pytest.mark.slow
def test_ranks_that_begin_with_other_parameters_are_told_which(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTHER_RANK", "1")
    status, _out, err = train(3, "--epochs", 1)
    assert status != 0
    assert "parameters differ between ranks: 'conv_w' of ranks [1] is not that of rank 0" in " ".join(err.split())
