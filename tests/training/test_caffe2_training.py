"""Training nets recorded with Caffe2 1.10: init net, net, input, and the parameters and the loss after the last step.

How many steps were run is not recorded. Three it must be: after any other number parameters are off by more than 1e-3.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from dagexec import NetDef, OperatorDef, Workspace
from dagexec.core.dtypes import INT32
from dagexec.ops.families.optimize.policies import Step
from dagexec.training.model_helper import ModelHelper
from dagexec.training.optimizer import SGD, Adam, Optimizer
from tests.ops.running import operator_def

FIXTURES = Path(__file__).parent.parent / "fixtures" / "caffe2"
STEPS = 3
TOLERANCE = 1e-5
SCHEDULES = [("simple", 1), ("dag", 1), ("dag", 2), ("dag", 3), ("async_dag", 1), ("async_dag", 2), ("async_dag", 3)]
ONLY_NOISE = {"train_adam": {"c1_b"}, "train_sgd": set[str]()}
"""Parameters whose gradient is 0 but for rounding, as batch normalization takes a bias before it away again.

Adam divides it by its own size, so the recorded value is Caffe2's order of additions, and no result of the training.
"""


@dataclass(frozen=True)
class Recording:
    """One fixture."""

    init_net: NetDef
    net: NetDef
    inputs: dict[str, npt.NDArray[Any]]
    loss: float
    params: dict[str, npt.NDArray[Any]]

    @staticmethod
    def load(name: str) -> Recording:
        """Read the files of a folder."""
        nets = []
        for part in ("init_net", "predict_net"):
            net = NetDef()
            net.ParseFromString((FIXTURES / name / f"{part}.pb").read_bytes())
            nets.append(net)
        inputs, outputs, after = (
            dict(np.load(FIXTURES / name / f"{part}.npz")) for part in ("inputs", "outputs", "params_after")
        )
        return Recording(nets[0], nets[1], inputs, float(outputs["loss"]), after)

    def workspace(self) -> Workspace:
        """A workspace with the first parameters and the input."""
        workspace = Workspace()
        workspace.run_net_once(self.init_net)
        for blob, array in self.inputs.items():
            workspace.feed_blob(blob, array)
        return workspace


def distance(workspace: Workspace, recording: Recording, name: str) -> float:
    """The largest difference of a parameter, or the loss, from what was recorded."""
    blobs = recording.params.keys() - ONLY_NOISE[name]
    off = [np.abs(workspace.fetch_blob(blob) - recording.params[blob]).max() for blob in blobs]
    return float(max([*off, abs(workspace.fetch_blob("loss") - recording.loss)]))


@pytest.mark.parametrize("name", ["train_sgd", "train_adam"])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_recorded_nets_give_caffe2s_parameters_under_every_schedule(name: str, schedule: tuple[str, int]) -> None:
    recording = Recording.load(name)
    workspace = recording.workspace()
    with workspace.create_net(recording.net, *schedule) as net:
        for _ in range(STEPS):
            net.run()
    assert distance(workspace, recording, name) < TOLERANCE
    assert workspace.fetch_blob("optimizer_iteration").tolist() == [STEPS]


@pytest.mark.parametrize("name", ["train_sgd", "train_adam"])
def test_recorded_nets_give_caffe2s_parameters_with_onednn(name: str) -> None:
    recording = Recording.load(name)
    for definition in recording.net.op:
        definition.engine = "ONEDNN"
    workspace = recording.workspace()
    with workspace.create_net(recording.net, "dag", 2) as net:
        for _ in range(STEPS):
            net.run()
    assert distance(workspace, recording, name) < TOLERANCE


@pytest.mark.parametrize("name", ["train_sgd", "train_adam"])
def test_no_other_number_of_steps_fits(name: str) -> None:
    recording = Recording.load(name)
    workspace = recording.workspace()
    with workspace.create_net(recording.net, "simple", 1) as net:
        for step in range(1, STEPS + 3):
            net.run()
            assert (distance(workspace, recording, name) < 1e-3) == (step == STEPS)


def test_the_parameter_that_is_left_out_has_no_gradient_but_rounding() -> None:
    recording = Recording.load("train_adam")
    workspace = recording.workspace()
    with workspace.create_net(recording.net, "simple", 1) as net:
        for _ in range(STEPS):
            net.run()
            largest = np.abs(workspace.fetch_blob("c1_grad")).max()
            assert np.abs(workspace.fetch_blob("c1_b_grad")).max() < 256 * np.finfo(np.float32).eps * largest
    assert np.abs(recording.params["c1_b"]).max() <= STEPS * 0.01
    assert np.abs(workspace.fetch_blob("c1_b")).max() <= STEPS * 0.01


def rebuilt(optimizer: Optimizer) -> ModelHelper:
    """The recorded model, built with the model helper."""
    helper = ModelHelper("rebuilt", training=True)
    data = helper.add_input("data", (4, 4, 8, 8))
    label = helper.add_input("label", (4,), INT32)
    x = helper.conv(data, "c1", 4, 8, 3, pad=1)
    x = helper.spatial_bn(x, "bn", 8)
    x = helper.relu(x, x)
    pooled = helper.max_pool(x, "p", 2, stride=2)
    grouped = helper.conv(pooled, "c2", 8, 8, 3, pad=1, group=2)
    x = helper.sum([pooled, grouped], "res")
    x = helper.average_pool(x, "ap", 2, stride=2)
    _, loss = helper.softmax_with_loss(helper.fc(x, "fc", 32, 5), label)
    helper.add_gradient_operators([loss])
    optimizer.add_updates(helper)
    return helper


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [("train_sgd", SGD(0.05, policy=Step(stepsize=2, gamma=0.5))), ("train_adam", Adam(0.01))],
)
@pytest.mark.parametrize("schedule", [("simple", 1), ("dag", 2), ("async_dag", 3)], ids=str)
def test_a_model_built_here_gives_the_same_parameters(
    name: str, optimizer: Optimizer, schedule: tuple[str, int]
) -> None:
    recording, helper = Recording.load(name), rebuilt(optimizer)
    workspace, first = Workspace(), Workspace()
    helper.create(workspace)
    first.run_net_once(recording.init_net)
    for blob in [*helper.parameters, *helper.computed_parameters]:
        workspace.feed_blob(blob, first.fetch_blob(blob))
    for blob, array in recording.inputs.items():
        workspace.feed_blob(blob, array)
    with workspace.create_net(helper.net, *schedule) as net:
        for _ in range(STEPS):
            net.run()
    assert set(recording.params) == set(helper.params)
    assert distance(workspace, recording, name) < TOLERANCE


def caffe2_clipping(grads: list[str]) -> list[OperatorDef]:
    """What Caffe2's optimizer.py appends for max_gradient_norm: blob `lr` is the rate times the ratio of norms."""
    squares = [f"grad_{k}_squared_sum" for k in range(len(grads))]
    made = []
    for grad, square in zip(grads, squares, strict=True):
        made += [operator_def("SumSqrElements", [grad], [square])]
        made += [operator_def("EnsureCPUOutput", [square], [f"{square}_cpu"])]
    return [
        *made,
        operator_def("Sum", [f"{square}_cpu" for square in squares], ["grad_squared_full_sum"]),
        operator_def("Pow", ["grad_squared_full_sum"], ["global_norm"], exponent=0.5),
        operator_def("Max", ["global_norm", "clip_norm"], ["max_norm"]),
        operator_def("Div", ["clip_norm", "max_norm"], ["norm_ratio"]),
        operator_def("CopyFromCPUInput", ["norm_ratio"], ["lr_multiplier"]),
        operator_def("Mul", ["SgdOptimizer_0_lr_cpu", "lr_multiplier"], ["lr"], broadcast=1),
    ]


