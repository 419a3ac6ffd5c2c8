"""The model helper in training: gradients, sharing, state, and the model for inference afterwards."""

from __future__ import annotations

import numpy as np
import pytest

import dagexec
from dagexec import Workspace
from dagexec.building.fillers import constant
from dagexec.building.net_builder import ITERATION
from dagexec.core.dtypes import FLOAT64, INT32, INT64
from dagexec.core.gradient import SparseGradient
from dagexec.core.node import arguments_of
from dagexec.errors import GradientError, MissingBlobError, SchemaError
from dagexec.training import fillers
from dagexec.training.model_helper import ModelHelper
from dagexec.training.optimizer import SGD


def classifier(helper: ModelHelper, features: int = 6, classes: int = 3) -> str:
    """A small classifier; returns the loss."""
    data = helper.add_input("data", (4, features))
    label = helper.add_input("label", (4,), INT32)
    hidden = helper.relu(helper.fc(data, "hidden", features, 5), "active")
    softmax, loss = helper.softmax_with_loss(helper.fc(hidden, "scores", 5, classes), label)
    helper.accuracy(softmax, label)
    return loss


def fed(helper: ModelHelper, seed: int = 0) -> Workspace:
    """A workspace with parameters and random inputs."""
    rng = np.random.default_rng(seed)
    workspace = Workspace()
    helper.create(workspace)
    for name, info in helper.inputs.items():
        assert info.shape is not None
        shape = [size or 1 for size in info.shape]
        integers = info.dtype in (INT32, INT64)
        value = rng.integers(0, 3, shape) if integers else rng.standard_normal(shape)
        assert info.dtype is not None
        workspace.feed_blob(name, value.astype(info.dtype.numpy))
    return workspace


def run(helper: ModelHelper, workspace: Workspace) -> None:
    workspace.run_net_once(helper.net)


def test_every_trained_parameter_gets_its_gradient_and_the_data_none() -> None:
    helper = ModelHelper("m", training=True)
    loss = classifier(helper)
    found = helper.add_gradient_operators([loss])
    assert list(found) == helper.params == ["hidden_w", "hidden_b", "scores_w", "scores_b"]
    assert found == helper.params_to_grad
    assert all(found[name] == f"{name}_grad" for name in found)
    workspace = fed(helper)
    run(helper, workspace)
    for name, shape in helper.parameters.items():
        assert workspace.fetch_blob(f"{name}_grad").shape == shape
    assert not workspace.has_blob("data_grad")


def test_gradients_are_asked_for_once_and_not_before_they_are_there() -> None:
    helper = ModelHelper("m", training=True)
    with pytest.raises(GradientError, match="model 'm': there are no gradients yet"):
        _ = helper.params_to_grad
    loss = classifier(helper)
    helper.add_gradient_operators([loss])
    with pytest.raises(GradientError, match="model 'm': there are gradients already"):
        helper.add_gradient_operators([loss])


def test_a_parameter_without_gradient_is_an_error_unless_it_is_named() -> None:
    helper = ModelHelper("m", training=True)
    loss = classifier(helper)
    helper.fc("data", "unused", 6, 2)
    before = len(helper.net.op)
    with pytest.raises(GradientError, match=r"reaches the parameters \['unused_w', 'unused_b'\]"):
        helper.add_gradient_operators([loss])
    assert len(helper.net.op) == before
    found = helper.add_gradient_operators([loss], without=["unused_w", "unused_b"])
    assert "unused_w" not in found


def test_an_embedding_has_a_sparse_gradient() -> None:
    helper = ModelHelper("m", training=True)
    words = helper.add_input("words", (4,), INT32)
    table = helper.embedding(words, "embedded", rows=10, dim=3)
    helper.averaged_loss(helper.squared_l2_distance(table, helper.add_input("target", (4, 3)), "distance"))
    gradient = helper.add_gradient_operators(["loss"])["embedded_w"]
    assert isinstance(gradient, SparseGradient)
    workspace = fed(helper)
    run(helper, workspace)
    assert workspace.fetch_blob(gradient.values).shape == (4, 3)
    assert helper.weights == ["embedded_w"]


