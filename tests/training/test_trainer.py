"""Trainer: the same bytes on every schedule and after every interruption, and what ends a training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from dagexec.core.node import arguments_of
from dagexec.errors import (
    ArgumentError,
    DeviceError,
    FeedError,
    NonFiniteError,
    OperatorError,
    OutputError,
    SchemaError,
    StorageError,
)
from dagexec.training.checkpoint import latest_checkpoint
from dagexec.training.optimizer import SGD, Adam
from dagexec.training.prediction import prediction_net
from dagexec.training.steps import LocalSteps
from dagexec.training.task import TrainingTask
from dagexec.training.trainer import StepReport, Trainer
from tests.training.small_task import BATCH, STEPS, make_task


def final_bytes(trainer: Trainer) -> dict[str, bytes]:
    trainer.steps.collect()
    return {name: trainer.steps.workspace.fetch_blob(name).tobytes() for name in trainer.steps.checkpoint_blobs()}


def trained(task: TrainingTask, **options: object) -> dict[str, bytes]:
    with Trainer(task, **options) as trainer:  # type: ignore[arg-type]
        trainer.train()
        return final_bytes(trainer)


@pytest.fixture(scope="module")
def in_order() -> dict[str, bytes]:
    return trained(make_task(0), net_type="simple", num_workers=1)


@pytest.mark.parametrize(("net_type", "workers"), [("dag", 1), ("dag", 3), ("async_dag", 2), ("async_dag", 4)])
def test_every_net_type_and_number_of_workers_ends_with_the_same_bytes(
    net_type: str, workers: int, in_order: dict[str, bytes]
) -> None:
    assert trained(make_task(0), net_type=net_type, num_workers=workers) == in_order


def test_a_simulated_device_trains_to_the_bytes_of_the_host_on_the_same_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    for choice in ("name_engines", "use_whole_batches"):  # NumPy's operators on both, row by row
        monkeypatch.setattr(f"dagexec.training.steps.{choice}", lambda net: None)
    on_device = trained(make_task(0), net_type="async_dag", num_workers=2, devices=["sim:0"])
    assert on_device == trained(make_task(0), net_type="simple", num_workers=1)


@pytest.mark.parametrize("stopped_at", [3, STEPS, 7])
def test_a_training_that_goes_on_ends_with_the_bytes_of_one_that_never_stopped(
    stopped_at: int, tmp_path: Path, in_order: dict[str, bytes]
) -> None:
    class StopError(Exception):
        pass

    def stop(report: StepReport) -> None:
        if report.step == stopped_at + 1:
            raise StopError

    first = Trainer(make_task(0), checkpoints=tmp_path, checkpoint_steps=stopped_at)
    with first, pytest.raises(StopError):
        first.train(on_step=stop)
    with Trainer(make_task(0), checkpoints=tmp_path, resume=True) as second:
        assert second.step == stopped_at
        second.train()
        assert final_bytes(second) == in_order


def test_another_seed_gives_other_bytes(in_order: dict[str, bytes]) -> None:
    assert trained(make_task(0), seed=1) != in_order


@pytest.mark.slow
def test_steps_are_reported_and_held_out_samples_measured() -> None:
    reports: list[StepReport] = []
    epochs: list[int] = []
    with Trainer(make_task(0)) as trainer:
        before = trainer.evaluate()
        trainer.train(on_step=reports.append, on_epoch=epochs.append)
        after = trainer.evaluate(batch_size=7)
        again = trainer.evaluate(batch_size=100)
    assert [report.step for report in reports] == list(range(1, 2 * STEPS + 1))
    assert [report.epoch for report in reports] == [1] * STEPS + [2] * STEPS
    assert epochs == [1, 2]
    assert reports[0].samples == BATCH
    assert after["loss"] < before["loss"]
    assert after["accuracy"] == pytest.approx(again["accuracy"])
    assert after["loss"] == pytest.approx(again["loss"], rel=1e-5)


def test_the_seconds_of_a_step_are_without_measures_and_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]

    def measure(_epoch: int) -> None:
        clock[0] += 100

    def step(report: StepReport) -> None:
        reports.append(report)
        clock[0] += 10

    reports: list[StepReport] = []
    monkeypatch.setattr("dagexec.training.trainer.time", SimpleNamespace(perf_counter=lambda: clock[0]))
    with Trainer(make_task(0)) as trainer:
        trainer.train(on_step=step, on_epoch=measure)
    assert [report.seconds for report in reports] == [0] * 2 * STEPS


def test_a_loss_that_is_no_number_ends_the_training_and_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    with Trainer(make_task(0), checkpoints=tmp_path) as trainer:
        trainer.train(1)
    saved = latest_checkpoint(tmp_path)
    with Trainer(make_task(0), checkpoints=tmp_path, checkpoint_steps=1, resume=True) as trainer:
        trainer.steps.workspace.feed_blob("pred_b", np.full(10, np.nan, np.float32))
        with pytest.raises(NonFiniteError, match="loss is nan in step 6"):
            trainer.train()
    assert latest_checkpoint(tmp_path) == saved


@pytest.mark.parametrize("devices", [["cpu"], ["sim:0", "sim:1"]])
def test_parameters_that_are_no_numbers_are_not_saved_though_the_loss_is_one(
    devices: list[str], tmp_path: Path
) -> None:
    def spoil(report: StepReport) -> None:
        if report.step == STEPS:
            array = trainer.steps.workspace.fetch_blob("conv_w").copy()
            array[0] = np.inf
            trainer.steps.workspace.feed_blob("conv_w", array)

    with Trainer(make_task(0), devices=devices, checkpoints=tmp_path, checkpoint_steps=2) as trainer:
        if len(devices) > 1:
            trainer.steps.collect()
            trainer.steps.collect = lambda: None  # type: ignore[method-assign]
        with pytest.raises(NonFiniteError, match="conv_w has a NaN or an infinity after step 5"):
            trainer.train(1, on_step=spoil)
    assert [path.name for path in sorted(tmp_path.iterdir())] == [
        "step-000000000002.minidb",
        "step-000000000004.minidb",
    ]


def test_a_training_begun_anew_does_not_mix_with_an_earlier_one(tmp_path: Path) -> None:
    with Trainer(make_task(0), checkpoints=tmp_path) as trainer:
        trainer.train(1)
    with pytest.raises(StorageError, match=r"holds checkpoints of an earlier training, the newest step-0*5\.minidb"):
        Trainer(make_task(0), checkpoints=tmp_path)


@pytest.mark.parametrize(
    ("task", "seed", "message"),
    [
        (lambda: make_task(0), 1, "was written with seed 0, and this training has 1"),
        (lambda: replace(make_task(0), batch_size=24), 0, "written with batch size 48, and this training has 24"),
        (lambda: replace(make_task(0), name="other"), 0, "written with task small, and this training has other"),
        (
            lambda: replace(make_task(0), train={name: array[:96] for name, array in make_task(0).train.items()}),
            0,
            "written with samples 240, and this training has 96",
        ),
        (lambda: make_task(0, Adam(0.1)), 0, "is of another model: 'conv_w_first_moment' is missing"),
    ],
    ids=["seed", "batch", "name", "samples", "optimizer"],
)
def test_a_checkpoint_of_another_training_is_refused(
    task: Callable[[], TrainingTask], seed: int, message: str, tmp_path: Path
) -> None:
    with Trainer(make_task(0), checkpoints=tmp_path) as trainer:
        trainer.train(1)
    with pytest.raises(StorageError, match=message):
        Trainer(task(), seed=seed, checkpoints=tmp_path, resume=True)


def test_a_folder_that_cannot_be_written_is_named_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="file: checkpoints cannot be written there"):
        Trainer(make_task(0), checkpoints=tmp_path / "file")
    with pytest.raises(OutputError, match="run: checkpoints cannot be written there"):
        Trainer(make_task(0), checkpoints=tmp_path / "file" / "run")


@pytest.mark.parametrize("devices", [["cpu"], ["sim:0", "sim:1"]])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": np.zeros((240, 1, 9, 9), np.float32)}, r"'data': expected samples of shape \[1, 8, 8\].*\[1, 9, 9\]"),
        ({"label": np.zeros((240, 1), np.int32)}, r"'label': expected samples of shape \[\].*found \[1\]"),
        ({"weight": np.zeros(240)}, r"expected the inputs \['data', 'label'\], found \['data', 'label', 'weight'\]"),
    ],
)
def test_samples_that_the_model_does_not_declare_are_refused(
    devices: list[str], changes: dict[str, np.ndarray], message: str
) -> None:
    task = make_task(0)
    train = {**task.train, **changes}
    with Trainer(replace(task, train=train), devices=devices) as trainer, pytest.raises(FeedError, match=message):
        trainer.train()
    test = {**task.test, **{name: array[:100] for name, array in changes.items()}}
    with Trainer(replace(task, test=test), devices=devices) as trainer, pytest.raises(FeedError, match=message):
        trainer.evaluate()


def test_an_unknown_reduction_is_named_for_one_device_too() -> None:
    with pytest.raises(ArgumentError, match="reduction must be one of allreduce, tree, ring, found 'star'"):
        Trainer(make_task(0), reduction="star")


@pytest.mark.parametrize("net_type", ["simple", "dag", "async_dag"])
def test_stop_on_nan_names_the_operator_before_any_parameter_is_updated(net_type: str) -> None:
    task = replace(make_task(0), optimizer=Adam(1e30))
    with Trainer(task, net_type=net_type, stop_on_nan=True) as trainer:
        with pytest.raises(OperatorError, match=r"SpatialBN 'bn' \(operator 1\) made 8 of 8 elements of blob"):
            trainer.train()
        bad = [
            name
            for name in ("conv_w", "bn_s", "pred_w", "conv_w_first_moment")
            if not np.isfinite(trainer.steps.workspace.fetch_blob(name)).all()
        ]
    assert bad == []


def test_a_label_out_of_range_is_named() -> None:
    task = make_task(0)
    task.train["label"][:] = 10
    with (
        Trainer(task) as trainer,
        pytest.raises(OperatorError, match=r"SoftmaxWithLoss 'softmax' .*10"),
    ):
        trainer.train()


@pytest.mark.parametrize("devices", [["cpu", "sim:99"], ["cuda:7"], []])
def test_a_device_that_is_missing_is_named(devices: list[str]) -> None:
    with pytest.raises(DeviceError, match=devices[-1] if devices else "device"):
        Trainer(make_task(0), devices=devices)


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ["allreduce", "tree", "ring"])
def test_several_devices_train_and_resume(reduction: str, tmp_path: Path) -> None:
    def options(**more: object) -> dict[str, object]:
        return {"devices": ["sim:0", "sim:1"], "reduction": reduction, "checkpoints": tmp_path, **more}

    with Trainer(make_task(0), **options()) as whole:  # type: ignore[arg-type]
        whole.train()
        expected = final_bytes(whole)
        measured = whole.evaluate()
    for path in tmp_path.iterdir():
        path.unlink()
    with Trainer(make_task(0), **options()) as first:  # type: ignore[arg-type]
        first.train(1)
    with Trainer(make_task(0), **options(resume=True)) as second:  # type: ignore[arg-type]
        assert second.step == STEPS
        second.train()
        assert final_bytes(second) == expected
        assert second.evaluate() == measured


def test_a_batch_that_devices_cannot_share_is_an_error() -> None:
    with pytest.raises(SchemaError, match=r"batch of 48 cannot be divided equally among 5 device"):
        Trainer(make_task(0), devices=[f"sim:{n}" for n in range(5)])


def test_stop_on_nan_is_for_one_device() -> None:
    with pytest.raises(SchemaError, match="require one device"):
        Trainer(make_task(0), devices=["sim:0", "sim:1"], stop_on_nan=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 1000}, "a batch of 1000 needs as many samples"),
        ({"batch_size": 0}, "the batch size must be at least 1"),
        ({"train": {"data": np.zeros(3), "label": np.zeros(4)}}, "must be of one length"),
    ],
)
def test_a_task_that_makes_no_sense_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        replace(make_task(0), **changes)  # type: ignore[arg-type]


def test_momentum_and_nothing_else_is_the_state_of_sgd() -> None:
    with Trainer(make_task(0, SGD(0.1, momentum=0.9))) as trainer:
        names = set(trainer.steps.checkpoint_blobs())
    assert {"conv_w_momentum", "pred_b_momentum", "bn_rm", "bn_riv", "optimizer_iteration"} <= names


@pytest.mark.slow
@pytest.mark.parametrize("devices", [["cpu"], ["cpu", "cpu"]])
def test_steps_compute_batches_as_a_whole_and_nets_for_inference_do_not(devices: list[str] | None) -> None:
    with Trainer(make_task(0), devices=devices) as trainer:
        steps = trainer.steps
        net = steps.helper.net if isinstance(steps, LocalSteps) else steps._model.replicas[0].helper.net
    layers = [one for one in net.op if one.type in ("FC", "Conv")]
    assert layers
    assert all(not arguments_of(one, one.type).bool("batch_invariant", True) for one in layers)
    result = next(name for one in reversed(net.op) if one.type == "FC" for name in one.output)
    for one in prediction_net(net, None, [result]).op:
        assert "batch_invariant" not in {argument.name for argument in one.arg}