def test_the_operators_of_caffe2s_other_optimizers_run_as_they_are_built_there() -> None:
    rms = operator_def("RmsProp", ["g1", "ms", "mom", "ONE"], ["grad_o", "ms", "mom"], decay=0.9, momentum=0.0)
    step = operator_def("MomentumSGDUpdate", ["grad_o", "mom", "lr", "p1"], ["grad_o", "mom", "p1"])
    rms.engine = step.engine = "SIMD"
    count = operator_def("AtomicIter", ["iteration_mutex", "iteration"], ["iteration"])
    rate = operator_def("LearningRate", ["iteration"], ["SgdOptimizer_0_lr_cpu"], base_lr=0.5, policy="fixed")
    momentum = operator_def("MomentumSGDUpdate", ["g0", "m", "lr", "p0"], ["g0", "m", "p0"], momentum=0.5, nesterov=1)
    net = NetDef(name="caffe2", op=[count, *caffe2_clipping(["g0", "g1"]), rms, step, momentum])
    net.op.insert(1, rate)
    workspace = Workspace()
    workspace.run_net_once(NetDef(name="init", op=[operator_def("CreateMutex", [], ["iteration_mutex"])]))
    grads, zeros = np.array([[1.0, 2.0], [2.0, 4.0]], np.float32), np.zeros(2, np.float32)
    feeds = {"g0": grads[0], "g1": grads[1], "ONE": np.ones(1, np.float32), "clip_norm": np.float32(2.5)}
    for blob, array in {**feeds, **dict.fromkeys(["m", "ms", "mom", "p0", "p1"], zeros)}.items():
        workspace.feed_blob(blob, np.asarray(array))
    workspace.feed_blob("iteration", np.zeros(1, np.int64))
    with workspace.create_net(net, "dag", 2) as made:
        made.run()
    lr = 0.5 * 2.5 / 5
    np.testing.assert_allclose(workspace.fetch_blob("p0"), -lr * 1.5 * grads[0], rtol=1e-6)
    rms_step = grads[1] / np.sqrt(0.1 * grads[1] ** 2 + 1e-5)
    np.testing.assert_allclose(workspace.fetch_blob("p1"), -lr * rms_step, rtol=1e-5)
    np.testing.assert_allclose(workspace.fetch_blob("mom"), lr * rms_step, rtol=1e-5)