def test_layers_of_a_training_are_in_training_mode_unless_told_otherwise() -> None:
    for training in (True, False):
        helper = ModelHelper("m", training=training)
        x = helper.add_input("x", (2, 3, 4, 4))
        for default in (None, True, False):
            name = f"n{default}"
            y = helper.dropout(helper.spatial_bn(x, f"{name}bn", 3, is_test=default), f"{name}d", is_test=default)
            tested = [arguments_of(operator, "").bool("is_test") for operator in helper.net.op[-2:]]
            assert tested == [not training if default is None else default] * 2
            assert helper.net.op[-1].output[0] == y


def test_dropout_draws_by_the_counter_of_steps_and_a_seed_of_its_own() -> None:
    helper = ModelHelper("m", seed=3, training=True)
    x = helper.add_input("x", (4, 50))
    for name in ("a", "b"):
        helper.dropout(x, name)
    assert [list(operator.input) for operator in helper.net.op] == [["x", ITERATION], ["x", ITERATION]]
    seeds = {operator.device_option.random_seed for operator in helper.net.op}
    assert seeds == {helper.seed_of("a"), helper.seed_of("b")}
    assert len(seeds) == 2
    workspace = fed(helper)
    run(helper, workspace)
    first = workspace.fetch_blob("_a_mask")
    assert not np.array_equal(first, workspace.fetch_blob("_b_mask"))
    run(helper, workspace)
    np.testing.assert_array_equal(workspace.fetch_blob("_a_mask"), first)
    workspace.feed_blob(ITERATION, np.array([1]))
    run(helper, workspace)
    assert not np.array_equal(workspace.fetch_blob("_a_mask"), first)


