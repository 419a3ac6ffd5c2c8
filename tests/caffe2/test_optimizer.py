"""Caffe2's optimizers: names of what they add, and steps against their formulas in float64."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from dagexec.caffe2 import brew, core, optimizer, workspace
from dagexec.caffe2.model_helper import ModelHelper
from dagexec.caffe2.modeling.initializers import PseudoFP16Initializer, ReversePseudoFP16Initializer
from dagexec.caffe2.modeling.parameter_info import ParameterTags
from dagexec.caffe2.optimizer_context import DEFAULT_OPTIM, UseOptimizer
from dagexec.caffe2.proto import caffe2_pb2
from dagexec.errors import GradientError

Array = npt.NDArray[Any]
STEPS = 3
INDICES = np.array([2, 0, 2], np.int32)


@pytest.fixture(autouse=True)
def _instances_from_0() -> None:
    optimizer.reset_optimizer_instance_count()


def linear() -> ModelHelper:
    """The sum of x w^T + b, whose gradients are the sums of x and ones."""
    model = ModelHelper("linear")
    brew.fc(model, "x", "y", 3, 2)
    model.AddGradientOperators([model.SumElements("y", "loss")])
    workspace.FeedBlob("x", np.random.default_rng(1).standard_normal((4, 3)).astype(np.float32))
    return model


def table() -> ModelHelper:
    """The sum of products of rows with `x`."""
    model = ModelHelper("table")
    model.AddParameter(model.param_init_net.GaussianFill([], "rows", shape=[4, 3]))
    product = model.Mul([model.Gather(["rows", "indices"], "picked"), "x"], "product")
    model.AddGradientOperators([model.SumElements(product, "loss")])
    workspace.FeedBlob("indices", INDICES)
    workspace.FeedBlob("x", np.random.default_rng(2).standard_normal((3, 3)).astype(np.float32))
    return model


def train(model: ModelHelper, blob: str, steps: int = STEPS) -> tuple[Array, Array]:
    """A parameter before and after some steps, in float64."""
    workspace.RunNetOnce(model.param_init_net)
    before = workspace.FetchBlob(blob).astype(float)
    workspace.CreateNet(model.net)
    workspace.RunNet(model.net, steps)
    return before, workspace.FetchBlob(blob).astype(float)


def sgd(w: Array, g: Array) -> Array:
    return w - sum(0.1 * 0.5**step for step in range(1, STEPS + 1)) * g


def nesterov(w: Array, g: Array) -> Array:
    momentum = np.zeros_like(g)
    for _ in range(STEPS):
        after = 0.1 * g + 0.9 * momentum
        w, momentum = w - (1.9 * after - 0.9 * momentum), after
    return w


def adam(w: Array, g: Array) -> Array:
    first, second = np.zeros_like(g), np.zeros_like(g)
    for t in range(2, STEPS + 2):
        first, second = 0.9 * first + 0.1 * g, 0.999 * second + 0.001 * g * g
        w = w - 0.1 * np.sqrt(1 - 0.999**t) / (1 - 0.9**t) * first / (np.sqrt(second) + 1e-8)
    return w


def adagrad(w: Array, g: Array) -> Array:
    for step in range(1, STEPS + 1):
        w = w - 0.1 * g / (np.sqrt(step * g * g) + 1e-4)
    return w


def rms_prop(w: Array, g: Array) -> Array:
    squares = np.zeros_like(g)
    for _ in range(STEPS):
        squares = squares + 0.1 * (g * g - squares)
        w = w - 0.1 * g / np.sqrt(squares + 1e-5)
    return w


def ftrl(w: Array, g: Array) -> Array:
    n, z = np.zeros_like(g), np.zeros_like(g)
    for _ in range(STEPS):
        sigma = (np.sqrt(n + g * g) - np.sqrt(n)) / 0.1
        n, z = n + g * g, z + g - sigma * w
        w = np.where(np.abs(z) <= 0.01, 0, (0.01 * np.sign(z) - z) / ((1 + np.sqrt(n)) / 0.1 + 0.1))
    return w


def group_ftrl(w: Array, g: Array) -> Array:
    n, z = np.zeros_like(g), np.zeros_like(g)
    for _ in range(STEPS):
        sigma = (np.sqrt(n + g * g) - np.sqrt(n)) / 0.1
        n, z = n + g * g, z + g - sigma * w
        norm, least = np.sqrt((z * z).sum(0)), 0.5 * np.sqrt(len(w))
        w = np.where(norm <= least, 0, z * (least / norm - 1) / ((1 + np.sqrt(n)) / 0.1 + 0.1))
    return w


def wngrad(w: Array, g: Array) -> Array:
    b = 2.0
    for _ in range(STEPS):
        w, b = w - 0.1 * g / (b + 1e-9), b + (g * g).sum() / (b + 1e-9)
    return w


FTRL = {"alpha": 0.1, "beta": 1.0, "lambda2": 0.1}
BUILDS: dict[str, tuple[Callable[[ModelHelper], Any], Callable[[Array, Array], Array], set[str]]] = {
    "sgd": (lambda m: optimizer.build_sgd(m, 0.1, policy="step", stepsize=1, gamma=0.5), sgd, set()),
    "momentum": (lambda m: optimizer.build_sgd(m, 0.1, momentum=0.9), nesterov, {"momentum"}),
    "adam": (lambda m: optimizer.build_adam(m, 0.1), adam, {"first_moment", "second_moment"}),
    "adagrad": (lambda m: optimizer.build_adagrad(m, 0.1), adagrad, {"squared_sum"}),
    "rms_prop": (lambda m: optimizer.build_rms_prop(m, 0.1), rms_prop, {"mean_squares", "momentum"}),
    "ftrl": (lambda m: optimizer.build_ftrl(m, lambda1=0.01, **FTRL), ftrl, {"ftrl_nz"}),
    "gftrl": (lambda m: optimizer.build_gftrl(m, lambda1=0.5, **FTRL), group_ftrl, {"gftrl_nz"}),
    "wngrad": (lambda m: optimizer.build_wngrad(m, 0.1, moment_init=2.0), wngrad, {"moment"}),
}


@pytest.mark.parametrize("name", BUILDS)
def test_steps_are_those_of_the_formula(name: str) -> None:
    build, expected, state = BUILDS[name]
    model = linear()
    made = build(model)
    before, after = train(model, "y_w")
    gradient = np.tile(workspace.FetchBlob("x").astype(float).sum(0), (2, 1))
    np.testing.assert_allclose(after, expected(before, gradient), rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(workspace.FetchBlob("y_b"), expected(np.zeros(2), np.full(2, 4.0)), rtol=2e-5, atol=1e-6)
    local = {str(blob) for blob in made.get_auxiliary_parameters().local}
    assert local == {f"{param}_{suffix}" for param in ("y_w", "y_b") for suffix in state}
    assert workspace.FetchBlob("optimizer_iteration").tolist() == [STEPS]


@pytest.mark.parametrize("build", [optimizer.build_adadelta, optimizer.build_yellowfin], ids=["adadelta", "yellowfin"])
def test_the_others_descend(build: Any) -> None:
    model = linear()
    build(model, 0.1)
    before, after = train(model, "y_w")
    gradient = np.tile(workspace.FetchBlob("x").sum(0), (2, 1))
    assert ((after - before) * gradient < 0).all()


def half_model(initializer: Any) -> ModelHelper:
    """The sum of x w^T in float16, whose gradient is exact."""
    model = ModelHelper("half")
    brew.fc(model, "x", "y", 3, 2, WeightInitializer=initializer, BiasInitializer=initializer)
    wide = model.HalfToFloat("y", "wide") if initializer is PseudoFP16Initializer else "y"
    model.AddGradientOperators([model.SumElements(wide, "loss")])
    dtype = np.float16 if initializer is PseudoFP16Initializer else np.float32
    workspace.FeedBlob("x", np.array([[0.5, 1, -2], [1, 0.25, 3]], dtype))
    return model


def test_parameters_of_16_bits_are_updated_in_32() -> None:
    workspace.ResetWorkspace()
    model = half_model(PseudoFP16Initializer)
    optimizer.build_multi_precision_sgd(model, 0.1, momentum=0.9)
    workspace.RunNetOnce(model.param_init_net)
    before = workspace.FetchBlob("y_w_fp32").astype(float)
    workspace.CreateNet(model.net)
    workspace.RunNet(model.net, STEPS)
    gradient = np.tile(workspace.FetchBlob("x").astype(float).sum(0), (2, 1))
    after = workspace.FetchBlob("y_w_fp32")
    np.testing.assert_allclose(after, nesterov(before, gradient), rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(workspace.FetchBlob("y_w"), after.astype(np.float16))
    np.testing.assert_allclose(workspace.FetchBlob("y_b_fp32"), nesterov(np.zeros(2), np.full(2, 2.0)), rtol=1e-6)
    assert model.get_parameter_info("y_w").blob_copy == {core.DataType.FLOAT: "y_w_fp32"}
    sparse = table()
    sparse.get_parameter_info("rows").blob_copy = {core.DataType.FLOAT: "rows"}
    with pytest.raises(GradientError, match="sparse"):
        optimizer.build_multi_precision_sgd(sparse, 0.1)


@pytest.mark.parametrize("initializer", [PseudoFP16Initializer, ReversePseudoFP16Initializer])
def test_fp16_sgd_rounds_parameter_and_momentum_in_each_step(initializer: Any) -> None:
    workspace.ResetWorkspace()
    model = half_model(initializer)
    optimizer.build_fp16_sgd(model, 0.125, momentum=0.5, nesterov=False, weight_decay=0.25)
    workspace.RunNetOnce(model.param_init_net)
    dtype = workspace.FetchBlob("y_w").dtype
    assert dtype == (np.float16 if initializer is PseudoFP16Initializer else np.float32)
    w, momentum = workspace.FetchBlob("y_w").astype(float), np.zeros((2, 3))
    workspace.CreateNet(model.net)
    gradient = np.tile(workspace.FetchBlob("x").astype(float).sum(0), (2, 1))
    for _ in range(STEPS):
        workspace.RunNet(model.net)
        momentum = 0.125 * (gradient + 0.25 * w) + 0.5 * momentum
        w = (w - momentum).astype(dtype).astype(float)
        momentum = momentum.astype(dtype).astype(float)
        np.testing.assert_allclose(workspace.FetchBlob("y_w").astype(float), w, rtol=0, atol=1e-3)
        w = workspace.FetchBlob("y_w").astype(float)
        momentum = workspace.FetchBlob("y_w_momentum").astype(float)
    assert workspace.FetchBlob("y_w_momentum").dtype == dtype


def test_parameters_may_have_optimizers_of_their_own() -> None:
    workspace.ResetWorkspace()
    model = ModelHelper("own")
    slow, fast = optimizer.SgdOptimizer(0.1), optimizer.SgdOptimizer(1.0)
    with UseOptimizer({ParameterTags.WEIGHT: slow, DEFAULT_OPTIM: fast}):
        hidden = brew.fc(model, "x", "h", 3, 3, weight_init=("ConstantFill", {"value": 1.0}))
        with UseOptimizer(slow):
            brew.fc(model, hidden, "y", 3, 2, weight_init=("ConstantFill", {"value": 1.0}))
    model.AddGradientOperators([model.SumElements("y", "loss")])
    workspace.FeedBlob("x", np.ones((1, 3), np.float32))
    optimizer.build_adam(model, 5.0)
    workspace.RunNetOnce(model.param_init_net)
    workspace.RunNetOnce(model.net)
    expected = {"h_w": 1 - 0.1 * 2, "h_b": -2, "y_w": 1 - 0.1 * 3, "y_b": -0.1}
    for name, value in expected.items():
        found = workspace.FetchBlob(name)
        np.testing.assert_allclose(found, np.full(found.shape, value), rtol=1e-6)
    assert "Adam" not in {operator.type for operator in model.net.Proto().op}
    with pytest.raises(ValueError, match="two optimizers for"):
        UseOptimizer(slow, {DEFAULT_OPTIM: fast})
    other = linear()
    other.get_parameter_info("y_w").optimizer = slow
    with pytest.raises(RuntimeError, match="needs one optimizer"):
        optimizer.build_sgd(other, 0.1, max_gradient_norm=1.0)


def test_rows_of_a_sparse_gradient_are_applied_one_after_another_unless_they_are_added_up() -> None:
    for settings, deduplicated in (({}, False), ({"sparse_dedup_aggregator": "sum"}, True)):
        workspace.ResetWorkspace()
        model = table()
        optimizer.build_adagrad(model, 0.1, **settings)
        before, after = train(model, "rows", 1)
        x = workspace.FetchBlob("x").astype(float)
        total = np.zeros_like(before)
        parts = [(0, x[1]), (2, x[0] + x[2])] if deduplicated else [(0, x[1]), (2, x[0]), (2, x[2])]
        for row, gradient in parts:
            total[row] += gradient**2
            before[row] -= 0.1 * gradient / (np.sqrt(total[row]) + 1e-4)
        np.testing.assert_allclose(after, before, rtol=1e-5, atol=1e-6)
    with pytest.raises(RuntimeError, match="'mean'"):
        optimizer.SgdOptimizer(sparse_dedup_aggregator="mean")


def test_names_and_operators_are_caffe2s() -> None:
    model = linear()
    made = optimizer.build_sgd(model, 0.1, momentum=0.9)
    counter, rate, *updates = model.net.Proto().op[-4:]
    assert (counter.type, list(counter.input)) == ("AtomicIter", ["iteration_mutex", "optimizer_iteration"])
    assert (rate.type, list(rate.output)) == ("LearningRate", ["SgdOptimizer_0_lr_cpu"])
    assert made.get_cpu_blob_name("lr") == "SgdOptimizer_0_lr_cpu"
    assert [operator.type for operator in updates] == ["MomentumSGDUpdate"] * 2
    assert model.net.BlobIsDefined("y_w_momentum")
    assert made.get_auxiliary_parameters().shared == ["optimizer_iteration", "SgdOptimizer_0_lr_cpu"]
    other = linear()
    optimizer.build_sgd(other, 0.1)
    assert other.net.Proto().op[-1].input[1] == "ONE_CPU_0"
    assert other.net.BlobIsDefined("SgdOptimizer_1_lr_cpu")


def test_an_optimizer_is_called_for_single_parameters_and_shares_its_rate() -> None:
    model = linear()
    first, second = optimizer.SgdOptimizer(0.1), optimizer.SgdOptimizer(0.1)
    second.scale_learning_rate(2)
    for info in model.GetOptimizationParamInfo():
        first(model.net, model.param_init_net, info)
    w = model.params[0]
    with pytest.raises(Exception, match="already has an update"):
        first(model.net, model.param_init_net, w, model.param_to_grad[w])
    rates = [list(operator.output) for operator in model.net.Proto().op if operator.type == "LearningRate"]
    assert rates == [["SgdOptimizer_0_lr_cpu"]]
    other = linear()
    for made, param in zip((first, second), other.params, strict=True):
        made(other.net, other.param_init_net, param, other.param_to_grad[param])
    _, b = train(other, "y_b", 1)
    np.testing.assert_allclose(b, [-0.8, -0.8], rtol=1e-6)


def test_weight_decay_norms_and_injected_rates() -> None:
    model = linear()
    optimizer.add_weight_decay(model, 0.5)
    optimizer.build_sgd(model, 1.0, max_gradient_norm=0.25, allow_lr_injection=True)
    workspace.RunNetOnce(model.param_init_net)
    assert optimizer.get_lr_injection() == 1
    optimizer.set_lr_injection(3)
    w = workspace.FetchBlob("y_w").astype(float)
    workspace.RunNetOnce(model.net)
    gradient = np.tile(workspace.FetchBlob("x").astype(float).sum(0), (2, 1)) + 0.5 * w
    norm = np.sqrt((gradient**2).sum() + 2 * 4.0**2)
    np.testing.assert_allclose(workspace.FetchBlob("y_w"), w - 3 * 0.25 / norm * gradient, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(workspace.FetchBlob("y_b"), np.full(2, -3 * 0.25 / norm * 4), rtol=1e-5)


def test_what_has_no_effect_is_said_and_what_cannot_be_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "dagexec"):
        optimizer.SgdOptimizer(0.1, policy="fixed", weight_decay=0.004)
    assert "['weight_decay'] have no effect" in caplog.text
    model = ModelHelper("early")
    with pytest.raises(GradientError, match="AddGradientOperators"):
        optimizer.build_sgd(model, 0.1)
    model = table()
    model.AddParameter(model.params[0], ParameterTags.WEIGHT)
    with pytest.raises(GradientError, match="'rows' has a sparse gradient"):
        optimizer.add_weight_decay(model, 0.1)
    before = len(model.net.Proto().op)
    with pytest.raises(GradientError, match="sparse"):
        optimizer.build_rms_prop(model, 0.1)
    assert len(model.net.Proto().op) == before


def test_parameters_that_the_init_net_does_not_fill_have_state_of_their_shape() -> None:
    model = ModelHelper("external", init_params=False)
    brew.fc(model, "x", "y", 3, 2)
    model.AddGradientOperators([model.SumElements("y", "loss")])
    optimizer.build_sgd(model, 0.1, momentum=0.9)
    workspace.RunNetOnce(model.param_init_net)
    assert workspace.FetchBlob("y_w_momentum").shape == (2, 3)
    assert not workspace.HasBlob("y_w")


def test_devices_of_parameters() -> None:
    gpu, cpu = core.DeviceOption(caffe2_pb2.CUDA, 1), core.DeviceOption(caffe2_pb2.CPU)
    rows = core.GradientSlice("i", "v")
    assert optimizer.get_param_device("w", "g", {"g": gpu}) == gpu
    assert optimizer.get_param_device("w", rows, {"v": gpu}) == gpu
    assert optimizer.get_param_device("w", "g", {}, gpu) == gpu
    assert core.device_option_equal(optimizer.get_param_device("w", "g"), cpu)
