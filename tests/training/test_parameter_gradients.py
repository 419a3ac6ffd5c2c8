"""Parameters that have one gradient: updates of one of them must not reach those of the other."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import numpy.typing as npt
import pytest

from dagexec import Workspace
from dagexec.building.fillers import constant
from dagexec.core.device import Device
from dagexec.core.dtypes import INT32
from dagexec.core.gradient import SparseGradient
from dagexec.training.model_helper import ModelHelper
from dagexec.training.optimizer import SGD, Adam, Optimizer, RmsProp

OPTIMIZERS = [
    SGD(0.1),
    SGD(0.1, momentum=0.9),
    SGD(0.1, momentum=0.9, nesterov=False, weight_decay=0.5),
    SGD(0.1, weight_decay=0.5, max_gradient_norm=0.1),
    Adam(0.1, max_gradient_norm=0.1),
    RmsProp(0.1),
]
STEPS = 3


def trained(helper: ModelHelper, optimizer: Optimizer, feeds: dict[str, npt.ArrayLike], net_type: str) -> Workspace:
    optimizer.add_updates(helper)
    workspace = Workspace()
    helper.create(workspace)
    for name, value in feeds.items():
        workspace.feed_blob(name, np.asarray(value))
    with closing(workspace.create_net(helper.net, net_type, num_workers=2)) as net:
        for _ in range(STEPS):
            net.run()
    return workspace


@pytest.mark.parametrize("net_type", ["simple", "dag"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
def test_two_terms_of_a_sum_move_alike(optimizer: Optimizer, net_type: str) -> None:
    helper = ModelHelper("m", training=True)
    x = helper.add_input("x", (3, 4))
    for name in ("left", "right"):
        helper.add_parameter(name, [3, 4], constant(1), tags=("weight",))
    helper.add_operator("Sum", ["left", "right"], ["both"])
    helper.add_operator("Mul", ["both", x], ["product"])
    helper.add_operator("SumElements", ["product"], ["loss"])
    gradients = helper.add_gradient_operators(["loss"])
    assert len(set(gradients.values())) == 2
    feed = np.arange(12, dtype=np.float32).reshape(3, 4) / 10
    workspace = trained(helper, optimizer, {"x": feed}, net_type)
    left, right = workspace.fetch_blob("left"), workspace.fetch_blob("right")
    np.testing.assert_array_equal(left, right)
    assert np.abs(left - 1).max() > 0.001


def test_plain_descent_with_decay_takes_the_decay_of_each_parameter_alone() -> None:
    helper = ModelHelper("m", training=True)
    for name, value in (("left", 1), ("right", 2)):
        helper.add_parameter(name, [2], constant(value), tags=("weight",))
    helper.add_operator("Sum", ["left", "right"], ["both"])
    helper.add_operator("SumElements", ["both"], ["loss"])
    helper.add_gradient_operators(["loss"])
    workspace = trained(helper, SGD(0.5, weight_decay=0.1), {}, "simple")
    for name, start in (("left", 1.0), ("right", 2.0)):
        for _ in range(STEPS):
            start -= 0.5 * (1 + 0.1 * start)
        np.testing.assert_allclose(workspace.fetch_blob(name), start, rtol=1e-6)


def test_a_gradient_that_the_caller_gave_stays_as_it_is() -> None:
    helper = ModelHelper("m", training=True)
    for name in ("left", "right"):
        helper.add_parameter(name, [2], constant(0))
    helper.add_operator("Sum", ["left", "right"], ["both"])
    assert helper.add_gradient_operators({"both": "given"}) == {"left": "left_grad", "right": "right_grad"}
    given = np.array([1, 2], np.float32)
    workspace = trained(helper, SGD(0.1, momentum=0.9), {"given": given}, "dag")
    np.testing.assert_array_equal(workspace.fetch_blob("given"), given)
    np.testing.assert_array_equal(workspace.fetch_blob("left"), workspace.fetch_blob("right"))


def test_tables_with_one_sparse_gradient_move_alike() -> None:
    helper = ModelHelper("m", training=True)
    rows = helper.add_input("rows", (3,), INT32)
    for name in ("left", "right"):
        helper.embedding(rows, name, 4, 2, weight_init=constant(1))
    helper.add_operator("Sum", ["left", "right"], ["both"])
    helper.add_operator("SumElements", ["both"], ["loss"])
    gradients = helper.add_gradient_operators(["loss"])
    values = [found.values for found in gradients.values() if isinstance(found, SparseGradient)]
    assert len(set(values)) == 2
    workspace = trained(helper, SGD(0.1, momentum=0.9), {"rows": np.array([0, 2, 3], np.int32)}, "dag")
    left = workspace.fetch_blob("left_w")
    np.testing.assert_array_equal(left, workspace.fetch_blob("right_w"))
    np.testing.assert_array_equal(left[1], [1, 1])
    assert np.all(left[[0, 2, 3]] < 0.9)


def test_the_copy_is_on_the_device_of_the_parameter_and_has_a_free_name() -> None:
    helper = ModelHelper("m", training=True)
    with helper.device_scope("sim:0"):
        for name in ("left", "right"):
            helper.add_parameter(name, [2], constant(0))
        helper.add_operator("Copy", ["left"], ["right_grad"])
        helper.add_operator("Sum", ["left", "right"], ["both"])
        helper.add_operator("SumElements", ["both"], ["loss"])
    gradients = helper.add_gradient_operators(["loss"])
    assert gradients["right"] == "_right_grad_autosplit_0"
    copy = helper.net.op[-1]
    assert (copy.type, list(copy.output)) == ("Copy", ["_right_grad_autosplit_0"])
    assert Device.from_option(copy.device_option) == Device.parse("sim:0")
    assert not copy.device_option.HasField("random_seed")
