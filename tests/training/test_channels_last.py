"""Training nets with channels last: the same steps, blobs and names, and copies only where something else reads."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from dagexec import Workspace, zoo
from dagexec.operators import INT32
from dagexec.training.engines import training_form
from dagexec.training.model_helper import ModelHelper
from dagexec.training.optimizer import SGD, Adam
from tests.ops.onednn.engine import needs_onednn

pytestmark = needs_onednn


def small_net(group: int = 1) -> ModelHelper:
    """Convolutions, a residual sum, padding, a concatenation, two poolings and normalizations."""
    helper = ModelHelper("small", seed=1, training=True)
    data, label = helper.add_input("data", (3, 4, 9, 8)), helper.add_input("label", (3,), INT32)
    x = helper.relu(helper.spatial_bn(helper.conv(data, "conv1", 4, 6, 3, pad=1), "bn1", 6), "relu1")
    wide = helper.conv(x, "conv2", 6, 6, (3, 1), pad=(1, 0), group=group)
    x = helper.relu(helper.sum([wide, x], "sum"), "sum")
    x = helper.concat([helper.max_pool(x, "pool1", 3, stride=2), helper.average_pool(x, "pool2", 3, stride=2)], "both")
    helper.softmax_with_loss(helper.fc(x, "pred", 12 * 4 * 3, 5), label)
    helper.add_gradient_operators(["loss"])
    SGD(0.1, momentum=0.9).add_updates(helper)
    return helper


def fed(helper: ModelHelper) -> Workspace:
    workspace, rng = Workspace(), np.random.default_rng(0)
    helper.create(workspace)
    for name, known in helper.inputs.items():
        shape = tuple(size or 0 for size in known.shape or ())
        if name == "label":
            workspace.feed_blob(name, rng.integers(0, 5, shape).astype(np.int32))
        else:
            workspace.feed_blob(name, rng.standard_normal(shape, np.float32))
    return workspace


def orders(helper: ModelHelper, workspace: Workspace) -> list[str]:
    """Of the convolutions of the form that is fastest."""
    return [
        argument.s.decode()
        for one in training_form(helper.net, workspace).op
        for argument in one.arg
        if one.type.startswith("Conv") and argument.name == "order"
    ]


def test_all_blobs_of_a_step_are_those_of_numpy() -> None:
    helper = small_net()
    fast, plain = fed(helper), fed(helper)
    with helper.create_net(fast, "dag", 2) as net, plain.create_net(helper.net, "simple") as other:
        for _ in range(2):
            net.run()
            other.run()
        assert orders(helper, fed(helper)) == ["NHWC"] * 5
        names = {name for one in helper.net.op for name in one.output} - {"optimizer_iteration"}
        for name in sorted(names):
            expected = plain.fetch_blob(name)
            np.testing.assert_allclose(fast.fetch_blob(name), expected, rtol=1e-3, atol=2e-5, err_msg=name)


def test_blobs_that_are_asked_for_stay_in_their_order() -> None:
    helper = small_net()
    helper.net.external_output.append("conv2")
    workspace = fed(helper)
    workspace.create_blob("conv1")
    with helper.create_net(workspace) as net:
        net.run()
        shapes = [workspace.get_blob(name).tensor().shape for name in ("conv1", "conv2")]
    assert shapes == [(3, 6, 9, 8), (3, 6, 9, 8)]
    assert not workspace.has_blob("sum")


def test_groups_stay_as_they_are() -> None:
    helper = small_net(group=2)
    assert orders(helper, fed(helper)) == []


def lstm() -> ModelHelper:
    helper = ModelHelper("lstm", seed=1, training=True)
    x, label = helper.add_input("data", (9, 32, 24)), helper.add_input("label", (9 * 32,), INT32)
    x = helper.reshape(helper.lstm(x, "lstm", 24, 72)[0], "rows", [-1, 72])
    helper.softmax_with_loss(helper.fc(x, "pred", 72, 5), label)
    helper.add_gradient_operators(["loss"])
    Adam(0.01).add_updates(helper)
    return helper


def image_net(name: str) -> Callable[[], ModelHelper]:
    def make() -> ModelHelper:
        helper = zoo.build_training(name, 4, classes=5)
        helper.add_gradient_operators(["loss"])
        SGD(0.001, momentum=0.9).add_updates(helper)
        return helper

    return make


@pytest.mark.slow
@pytest.mark.parametrize("make", [image_net("lenet"), image_net("resnet20"), lstm], ids=["lenet", "resnet20", "lstm"])
def test_bytes_of_steps_do_not_depend_on_workers(make: Callable[[], ModelHelper]) -> None:
    helper, found = make(), []
    for net_type, workers in (("simple", 1), ("dag", 1), ("dag", 2), ("dag", 3), ("dag", 7)):
        workspace = fed(helper)
        with helper.create_net(workspace, net_type, workers) as net:
            for _ in range(2):
                net.run()
        found.append({name: workspace.fetch_blob(name).tobytes() for name in helper.checkpoint_blobs()})
    assert [one == found[0] for one in found] == [True] * len(found)
