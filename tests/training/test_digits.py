"""Real images: networks of the zoo on the handwritten digits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dagexec.training.trainer import StepReport, Trainer
from dagexec.zoo import tasks


@pytest.mark.slow
def test_lenet_recognizes_985_of_1000_digits_it_has_not_seen() -> None:
    with Trainer(tasks.make("lenet_digits"), net_type="dag", num_workers=2) as trainer:
        trainer.train()
        assert trainer.evaluate()["accuracy"] >= 0.985


@pytest.mark.slow
def test_lenet_ends_with_the_same_bytes_on_every_schedule() -> None:
    task = tasks.make("lenet_digits")
    task = replace(task, train={name: array[:320] for name, array in task.train.items()})
    found = {}
    for net_type, workers in (("simple", 1), ("dag", 2), ("async_dag", 3)):
        with Trainer(task, net_type=net_type, num_workers=workers) as trainer:
            trainer.train(1)
            workspace = trainer.steps.workspace
            found[net_type] = [workspace.fetch_blob(name).tobytes() for name in trainer.steps.checkpoint_blobs()]
    assert found["dag"] == found["simple"]
    assert found["async_dag"] == found["simple"]


class EnoughError(Exception):
    """Ends a training."""


@pytest.mark.slow
@pytest.mark.parametrize("name", tasks.names())
def test_every_task_learns_in_its_first_steps(name: str) -> None:
    losses: list[float] = []

    def note(report: StepReport) -> None:
        losses.append(report.metrics["loss"])
        if report.step == 30:
            raise EnoughError

    with Trainer(tasks.make(name)) as trainer, pytest.raises(EnoughError):
        trainer.train(on_step=note)
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
