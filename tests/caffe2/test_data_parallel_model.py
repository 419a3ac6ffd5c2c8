"""Parallelize on simulated GPUs and on the host: each step equals that of the whole batch on one device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from dagexec.caffe2 import brew, core, data_parallel_model, optimizer, workspace
from dagexec.caffe2.gpus import simulate_gpus
from dagexec.caffe2.model_helper import ModelHelper
from dagexec.caffe2.proto import caffe2_pb2

Array = npt.NDArray[Any]
RNG = np.random.default_rng(4)
X = RNG.standard_normal((6, 3)).astype(np.float32)
TARGET = RNG.standard_normal((6, 2)).astype(np.float32)


@pytest.fixture(autouse=True)
def _two_simulated_gpus() -> Iterator[None]:
    simulate_gpus(2)
    yield
    simulate_gpus(None)


def inputs(model: ModelHelper) -> None:
    model.net.AddExternalInput(core.ScopedBlobReference("x"), core.ScopedBlobReference("target"))


def forward(model: ModelHelper, loss_scale: float) -> list[Any]:
    """The mean of |x W^T + b - target|^2 / 2."""
    distance = model.SquaredL2Distance([brew.fc(model, "x", "y", 3, 2), "target"], "distance")
    return [model.Scale(model.AveragedLoss(distance, "mean"), "loss", scale=loss_scale)]


def update(model: ModelHelper) -> None:
    """Gradient descent by hand, as in Caffe2's tutorial."""
    brew.add_weight_decay(model, 0.1)
    rate = model.LearningRate(brew.iter(model, "iter"), "rate", base_lr=-0.2, policy="fixed")
    one = model.param_init_net.ConstantFill([], "one", shape=[1], value=1.0)
    for param in model.GetParams():
        model.WeightedSum([param, one, model.param_to_grad[param], rate], param)


def expected(w: Array, b: Array, steps: int, decay: float) -> tuple[Array, Array]:
    for _ in range(steps):
        error = X.astype(float) @ w.T + b - TARGET
        w, b = w - 0.2 * (error.T @ X / 6 + decay * w), b - 0.2 * error.mean(0)
    return w, b


@pytest.mark.parametrize("prefix", ["gpu", "cpu"])
@pytest.mark.parametrize("by_hand", [True, False])
def test_a_step_on_two_devices_is_that_of_the_whole_batch(prefix: str, by_hand: bool) -> None:
    model = ModelHelper("parallel")
    builders: dict[str, Any] = (
        {"param_update_builder_fun": update}
        if by_hand
        else {"optimizer_builder_fun": lambda model: optimizer.build_sgd(model, 0.2)}
    )
    parallelize = {"gpu": data_parallel_model.Parallelize_GPU, "cpu": data_parallel_model.Parallelize_CPU}[prefix]
    parallelize(model, inputs, forward, **builders, devices=[0, 1])
    for number in (0, 1):
        part = slice(3 * number, 3 * number + 3)
        device = core.DeviceOption(caffe2_pb2.CUDA if prefix == "gpu" else caffe2_pb2.CPU, number)
        workspace.FeedBlob(f"{prefix}_{number}/x", X[part], device if prefix == "gpu" else None)
        workspace.FeedBlob(f"{prefix}_{number}/target", TARGET[part])
    data_parallel_model.RunInitNet(model)
    w, b = (workspace.FetchBlob(f"{prefix}_1/y_{name}").astype(float) for name in "wb")
    data_parallel_model.RunNet(model, 3)
    for number in (0, 1):
        found = [workspace.FetchBlob(f"{prefix}_{number}/y_{name}") for name in "wb"]
        for array, value in zip(found, expected(w, b, 3, 0.1 if by_hand else 0), strict=True):
            np.testing.assert_allclose(array, value, rtol=1e-5, atol=1e-6)
    kinds = {operator.device_option.device_type for operator in model.net.Proto().op if operator.type == "FC"}
    assert kinds == {caffe2_pb2.CUDA if prefix == "gpu" else caffe2_pb2.CPU}
    if not by_hand:
        [rate] = data_parallel_model.GetLearningRateBlobNames(model)
        assert workspace.FetchBlob(rate) == np.float32(-0.2)