def test_shared_parameters_are_made_once_and_their_gradients_are_summed() -> None:
    helper = ModelHelper("m", training=True)
    x, y = helper.add_input("x", (4, 3)), helper.add_input("y", (4, 3))
    with helper.name_scope("left"):
        a = helper.fc(x, "fc", 3, 2)
    with helper.parameter_sharing({"right": "left", "alone_b": "left/fc_b"}):
        with helper.name_scope("right"):
            b = helper.fc(y, "fc", 3, 2)
        c = helper.fc(y, "alone", 3, 2)
        shares = r"'right/fc_w' shares parameter 'left/fc_w' of shape \(2, 3\), but needs"
        with helper.name_scope("right"), pytest.raises(SchemaError, match=shares):
            helper.fc(y, "fc", 3, 5)
    assert helper.params == ["left/fc_w", "left/fc_b", "alone_w"]
    helper.averaged_loss(helper.squared_l2_distance(a, b, "distance"), "one")
    helper.averaged_loss(c, "two")
    found = helper.add_gradient_operators(["one", "two"])
    workspace = fed(helper)
    run(helper, workspace)
    x_, y_, weight = (workspace.fetch_blob(name).astype(np.float64) for name in ("x", "y", "left/fc_w"))
    expected = ((x_ - y_) @ weight.T).T @ (x_ - y_) / 4
    np.testing.assert_allclose(workspace.fetch_blob(str(found["left/fc_w"])), expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(workspace.fetch_blob(str(found["left/fc_b"])), [0.5, 0.5], atol=1e-6)


def test_running_statistics_are_in_checkpoints() -> None:
    helper = ModelHelper("m", training=True)
    helper.spatial_bn(helper.add_input("x", (1, 3, 4, 4)), "bn", 3)
    helper.iteration()
    assert helper.checkpoint_blobs() == ["bn_s", "bn_b", "bn_rm", "bn_riv", ITERATION]


def test_state_and_counter_are_filled_saved_and_not_differentiated() -> None:
    helper = ModelHelper("m", training=True)
    loss = classifier(helper)
    helper.add_state("hidden_w_momentum", (5, 6), constant(0.5), FLOAT64)
    assert helper.iteration() == helper.iteration() == ITERATION
    helper.add_gradient_operators([loss])
    assert helper.checkpoint_blobs() == [*helper.params, "hidden_w_momentum", ITERATION]
    workspace = fed(helper)
    momentum, counter = workspace.fetch_blob("hidden_w_momentum"), workspace.fetch_blob(ITERATION)
    assert momentum.dtype == np.float64
    np.testing.assert_array_equal(momentum, np.full((5, 6), 0.5))
    assert counter.dtype == np.int64
    assert counter.tolist() == [0]
    with pytest.raises(SchemaError, match="'hidden_w_momentum' already exists"):
        helper.add_state("hidden_w_momentum", (1,), constant(0))


def test_a_training_starts_from_neutral_parameters() -> None:
    helper = ModelHelper("m", training=True)
    x = helper.add_input("x", (1, 3, 4, 4))
    helper.spatial_bn(helper.conv(x, "conv", 3, 400, kernel=3), "bn", 400)
    workspace = fed(helper)
    for name, value in (("conv_b", 0), ("bn_s", 1), ("bn_b", 0), ("bn_rm", 0), ("bn_riv", 1)):
        np.testing.assert_array_equal(workspace.fetch_blob(name), value)
    np.testing.assert_allclose(workspace.fetch_blob("conv_w").std(), np.sqrt(2 / 27), rtol=0.05)


def test_the_model_for_inference_has_the_trained_values_and_neither_labels_nor_losses() -> None:
    helper = ModelHelper("m", seed=2, training=True)
    data = helper.add_input("data", (4, 3, 6, 6))
    label = helper.add_input("label", (4,), INT32)
    x = helper.spatial_bn(helper.conv(data, "conv", 3, 4, kernel=3), "bn", 4)
    x = helper.dropout(helper.relu(x, x), "drop")
    _, loss = helper.softmax_with_loss(helper.fc(x, "scores", 4 * 4 * 4, 3), label)
    helper.add_gradient_operators([loss])
    workspace = fed(helper)
    run(helper, workspace)
    model = helper.predict_model(workspace, ["softmax"], shapes={"data": (None, 3, 6, 6)})
    assert [operator.type for operator in model.net.op] == ["Conv", "SpatialBN", "Relu", "Dropout", "FC", "Softmax"]
    assert list(model.inputs) == ["data"]
    assert model.parameters.keys() == helper.parameters.keys() | helper.computed_parameters.keys()
    assert set(model.net.external_input) == {"data", *model.parameters}
    assert not any(array.flags.writeable for array in model.parameters.values())
    images = np.random.default_rng(0).standard_normal((2, 3, 6, 6))
    with dagexec.compile(model) as executor:
        found = executor.run({"data": images.astype(np.float32)})["softmax"]
    values = {name: workspace.fetch_blob(name).astype(np.float64) for name in model.parameters}
    patches = np.lib.stride_tricks.sliding_window_view(images, (3, 3), axis=(2, 3))
    x_ = np.einsum("ncyxij,mcij->nmyx", patches, values["conv_w"]) + values["conv_b"][:, None, None]
    column = (slice(None), None, None)
    x_ = (x_ - values["bn_rm"][column]) / np.sqrt(values["bn_riv"][column] + 1e-5)
    x_ = np.maximum(x_ * values["bn_s"][column] + values["bn_b"][column], 0)
    scores = x_.reshape(2, -1) @ values["scores_w"].T + values["scores_b"]
    expected = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_the_model_for_inference_has_no_labels_of_pixels_and_no_sums_over_devices() -> None:
    helper = ModelHelper("m", training=True)
    data = helper.add_input("data", (2, 3, 4, 5))
    label = helper.add_input("label", (2, 4, 5), INT32)
    x = helper.spatial_bn(data, "bn", 3)
    helper.add_operator("ChannelStats", [data], ["sums", "squares"])
    helper.net.op[0].input.extend(["sums", "squares"])
    helper.net.op.insert(0, helper.net.op.pop())
    helper.add_operator("SpatialSoftmaxWithLoss", [x, label], ["softmax", "loss"], scale=2.0)
    helper.add_gradient_operators(["loss"])
    workspace = fed(helper)
    run(helper, workspace)
    model = helper.predict_model(workspace, ["softmax"])
    assert [operator.type for operator in model.net.op] == ["SpatialBN", "Softmax"]
    assert list(model.inputs) == ["data"]
    images = np.random.default_rng(0).standard_normal((2, 3, 4, 5)).astype(np.float32)
    with dagexec.compile(model) as executor:
        found = executor.run({"data": images})["softmax"]
    column = (slice(None), None, None)
    mean, variance = (workspace.fetch_blob(name)[column] for name in ("bn_rm", "bn_riv"))
    powers = np.exp((images - mean) / np.sqrt(variance + 1e-5))
    np.testing.assert_allclose(found, powers / powers.sum(axis=1, keepdims=True), rtol=1e-4)


def test_later_training_does_not_reach_a_model_for_inference() -> None:
    helper = ModelHelper("m", training=True)
    classifier(helper)
    workspace = fed(helper)
    model = helper.predict_model(workspace, ["softmax"])
    kept = model.parameters["hidden_w"].copy()
    workspace.feed_blob("hidden_w", np.zeros((5, 6), np.float32))
    np.testing.assert_array_equal(model.parameters["hidden_w"], kept)


def test_a_model_for_inference_needs_its_outputs_and_parameters() -> None:
    helper = ModelHelper("m", training=True)
    classifier(helper)
    with pytest.raises(SchemaError, match=r"no operator writes \['nothing'\]"):
        helper.predict_model(Workspace(), ["nothing"])
    with pytest.raises(MissingBlobError, match="'hidden_w'"):
        helper.predict_model(Workspace(), ["softmax"])


@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
def test_every_layer_trains(order: str) -> None:
    helper = ModelHelper("m", seed=4, training=True, order=order)
    shape = (2, 4, 8, 8) if order == "NCHW" else (2, 8, 8, 4)
    x = helper.add_input("x", shape)
    x = helper.conv(x, "conv", 4, 6, kernel=3, pad=1, group=2)
    x = helper.group_norm(x, "gn", 6, groups=3)
    x = helper.prelu(x, "prelu", 6)
    x = helper.instance_norm(x, "in", 6)
    x = helper.lrn(x, "lrn", size=3)
    x = helper.conv_transpose(x, "up", 6, 4, kernel=2, stride=2)
    x = helper.sigmoid(helper.average_pool(x, "ap", kernel=2, stride=2), "sigmoid")
    y = helper.tanh(helper.max_pool(x, "mp", kernel=3, stride=1, pad=1), "tanh")
    x = helper.concat([helper.sum([x, y], "sum"), helper.clip(y, "clip", -0.5, 0.5)], "concat")
    x = helper.dropout(helper.global_average_pool(x, "gap"), "drop", ratio=0.1)
    x = helper.layer_norm(helper.fc(helper.flatten(x, "flat"), "fc", 8, 5), "ln", 5)
    x = helper.transpose(helper.reshape(x, "reshaped", [5, 2]), "transposed", [1, 0])
    helper.averaged_loss(helper.squared_l2_distance(x, helper.add_input("target", (2, 5)), "distance"))
    found = helper.add_gradient_operators(["loss"])
    workspace = fed(helper)
    run(helper, workspace)
    for name, shape_ in helper.parameters.items():
        gradient = workspace.fetch_blob(str(found[name]))
        assert gradient.shape == shape_
        assert np.isfinite(gradient).all()
        assert np.abs(gradient).max() > 0, f"{name} has no influence"


@pytest.mark.parametrize("bidirectional", [False, True])
def test_recurrent_layers_train_and_predict_the_same(bidirectional: bool) -> None:
    helper = ModelHelper("m", training=True)
    x = helper.add_input("x", (5, 2, 3))
    width = 8 if bidirectional else 4
    y, hidden, cell = helper.lstm(x, "lstm", 3, 4, bidirectional=bidirectional)
    z, last = helper.gru(y, "gru", width, 4, bidirectional=bidirectional)
    assert (y, hidden, cell, z, last) == ("lstm", "lstm_last_hidden", "lstm_last_cell", "gru", "gru_last_hidden")
    helper.add_operator("SumSqrElements", [z], ["loss"])
    found = helper.add_gradient_operators(["loss"])
    workspace = fed(helper)
    run(helper, workspace)
    assert workspace.fetch_blob(y).shape == workspace.fetch_blob(z).shape == (5, 2, width)
    for name in helper.params:
        assert np.abs(workspace.fetch_blob(str(found[name]))).max() > 0
    model = helper.predict_model(workspace, [z])
    assert [len(operator.output) for operator in model.net.op if operator.type in ("LSTM", "GRU")] == [3, 2]
    with dagexec.compile(model) as executor:
        predicted = executor.run({"x": workspace.fetch_blob("x")})[z]
    np.testing.assert_allclose(predicted, workspace.fetch_blob(z), rtol=1e-5, atol=1e-6)


def test_forget_gates_start_open() -> None:
    helper = ModelHelper("m", training=True)
    helper.lstm(helper.add_input("x", (5, 2, 3)), "lstm", 3, 4, bidirectional=True)
    bias = fed(helper).fetch_blob("lstm_b")
    expected = np.zeros((2, 8, 4))
    expected[:, 2] = 1
    np.testing.assert_array_equal(bias, expected.reshape(2, 32))
    with pytest.raises(SchemaError, match="lstm 'other': expected the initial hidden and cell, found 1 blobs"):
        helper.lstm("x", "other", 3, 4, initial=["h"])


def lenet_losses(helper: ModelHelper, steps: int) -> list[float]:
    """LeNet at the rate of Caffe2's tutorial, on images of ten shapes as bright as digits are."""
    data, label = helper.add_input("data", (16, 1, 28, 28)), helper.add_input("label", (16,), INT32)
    x = helper.max_pool(helper.conv(data, "conv1", 1, 20, kernel=5), "pool1", 2, stride=2)
    x = helper.max_pool(helper.conv(x, "conv2", 20, 50, kernel=5), "pool2", 2, stride=2)
    x = helper.relu(helper.fc(x, "fc3", 50 * 16, 500), "fc3_relu")
    _, loss = helper.softmax_with_loss(helper.fc(x, "pred", 500, 10), label)
    helper.add_gradient_operators([loss])
    SGD(0.1).add_updates(helper)
    rng = np.random.default_rng(0)
    shapes = rng.random((10, 1, 7, 7)) < 0.3
    workspace = Workspace()
    helper.create(workspace)
    losses = []
    for _ in range(steps):
        digits = rng.integers(0, 10, 16)
        workspace.feed_blob("data", np.kron(shapes[digits], np.ones((4, 4))).astype("f"))
        workspace.feed_blob("label", digits.astype(np.int32))
        if helper.net.name not in workspace.nets:
            helper.create_net(workspace, "simple")
        workspace.run_net(helper.net.name)
        losses.append(float(workspace.fetch_blob(loss)))
    return losses


def test_lenet_trains_at_caffe2s_rate_from_what_caffe2_starts_from() -> None:
    """As it has no ReLU behind its convolutions, it diverges from HE."""
    first, *_, last = lenet_losses(ModelHelper("lenet", seed=1, training=True, initialization=fillers.CAFFE2), 15)
    assert last < 0.3 * first
    with np.errstate(all="ignore"):
        assert not max(lenet_losses(ModelHelper("lenet", seed=1, training=True), 15)) < 10 * first
