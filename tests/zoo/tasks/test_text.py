"""The task char_lstm: its text, and its training on one device and on two."""

from __future__ import annotations

from importlib import metadata
from types import SimpleNamespace

import numpy as np
import pytest

from dagexec.errors import DataError
from dagexec.training.trainer import Trainer
from dagexec.zoo import tasks
from dagexec.zoo.tasks import text


def losses(devices: list[str], epochs: int) -> tuple[list[float], float]:
    """The loss of each step, and that of what is held out."""
    found: list[float] = []
    with Trainer(tasks.make("char_lstm"), devices=devices, num_workers=2) as trainer:
        trainer.train(epochs, on_step=lambda report: found.append(report.metrics["loss"]))
        return found, trainer.evaluate()["loss"]


@pytest.mark.slow
def test_the_task_learns_and_measures_what_is_held_out() -> None:
    found, held_out = losses(["cpu"], 3)
    per_epoch = np.reshape(found, (3, -1)).mean(axis=1)
    assert (np.diff(per_epoch) < -0.2).all(), per_epoch
    assert per_epoch[-1] < held_out + 0.3 < 3.2


@pytest.mark.slow
def test_two_devices_learn_as_one() -> None:
    one, held_out = losses(["cpu"], 1)
    two, other = losses(["sim:0", "sim:1"], 1)
    np.testing.assert_allclose(two, one, rtol=1e-3)
    assert abs(other - held_out) < 1e-2


def test_what_is_held_out_is_not_trained_on() -> None:
    task = tasks.make("char_lstm")
    trained = {bytes(piece) for piece in np.asarray(task.train["next"])}
    assert not trained & {bytes(piece) for piece in np.asarray(task.test["next"])}
    whole = task.train_samples * text.STEPS // 8 + task.test_samples * text.STEPS
    assert len(text.readme()) - 3 * text.STEPS <= whole <= len(text.readme())


def test_without_the_file_the_installed_readme_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = SimpleNamespace(json={"description": "# the text"})
    monkeypatch.setattr(text, "__file__", "/nowhere/dagexec/tasks/text.py")
    monkeypatch.setattr(metadata, "metadata", lambda _name: installed)
    assert text.readme() == "# the text"
    installed.json.clear()
    with pytest.raises(DataError, match="README of dagexec is neither beside the package nor installed"):
        text.readme()