def test_rows_of_sparse_gradients_are_those_of_all_devices() -> None:
    def lookup(model: ModelHelper, loss_scale: float) -> list[Any]:
        table = model.param_init_net.GaussianFill([], "table", shape=[4, 2])
        model.AddParameter(table)
        product = model.Mul([model.Gather([table, "rows"], "picked"), "x"], "product")
        return [model.SumElements(product, "loss")]

    model = ModelHelper("rows")
    data_parallel_model.Parallelize_GPU(
        model, lambda _: None, lookup, optimizer_builder_fun=lambda model: optimizer.build_sgd(model, 1.0)
    )
    rows, x = np.array([[0, 2], [2, 3]], np.int32), RNG.standard_normal((2, 2, 2)).astype(np.float32)
    for number in (0, 1):
        workspace.FeedBlob(f"gpu_{number}/rows", rows[number])
        workspace.FeedBlob(f"gpu_{number}/x", x[number])
    workspace.RunNetOnce(model.param_init_net)
    after = workspace.FetchBlob("gpu_0/table").astype(float)
    np.subtract.at(after, rows.reshape(-1), x.reshape(-1, 2))
    workspace.RunNetOnce(model.net)
    for number in (0, 1):
        np.testing.assert_allclose(workspace.FetchBlob(f"gpu_{number}/table"), after, rtol=1e-5, atol=1e-6)
        assert workspace.FetchBlob(f"gpu_{number}/rows").tolist() == rows[number].tolist()


def test_statistics_and_checkpoints_are_those_of_the_first_device() -> None:
    def normalized(model: ModelHelper, loss_scale: float) -> list[Any]:
        y = brew.spatial_bn(model, "x", "bn", 2)
        return [model.Scale(model.AveragedLoss(y, "mean"), "loss", scale=loss_scale)]

    model = ModelHelper("statistics")
    data_parallel_model.Parallelize_CPU(
        model, lambda _: None, normalized, optimizer_builder_fun=lambda model: optimizer.build_adam(model, 0.1),
        devices=[0, 1], optimize_gradient_memory=True,
    )  # fmt: skip
    for number in (0, 1):
        workspace.FeedBlob(f"cpu_{number}/x", RNG.standard_normal((2, 2, 3, 3)).astype(np.float32))
    data_parallel_model.RunInitNet(model)
    data_parallel_model.RunNet(model, 1)
    data_parallel_model.OptimizeGradientMemory(model, {}, set(), False)
    first, second = (workspace.FetchBlob(f"cpu_{number}/bn_rm") for number in (0, 1))
    assert first.tolist() == second.tolist() != [0, 0]
    names = data_parallel_model.GetCheckpointParams(model)
    assert {"cpu_0/bn_rm", "cpu_0/bn_s", "cpu_0/bn_s_first_moment", "optimizer_iteration"} <= names
    assert not any(name.startswith("cpu_1/") for name in names)
    workspace.FeedBlob("cpu_0/bn_s", np.array([5, 6], np.float32))
    data_parallel_model.FinalizeAfterCheckpoint(model)
    assert workspace.FetchBlob("cpu_1/bn_s").tolist() == [5, 6]


def test_a_model_for_tests_has_no_gradients() -> None:
    model = ModelHelper("tested", init_params=False)
    data_parallel_model.Parallelize_GPU(model, inputs, forward)
    assert not model.gradient_ops_added
    assert model._devices == [0, 1]
    with pytest.raises(RuntimeError, match="parallel already"):
        data_parallel_model.Parallelize_GPU(model, inputs, forward)
    with pytest.raises(RuntimeError, match="no optimizer"):
        data_parallel_model.GetLearningRateBlobNames(model)


