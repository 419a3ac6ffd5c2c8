"""The gradients of whole networks in float64, along a random direction of all parameters at once.

GoogLeNet is not among them: where pools with overlapping windows follow each other many pixels are one maximum, and
MaxPool's gradient counts each of them, as Caffe2's does.
"""

from __future__ import annotations

import numpy as np
import pytest

from dagexec import NetDef, Workspace, zoo
from dagexec.building.net_builder import ITERATION

STEP = 1e-9  # small, as deep networks of ReLU have corners everywhere


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "size"), [("lenet_digits", 8), ("resnet20", 16), ("squeezenet_towers", 31), ("mobilenet_v2", 48)]
)
def test_the_gradient_of_all_parameters_is_the_numerical_one(name: str, size: int) -> None:
    helper = zoo.build_training(name, 3, seed=1, classes=4, image_size=size)
    forward = NetDef()
    forward.CopyFrom(helper.net)
    gradients = helper.add_gradient_operators(["loss"])
    started, workspace, rng = Workspace(), Workspace(), np.random.default_rng(0)
    helper.create(started)
    values, directions = {}, {}
    for blob in [*helper.parameters, *helper.computed_parameters]:
        start = started.fetch_blob(blob).astype(np.float64)
        values[blob] = start + 0.1 * rng.standard_normal(start.shape) * blob.endswith(("_s", "_b"))
        if blob in helper.parameters:
            directions[blob] = rng.standard_normal(start.shape) * np.abs(values[blob]).mean()
        workspace.feed_blob(blob, values[blob])
    if ITERATION in helper.states:
        workspace.feed_blob(ITERATION, started.fetch_blob(ITERATION))
    workspace.feed_blob("data", rng.standard_normal([axis or 1 for axis in helper.inputs["data"].shape or ()]))
    workspace.feed_blob("label", np.array([0, 1, 2], np.int32))
    workspace.run_net_once(helper.net)
    found = sum(float(np.sum(workspace.fetch_blob(str(gradients[blob])) * directions[blob])) for blob in directions)
    net, losses = workspace.build_net(forward, "simple"), []
    for sign in (1, -1):
        for blob, direction in directions.items():
            workspace.feed_blob(blob, values[blob] + sign * STEP * direction)
        net.run()
        losses.append(float(workspace.fetch_blob("loss")))
    net.close()
    np.testing.assert_allclose(found, (losses[0] - losses[1]) / (2 * STEP), rtol=1e-3, atol=1e-5)
