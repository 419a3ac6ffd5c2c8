"""Several devices train as one does: the same bytes where sums are made in one order, else to rounding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dagexec.core.blobs_queue import BlobsQueue
from dagexec.core.workspace import Workspace
from dagexec.training.data_parallel import parallelize
from dagexec.training.model_helper import ModelHelper
from dagexec.training.optimizer import SGD, Adagrad, Adam
from tests.training.data_parallel.problems import (
    dropping,
    dyadic,
    embedded,
    image_batch,
    largest_difference,
    lenet,
    normalized,
    number_batch,
    numbers,
    parallel_images,
    same_bytes,
    trained,
    word_batch,
    words,
)

FOUR_OF_A_KIND = [["cpu"] * 4, [f"sim:{index}" for index in range(4)]]
REDUCTIONS = ["allreduce", "tree", "ring"]
STEPS = 3


def batches(count: int, dtype: Any = np.float32) -> list[dict[str, Any]]:
    return [image_batch(count, dtype, seed) for seed in range(STEPS)]


@pytest.mark.slow
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_tree_and_all_reduce_give_the_bytes_of_one_device_that_accumulates(double: bool, count: int) -> None:
    data = batches(12, np.float64 if double else np.float32)
    one_losses, one = trained(parallel_images(lenet, ["cpu"], double=double, iter_size=count), data)
    for devices in (["cpu"] * count, [f"sim:{index}" for index in range(count)]):
        for reduction in ("allreduce", "tree"):
            losses, found = trained(
                parallel_images(lenet, devices, double=double, reduction=reduction, bucket_bytes=700), data
            )
            assert same_bytes(found, one) == [], f"{reduction} on {devices}"
            assert losses == one_losses
    assert one["conv1_w"].dtype == (np.float64 if double else np.float32)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_two_devices_with_two_micro_batches_each_give_the_bytes_of_one_with_four(reduction: str) -> None:
    data = batches(8)
    _, one = trained(parallel_images(lenet, ["cpu"], reduction=reduction, iter_size=4), data)
    _, two = trained(parallel_images(lenet, ["cpu", "cpu"], reduction=reduction, iter_size=2), data)
    assert same_bytes(two, one) == []


@pytest.mark.slow
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("devices", [*FOUR_OF_A_KIND, ["cpu", "sim:1", "cpu", "sim:0"]], ids=str)
def test_four_devices_train_as_one_on_the_whole_batch(devices: list[str], reduction: str) -> None:
    for double, limit in ((False, 1e-5), (True, 1e-12)):
        data = batches(16, np.float64 if double else np.float32)
        one_losses, one = trained(parallel_images(lenet, ["cpu"], double=double), data)
        losses, found = trained(parallel_images(lenet, devices, double=double, reduction=reduction), data)
        assert largest_difference(found, one) < limit
        np.testing.assert_allclose(losses, one_losses, rtol=limit)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("devices", FOUR_OF_A_KIND, ids=str)
@pytest.mark.parametrize("double", [False, True])
def test_where_all_sums_are_exact_four_devices_give_the_bytes_of_one_on_the_whole_batch(
    devices: list[str], reduction: str, double: bool
) -> None:
    data = [number_batch(16, np.float64 if double else np.float32)] * STEPS
    options: dict[str, Any] = {"double": double, "inputs": numbers, "optimizer": SGD(0.125)}
    one_losses, one = trained(parallel_images(dyadic, ["cpu"], **options), data)
    losses, found = trained(parallel_images(dyadic, devices, reduction=reduction, **options), data)
    assert same_bytes(found, one) == []
    np.testing.assert_allclose(losses, one_losses, rtol=1e-6)
    assert not np.array_equal(one["w"], np.full((1, 4), 0.5))


@pytest.mark.slow
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("devices", FOUR_OF_A_KIND, ids=str)
def test_batch_normalization_over_all_devices_is_that_of_one(devices: list[str], reduction: str) -> None:
    for double, limit in ((False, 1e-5), (True, 1e-12)):
        data = batches(16, np.float64 if double else np.float32)
        one_losses, one = trained(parallel_images(normalized, ["cpu"], double=double), data)
        losses, found = trained(parallel_images(normalized, devices, double=double, reduction=reduction), data)
        np.testing.assert_allclose(losses, one_losses, rtol=limit)
        assert largest_difference(found, one) < 10 * limit


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_without_it_each_device_normalizes_its_own_batch_and_the_first_ones_statistics_are_kept(reduction: str) -> None:
    data = batches(16)
    one_losses, one = trained(parallel_images(normalized, ["cpu"]), data)
    model = parallel_images(normalized, ["cpu", "cpu"], sync_batch_norm=False, reduction=reduction)
    losses, found = trained(model, data)
    assert abs(losses[0] - one_losses[0]) > 1e-4
    assert largest_difference(found, one) > 1e-3


def test_without_it_all_devices_of_one_net_have_the_running_statistics_of_the_first() -> None:
    with parallel_images(normalized, ["cpu", "sim:2"], sync_batch_norm=False) as model:
        model.step(image_batch(8))
        for name in ("bn1_rm", "bn2_riv", "conv1_w"):
            first, second = model.fetch(name)
            assert first.tobytes() == second.tobytes()


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("devices", [["cpu"] * 3, ["sim:0", "sim:1", "cpu"]], ids=str)
@pytest.mark.parametrize("iter_size", [1, 2])
def test_sparse_gradients_of_all_devices_are_applied_on_all(devices: list[str], reduction: str, iter_size: int) -> None:
    data = [word_batch(12, seed) for seed in range(STEPS)]
    optimizer = Adagrad(0.25)
    _, one = trained(parallelize(words, embedded, optimizer, devices=["cpu"]), data)
    model = parallelize(words, embedded, optimizer, devices=devices, reduction=reduction, iter_size=iter_size)
    _, found = trained(model, data)
    assert largest_difference(found, one) < 1e-5
    assert np.abs(found["table"] - one["table"]).max() < 1e-5


@pytest.mark.parametrize("reduction", ["allreduce", "ring"])
def test_after_a_step_all_devices_have_the_same_bytes(reduction: str) -> None:
    with parallel_images(lenet, ["cpu", "sim:0", "sim:5"], reduction=reduction, optimizer=Adam(0.01)) as model:
        for seed in range(2):
            model.step(image_batch(6, seed=seed))
        for name in model.state():
            copies = model.fetch(name)
            assert len({copy.tobytes() for copy in copies}) == 1, name


@pytest.mark.slow
def test_a_state_goes_on_with_other_devices_and_another_reduction() -> None:
    data = batches(12)
    with parallel_images(lenet, ["cpu"] * 2) as model:
        for batch in data:
            model.step(batch)
        expected = model.state()
    with parallel_images(lenet, ["cpu"] * 2) as model:
        model.step(data[0])
        state = model.state()
    for devices, reduction in ((["sim:0", "sim:1"], "tree"), (["cpu", "cpu"], "allreduce")):
        with parallel_images(lenet, devices, reduction=reduction) as model:
            model.load_state(state)
            for batch in data[1:]:
                model.step(batch)
            assert same_bytes(model.state(), expected) == []


def test_devices_begin_with_equal_parameters_of_the_first() -> None:
    for reduction in REDUCTIONS:
        with parallel_images(lenet, ["sim:3", "cpu", "cpu"], reduction=reduction) as model:
            for name in model.parameters():
                first, *others = model.fetch(name)
                assert all(other.tobytes() == first.tobytes() for other in others)
            assert model.places[1].scope == "cpu_0"
            assert [place.blob("x") for place in model.places] == ["sim_3/x", "cpu_0/x", "cpu_1/x"]


@pytest.mark.parametrize("reduction", ["allreduce", "tree"])
def test_all_replicas_may_take_their_inputs_from_one_queue(reduction: str) -> None:
    records = [number_batch(4) for _ in range(4)]

    def dequeued(helper: ModelHelper) -> None:
        with helper.device_scope("cpu"):
            helper.add_operator("DequeueBlobs", ["records"], ["x", "target"], shapes=["4,4", "4,1"])

    queue = BlobsQueue(4, 2)
    workspace = Workspace()
    workspace.create_blob("records").value = queue
    for record in records:
        queue.enqueue([record["x"], record["target"]])
    with parallelize(
        dequeued, dyadic, SGD(0.125), devices=["sim:0", "cpu"], reduction=reduction, workspace=workspace
    ) as model:
        losses = [model.step() for _ in range(2)]
        found = model.state()
    whole = {name: np.concatenate([records[0][name], records[0][name]]) for name in records[0]}
    one_losses, one = trained(parallelize(numbers, dyadic, SGD(0.125), devices=["cpu"]), [whole, whole])
    assert [loss["loss"] for loss in losses] == one_losses
    assert same_bytes(found, one) == []


@pytest.mark.slow
def test_every_micro_batch_and_every_device_drops_others() -> None:
    """And which it drops does not depend on the device: N of them give the bytes of one that accumulates."""
    data = batches(8)
    with parallel_images(dropping, ["cpu"] * 2, iter_size=2) as model:
        seen = []
        for batch in data:
            model.step(batch)
            seen += [mask.tobytes() for mask in model.fetch("_drop_mask")]
    assert len(set(seen)) == len(seen)
    _, one = trained(parallel_images(dropping, ["cpu"], iter_size=4), data)
    for devices in (["cpu"] * 2, ["sim:3", "cpu"], ["sim:0", "sim:1", "sim:2", "sim:3"]):
        for reduction in ("allreduce", "tree"):
            options: dict[str, Any] = {"reduction": reduction, "iter_size": 4 // len(devices)}
            with parallel_images(dropping, devices, **options) as model:
                model.step(data[0])
                state = model.state()
            model = parallel_images(dropping, devices, **options)
            model.load_state(state)
            _, found = trained(model, data[1:])
            assert same_bytes(found, one) == [], (devices, reduction)