def test_what_cannot_be_parallel_is_refused() -> None:
    with pytest.raises(RuntimeError, match="rendezvous is not there"):
        data_parallel_model.Parallelize_GPU(ModelHelper(), inputs, forward, rendezvous={"kv_handler": 1})
    with pytest.raises(RuntimeError, match="each of them once"):
        data_parallel_model.Parallelize_GPU(ModelHelper(), inputs, forward, devices=[0, 0])
    with pytest.raises(RuntimeError, match="not both"):
        data_parallel_model.Parallelize_GPU(ModelHelper(), inputs, forward, update, update)

    def unscoped(model: ModelHelper, loss_scale: float) -> None:
        brew.fc(model, "x", core.BlobReference("shared"), 3, 2)

    with pytest.raises(RuntimeError, match="not the same on all devices"):
        data_parallel_model.Parallelize_GPU(ModelHelper(), inputs, unscoped)


@pytest.mark.parametrize("nesterov", [False, True])
def test_devices_train_on_their_own_and_are_brought_together(nesterov: bool) -> None:
    workspace.ResetWorkspace()
    model = ModelHelper("blocks")

    def momentum(model: ModelHelper) -> None:
        rate = model.param_init_net.ConstantFill([], "rate", shape=[1], value=0.1)
        for param in model.GetParams():
            state = model.param_init_net.ConstantFill([param], param + "_m", value=0.0)
            grad = model.param_to_grad[param]
            model.MomentumSGDUpdate([grad, state, rate, param], [grad, state, param], momentum=0.5)

    data_parallel_model.Parallelize_BMUF(
        model, inputs, forward, momentum, block_learning_rate=0.5, devices=[0, 1], nesterov=nesterov,
        reset_momentum_sgd=True, warmup_iterations=2,
    )  # fmt: skip
    for number in (0, 1):
        part, device = slice(3 * number, 3 * number + 3), core.DeviceOption(caffe2_pb2.CUDA, number)
        workspace.FeedBlob(f"gpu_{number}/x", X[part], device)
        workspace.FeedBlob(f"gpu_{number}/target", TARGET[part], device)
    data_parallel_model.RunInitNet(model)
    start = [workspace.FetchBlob(f"gpu_0/y_{name}").astype(float) for name in "wb"]
    data_parallel_model.RunWarmup(model)

    def trained(params: list[Array], states: list[Array], number: int, steps: int) -> tuple[list[Array], list[Array]]:
        x, target = (one[3 * number : 3 * number + 3].astype(float) for one in (X, TARGET))
        for _ in range(steps):
            error = x @ params[0].T + params[1] - target
            gradients = [error.T @ x / 3, error.mean(0)]
            states = [0.5 * m + 0.1 * g for m, g in zip(states, gradients, strict=True)]
            params = [p - m for p, m in zip(params, states, strict=True)]
        return params, states

    zeros = [np.zeros_like(one) for one in start]
    last, kept = trained(start, zeros, 0, 2)
    momenta = [kept, kept]
    velocity = zeros
    for _ in range(2):
        parts = [trained(last, momenta[number], number, 3)[0] for number in (0, 1)]
        means = [(one + two) / 2 for one, two in zip(*parts, strict=True)]
        after = [0.5 * v + 0.5 * (mean - g) for v, mean, g in zip(velocity, means, last, strict=True)]
        changes = [0.5 * (v - old) if nesterov else 0 * v for v, old in zip(after, velocity, strict=True)]
        last = [g + v - change for g, v, change in zip(last, after, changes, strict=True)]
        velocity, momenta = after, [zeros, zeros]
        data_parallel_model.RunNet(model, 3)
        for number in (0, 1):
            for name, value in zip("wb", last, strict=True):
                np.testing.assert_allclose(workspace.FetchBlob(f"gpu_{number}/y_{name}"), value, rtol=1e-4, atol=1e-5)
