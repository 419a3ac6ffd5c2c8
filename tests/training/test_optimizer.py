"""Optimizers on models: what they append to the nets, and what training with them does."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagexec import Workspace
from dagexec.building.fillers import Filler, constant, gaussian
from dagexec.core.dtypes import FLOAT64, INT32
from dagexec.core.gradient import SparseGradient
from dagexec.errors import ArgumentError, GradientError, SchemaError
from dagexec.ops.families.optimize.policies import Cyclical, Exp, LinearWarmup, Step
from dagexec.training.model_helper import ModelHelper
from dagexec.training.optimizer import (
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Ftrl,
    GroupFtrl,
    Optimizer,
    RmsProp,
    Wngrad,
    YellowFin,
)
from tests.training.as_written import as_written

Array = npt.NDArray[Any]
ROWS, CLASSES = 8, 3
RNG = np.random.default_rng(0)
DATA = RNG.standard_normal((ROWS, 5)).astype(np.float32)
LABELS = RNG.integers(0, CLASSES, ROWS).astype(np.int32)
OPTIMIZERS = [
    SGD(0.2),
    SGD(0.05, momentum=0.9),
    SGD(0.05, momentum=0.9, nesterov=False),
    SGD(0.5, lars=0.5),
    SGD(0.2, momentum=0.5, lars=0.25),
    Adam(0.05),
    Adam(0.05, decoupled_weight_decay=0.1),
    Adagrad(0.2),
    Adadelta(2.0),
    RmsProp(0.02),
    RmsProp(0.02, momentum=0.5),
    Ftrl(0.2),
    GroupFtrl(0.2),
    Wngrad(1.0, moment_init=2.0),
    YellowFin(0.05),
]


def classifier(device: str = "cpu") -> tuple[ModelHelper, str]:
    """Two dense layers on `device` and their loss, with gradients."""
    helper = ModelHelper("classifier", seed=1, training=True)
    with helper.device_scope(device):
        helper.add_input("x", (ROWS, 5))
        helper.add_input("label", (ROWS,), INT32)
        hidden = helper.relu(helper.fc("x", "one", 5, 6), "hidden")
        _, loss = helper.softmax_with_loss(helper.fc(hidden, "two", 6, CLASSES), "label")
    helper.add_gradient_operators([loss])
    return helper, loss


def train(helper: ModelHelper, steps: int, net_type: str = "simple", workers: int = 1) -> Workspace:
    """The workspace after some steps; the losses of all steps are in blob `losses`."""
    workspace = Workspace()
    helper.create(workspace)
    workspace.feed_blob("x", DATA)
    workspace.feed_blob("label", LABELS)
    losses = []
    with workspace.create_net(as_written(helper.net), net_type, workers) as net:
        for _ in range(steps):
            net.run()
            losses.append(float(workspace.fetch_blob("loss")))
    workspace.feed_blob("losses", np.array(losses))
    return workspace


def state_bytes(helper: ModelHelper, workspace: Workspace) -> dict[str, bytes]:
    """The bytes of all a checkpoint would hold."""
    return {name: workspace.fetch_blob(name).tobytes() for name in helper.checkpoint_blobs()}


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
def test_the_loss_falls_and_every_schedule_and_device_gives_the_same_bytes(optimizer: Optimizer) -> None:
    found = []
    for device, net_type, workers in [("cpu", "simple", 1), ("cpu", "dag", 3), ("sim:0", "async_dag", 2)]:
        helper, _ = classifier(device)
        optimizer.add_updates(helper)
        workspace = train(helper, 25, net_type, workers)
        losses = workspace.fetch_blob("losses")
        assert losses[-1] < 0.9 * losses[0]
        found.append(state_bytes(helper, workspace))
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
def test_a_resumed_training_gives_the_bytes_of_an_uninterrupted_one(optimizer: Optimizer) -> None:
    helper, _ = classifier()
    optimizer.add_updates(helper)
    whole = train(helper, 6)
    half = train(helper, 3)
    again = Workspace()
    helper.create(again)
    for name in ["x", "label", *helper.checkpoint_blobs()]:
        again.feed_blob(name, half.fetch_blob(name))
    with again.create_net(as_written(helper.net), "simple", 1) as net:
        for _ in range(3):
            net.run()
    assert state_bytes(helper, again) == state_bytes(helper, whole)


def test_state_has_caffe2s_names_and_the_type_and_shape_of_its_parameter() -> None:
    names = {
        SGD(0.1, momentum=0.9): ["momentum"],
        Adam(): ["first_moment", "second_moment"],
        Adagrad(): ["squared_sum"],
        Adadelta(): ["squared_moment", "squared_moment_update"],
        RmsProp(): ["mean_squares", "momentum"],
    }
    for optimizer, suffixes in names.items():
        helper = ModelHelper("one", training=True)
        helper.add_input("x", (3, 4), FLOAT64)
        w = helper.add_parameter("w", (3, 4), Filler("ConstantFill", {"value": 1.0, "dtype": FLOAT64.number}))
        helper.add_operator("Mul", ["x", w], ["y"])
        helper.add_operator("SumElements", ["y"], ["loss"])
        helper.add_gradient_operators(["loss"])
        optimizer.add_updates(helper)
        assert {f"w_{suffix}" for suffix in suffixes} | {"optimizer_iteration"} == set(helper.states)
        workspace = Workspace()
        helper.create(workspace)
        for suffix in suffixes:
            assert workspace.fetch_blob(f"w_{suffix}").dtype == np.float64
            assert workspace.fetch_blob(f"w_{suffix}").shape == (3, 4)
        workspace.feed_blob("x", np.ones((3, 4)))
        with workspace.create_net(as_written(helper.net), "simple", 1) as net:
            net.run()
        assert (workspace.fetch_blob("w") < 1).all()


def test_the_first_step_is_iteration_one() -> None:
    helper, _ = classifier()
    SGD(0.5, policy=Step(stepsize=1, gamma=0.5)).add_updates(helper)
    workspace = train(helper, 1)
    (rate,) = [definition.output[0] for definition in helper.net.op if definition.type == "LearningRate"]
    assert workspace.fetch_blob(rate) == np.float32(-0.25)
    assert workspace.fetch_blob("optimizer_iteration").tolist() == [1]


def difference(optimizer: Optimizer, steps: int = 1) -> dict[str, Array]:
    """How far each parameter of the classifier moves, in float64."""
    helper, _ = classifier()
    optimizer.add_updates(helper)
    first, last = train(helper, 0), train(helper, steps)
    return {name: last.fetch_blob(name).astype(np.float64) - first.fetch_blob(name) for name in helper.params}


def gradients() -> tuple[dict[str, Array], dict[str, Array]]:
    """Parameters and gradients of the classifier before any update."""
    helper, _ = classifier()
    workspace = train(helper, 1)
    named = helper.params_to_grad
    params = {name: workspace.fetch_blob(name).astype(np.float64) for name in helper.params}
    return params, {name: workspace.fetch_blob(str(named[name])).astype(np.float64) for name in helper.params}


def test_plain_descent_moves_by_the_rate_times_the_gradient() -> None:
    _, grads = gradients()
    for name, moved in difference(SGD(0.25)).items():
        np.testing.assert_allclose(moved, -0.25 * grads[name], rtol=1e-4, atol=1e-7)


def test_weight_decay_is_for_weights_and_is_a_part_of_the_gradient() -> None:
    params, grads = gradients()
    for name, moved in difference(SGD(0.25, weight_decay=0.5)).items():
        decay = 0.5 if name.endswith("_w") else 0.0
        np.testing.assert_allclose(moved, -0.25 * (grads[name] + decay * params[name]), rtol=1e-4, atol=1e-6)


def test_decoupled_weight_decay_is_beside_adams_step() -> None:
    params, _ = gradients()
    plain, decayed = difference(Adam(0.01)), difference(Adam(0.01, decoupled_weight_decay=0.5))
    for name in plain:
        decay = 0.5 if name.endswith("_w") else 0.0
        np.testing.assert_allclose(decayed[name] - plain[name], -0.01 * decay * params[name], rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("limit", [0.125, 1e3])
def test_gradients_are_scaled_together_to_the_greatest_norm(limit: float) -> None:
    _, grads = gradients()
    norm = math.sqrt(sum(float((grad**2).sum()) for grad in grads.values()))
    scale = min(1.0, limit / norm)
    assert (scale < 1) == (limit < 1)
    for name, moved in difference(SGD(0.25, max_gradient_norm=limit)).items():
        np.testing.assert_allclose(moved, -0.25 * scale * grads[name], rtol=1e-4, atol=1e-7)


def test_the_norm_counts_weight_decay() -> None:
    params, grads = gradients()
    total = {name: grad + (0.5 if name.endswith("_w") else 0) * params[name] for name, grad in grads.items()}
    norm = math.sqrt(sum(float((grad**2).sum()) for grad in total.values()))
    for name, moved in difference(SGD(0.25, max_gradient_norm=0.125, weight_decay=0.5)).items():
        np.testing.assert_allclose(moved, -0.25 * 0.125 / norm * total[name], rtol=1e-4, atol=1e-7)


def test_multipliers_of_tags_and_names_are_multiplied() -> None:
    _, grads = gradients()
    moved = difference(SGD(0.25, multipliers={"bias": 2.0, "two_b": 3.0, "one_w": 0.0}))
    for name, factor in {"one_w": 0.0, "one_b": 2.0, "two_w": 1.0, "two_b": 6.0}.items():
        np.testing.assert_allclose(moved[name], -0.25 * factor * grads[name], rtol=1e-4, atol=1e-7)


def test_layer_wise_rates_are_the_quotient_of_norms() -> None:
    params, grads = gradients()
    for name, moved in difference(SGD(0.25, lars=0.5)).items():
        sizes = np.linalg.norm(grads[name]), np.linalg.norm(params[name])
        factor = 1 / (sizes[0] / sizes[1] + 0.5) if sizes[1] else 1.0
        np.testing.assert_allclose(moved, -0.25 * factor * grads[name], rtol=1e-4, atol=1e-7)


def test_parameters_may_have_optimizers_of_their_own_that_share_the_counter() -> None:
    helper, _ = classifier()
    SGD(0.1, momentum=0.9).add_updates(helper, ["one_w", "one_b"])
    Adam(0.01).add_updates(helper, ["two_w"])
    Adam(0.01).add_updates(helper, ["two_b"])
    kinds = [definition.type for definition in helper.net.op]
    assert kinds.count("Iter") == 1
    assert kinds.count("LearningRate") == 2
    workspace = train(helper, 3)
    assert workspace.fetch_blob("optimizer_iteration").tolist() == [3]


def test_the_learning_rate_is_computed_once_for_all_parameters_and_devices() -> None:
    helper = ModelHelper("two", training=True)
    for device in ("sim:0", "sim:1"):
        with helper.device_scope(device), helper.name_scope(device.replace(":", "_")):
            helper.add_input("x", (ROWS, 5))
            helper.add_operator("SumElements", [helper.fc("x", "fc", 5, 2)], ["loss"])
    helper.add_gradient_operators(["sim_0/loss", "sim_1/loss"])
    Adam(0.1).add_updates(helper)
    placed = {definition.type: [] for definition in helper.net.op}
    for definition in helper.net.op:
        placed[definition.type].append((definition.device_option.device_type, definition.device_option.device_id))
    assert len(placed["LearningRate"]) == 1
    sim = helper.init_net.op[0].device_option.device_type
    assert sim != 0
    assert placed["LearningRate"] == placed["Iter"] == [(0, 0)]
    assert placed["Adam"] == [(sim, 0), (sim, 0), (sim, 1), (sim, 1)]
    states = [definition for definition in helper.init_net.op if "moment" in definition.output[0]]
    assert {(one.output[0][:5], one.device_option.device_id) for one in states} == {("sim_0", 0), ("sim_1", 1)}
    workspace = Workspace()
    helper.create(workspace)
    for k in (0, 1):
        workspace.feed_blob(f"sim_{k}/x", DATA)
    before = workspace.fetch_blob("sim_1/fc_w")
    with workspace.create_net(as_written(helper.net), "async_dag", 2) as net:
        net.run()
    assert (workspace.fetch_blob("sim_1/fc_w") != before).any()


def lookup(tags: tuple[str, ...] = (), rows: int = 6, width: int = 3) -> tuple[ModelHelper, str]:
    """A table, rows of it by index, and the sum of their products with an input, with gradients."""
    helper = ModelHelper("lookup", seed=2, training=True)
    helper.add_input("indices", (5,), INT32)
    helper.add_input("x", (5, width))
    table = helper.add_parameter("table", (rows, width), gaussian(1.0), tags=tags)
    helper.add_operator("Gather", [table, "indices"], ["found"])
    helper.add_operator("Mul", ["found", "x"], ["product"])
    helper.add_operator("SumElements", ["product"], ["loss"])
    helper.add_gradient_operators(["loss"])
    return helper, "table"


def train_table(optimizer: Optimizer, steps: int = 3) -> tuple[Array, Array, list[Array], list[Array]]:
    """The table before and after, and the indices and row gradients of each step."""
    helper, table = lookup()
    assert isinstance(helper.params_to_grad[table], SparseGradient)
    optimizer.add_updates(helper)
    workspace = Workspace()
    helper.create(workspace)
    before = workspace.fetch_blob(table).copy()
    rng = np.random.default_rng(5)
    indices = [rng.integers(0, 4, 5).astype(np.int32) for _ in range(steps)]
    rows = [rng.standard_normal((5, 3)).astype(np.float32) for _ in range(steps)]
    workspace.feed_blob("indices", indices[0])
    workspace.feed_blob("x", rows[0])
    with workspace.create_net(as_written(helper.net), "dag", 2) as net:
        for index, row in zip(indices, rows, strict=True):
            workspace.feed_blob("indices", index)
            workspace.feed_blob("x", row)
            net.run()
    return before, workspace.fetch_blob(table), indices, rows


def test_a_sparse_step_is_the_dense_one_on_the_rows_it_has() -> None:
    before, after, indices, rows = train_table(SGD(0.25))
    expected = before.astype(np.float64)
    for index, row in zip(indices, rows, strict=True):
        np.subtract.at(expected, index, 0.25 * row)
    np.testing.assert_allclose(after, expected, rtol=1e-5, atol=1e-6)


def test_sparse_adagrad_adds_up_rows_of_one_index_unless_told_not_to() -> None:
    for deduplicate in (True, False):
        before, after, indices, rows = train_table(Adagrad(0.25, epsilon=0.5, deduplicate=deduplicate))
        expected, total = before.astype(np.float64), np.zeros(before.shape)
        for index, row in zip(indices, rows, strict=True):
            slopes = {key: row[index == key] for key in set(index.tolist())}
            for key, found in slopes.items():
                for slope in [found.sum(0)] if deduplicate else found:
                    total[key] += slope.astype(np.float64) ** 2
                    expected[key] -= 0.25 * slope / (np.sqrt(total[key]) + 0.5)
        np.testing.assert_allclose(after, expected, rtol=1e-5, atol=1e-6)


SPARSE = [
    SGD(0.1), SGD(0.1, momentum=0.9), Adam(0.1), Adam(0.1, row_wise=True), Adam(0.1, rectified=True), Adagrad(0.1),
    Adagrad(0.1, row_wise=True), Adadelta(1.0), Ftrl(0.1), SGD(0.1, max_gradient_norm=0.5),
    Wngrad(1.0),
]  # fmt: skip


@pytest.mark.parametrize("optimizer", SPARSE, ids=repr)
def test_rows_without_gradient_stay_as_they_are(optimizer: Optimizer) -> None:
    before, after, _, _ = train_table(optimizer)
    assert after[4:].tobytes() == before[4:].tobytes()
    assert (after[:4] != before[:4]).any()


@settings(max_examples=8, deadline=None)
@given(st.sampled_from([SGD(0.1), SGD(0.1, momentum=0.5), Adam(0.1), Adagrad(0.1), Adadelta(1.0), Ftrl(0.1)]))
def test_a_sparse_gradient_of_all_rows_does_what_a_dense_one_does(optimizer: Optimizer) -> None:
    results = []
    rng = np.random.default_rng(6)
    rows = [rng.standard_normal((5, 3)).astype(np.float32) for _ in range(3)]
    for sparse in (True, False):
        helper, table = lookup(rows=5)
        if not sparse:
            helper = ModelHelper("dense", seed=2, training=True)
            helper.add_input("x", (5, 3))
            helper.add_parameter(table, (5, 3), gaussian(1.0))
            helper.add_operator("Mul", [table, "x"], ["product"])
            helper.add_operator("SumElements", ["product"], ["loss"])
            helper.add_gradient_operators(["loss"])
        optimizer.add_updates(helper)
        workspace = Workspace()
        helper.create(workspace)
        workspace.feed_blob("indices", np.arange(5, dtype=np.int32))
        workspace.feed_blob("x", rows[0])
        with workspace.create_net(as_written(helper.net), "simple", 1) as net:
            for row in rows:
                workspace.feed_blob("x", row)
                net.run()
        results.append(workspace.fetch_blob(table))
    np.testing.assert_allclose(results[0], results[1], rtol=1e-6, atol=1e-6)


def test_what_sparse_gradients_do_not_go_with_is_refused_by_name() -> None:
    for optimizer in (RmsProp(), YellowFin()):
        helper, _ = lookup()
        with pytest.raises(GradientError, match=rf"'table' has a sparse gradient, which {type(optimizer).__name__}"):
            optimizer.add_updates(helper)
    for optimizer in (SGD(0.1, weight_decay=0.1), Adam(0.1, decoupled_weight_decay=0.1)):
        helper, _ = lookup(tags=("weight",))
        with pytest.raises(GradientError, match="'table' has a sparse gradient, for which there is no weight decay"):
            optimizer.add_updates(helper)
        lookup_without, _ = lookup()
        optimizer.add_updates(lookup_without)


def test_updates_need_gradients_first() -> None:
    helper = ModelHelper("none", training=True)
    with pytest.raises(GradientError, match="call add_gradient_operators"):
        SGD(0.1).add_updates(helper)


def test_a_parameter_without_gradient_is_named() -> None:
    helper = ModelHelper("some", training=True)
    helper.add_input("x", (3,))
    used = helper.add_parameter("used", (3,), constant(1))
    helper.add_parameter("unused", (3,), constant(1))
    helper.add_operator("Mul", ["x", used], ["y"])
    helper.add_operator("SumElements", ["y"], ["loss"])
    helper.add_gradient_operators(["loss"], without=["unused"])
    with pytest.raises(GradientError, match=r"no gradient leads to \['unused'\]"):
        SGD(0.1).add_updates(helper, ["used", "unused"])
    SGD(0.1).add_updates(helper)
    assert [definition.output[0] for definition in helper.net.op if definition.type == "WeightedSum"] == ["used"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SGD(-0.1), "SGD: learning_rate must be at least 0 and finite, found -0.1"),
        (lambda: SGD(math.nan), "SGD: learning_rate must be at least 0 and finite, found nan"),
        (lambda: SGD(0.1, momentum=-1), "SGD: momentum must be"),
        (lambda: SGD(0.1, lars=-1), "SGD: lars must be"),
        (lambda: SGD(0.1, weight_decay=math.inf), "SGD: weight_decay must be"),
        (lambda: SGD(0.1, max_gradient_norm=0.0), "SGD: max_gradient_norm must be above 0, found 0"),
        (lambda: SGD(0.1, multipliers={"bias": math.nan}), "SGD: the multiplier of 'bias' must be .* found nan"),
        (lambda: Adam(0.1, multipliers={"bias": -2.0}), "Adam: the multiplier of 'bias' must be .* found -2"),
        (lambda: Adam(0.1, epsilon=-1), "Adam: epsilon must be"),
        (lambda: Adam(0.1, row_wise=True, rectified=True), "row_wise and rectified cannot be combined"),
        (lambda: YellowFin(0.1, policy=Exp(0.5)), "it tunes the learning rate itself; found policy 'exp'"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(make: Any, message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        make()


def test_a_parameter_is_updated_once() -> None:
    helper, _ = classifier()
    first, *rest = helper.params
    with pytest.raises(SchemaError, match=f"\\['{first}'\\] already has an update"):
        SGD(0.1).add_updates(helper, [first, *rest, first])
    SGD(0.1).add_updates(helper, [first])
    length = len(helper.net.op)
    with pytest.raises(SchemaError, match=f"\\['{first}'\\] already has an update"):
        Adam(0.1).add_updates(helper)
    assert len(helper.net.op) == length
    Adam(0.1).add_updates(helper, rest)


def test_multipliers_are_of_parameters_and_tags_that_the_model_has() -> None:
    helper, _ = classifier()
    with pytest.raises(SchemaError, match=r"multipliers of \['biases'\].*'bias'"):
        SGD(0.1, multipliers={"biases": 2.0}).add_updates(helper)


def test_a_policy_that_does_not_go_with_the_rate_is_refused_when_updates_are_added() -> None:
    helper, _ = classifier()
    with pytest.raises(ArgumentError, match="base_lr must not be 0"):
        SGD(0.0, policy=Cyclical(stepsize=3)).add_updates(helper)


def test_a_warmup_reaches_the_full_rate() -> None:
    helper, _ = classifier()
    Adam(0.5, policy=LinearWarmup(num_iter=4)).add_updates(helper)
    (rate,) = [definition.output[0] for definition in helper.net.op if definition.type == "LearningRate"]
    for steps, expected in [(1, 0.125), (3, 0.375), (4, 0.5), (6, 0.5)]:
        assert train(helper, steps).fetch_blob(rate) == pytest.approx(-expected)


@pytest.mark.slow
def test_the_programs_of_the_documentation_run() -> None:
    page = Path(__file__).parents[2] / "docs" / "optimizers.md"
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    assert len(blocks) == 2
    use = """
import numpy as np
from dagexec import NetDef, OperatorDef, Workspace
workspace = Workspace()
for name, values in {"p": [0, 0, 0], "g": [3, -2, 0], "r": [-0.5]}.items():
    workspace.feed_blob(name, np.array(values, np.float32))
workspace.run_net_once(NetDef(name="sign", op=[OperatorDef(type="SignSGD", input=["p", "g", "r"], output=["p"])]))
print(workspace.fetch_blob("p").tolist())
"""
    done = subprocess.run(
        [sys.executable, "-c", "\n".join([*blocks, use])], capture_output=True, text=True, check=False
    )
    assert done.stdout == "[-0.5, 0.5, 0.0]\n", done.stderr
