"""fine_tune: models that were loaded go on being trained, as PyTorch trains what it exported.

`tests/fixtures/fine_tuning` has four models from both of PyTorch's exporters, and what PyTorch 2.13 makes of them in
float64: losses and values of 20 steps of SGD with Nesterov's momentum on other samples each, and the scores afterwards.
Running variances are PyTorch's, turned from those of samples into those of the population, which Caffe2 and ONNX have.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
import onnx.helper
import onnx.numpy_helper
import pytest

import dagexec
from dagexec.building.model_builder import ModelBuilder
from dagexec.core.dtypes import INT32
from dagexec.errors import GradientError, SchemaError
from dagexec.training import add_model, fine_tune
from dagexec.training.model_helper import ModelHelper
from dagexec.training.optimizer import SGD
from dagexec.training.task import Results, TrainingTask
from dagexec.training.trainer import Trainer

FOLDER = Path(__file__).parents[1] / "fixtures" / "fine_tuning"
NESTEROV = SGD(0.1, momentum=0.9)


def classes(helper: ModelHelper, batch: int | None = 4, scores: str = "scores") -> str:
    return helper.softmax_with_loss(scores, helper.add_input("label", (batch,), INT32))[1]


def recorded(name: str) -> dict[str, npt.NDArray[np.float64]]:
    with np.load(FOLDER / "torch.npz") as file:
        return {key.removeprefix(f"{name}/"): file[key] for key in file if key.startswith(f"{name}/")}


@pytest.mark.parametrize("exporter", ["script", "dynamo"])
@pytest.mark.parametrize("name", ["mlp", "cnn", "encoder", "gru"])
def test_an_export_is_trained_as_torch_trains_the_module(name: str, exporter: str) -> None:
    torch = recorded(name)
    helper = fine_tune(dagexec.load_model(FOLDER / f"{name}_{exporter}.onnx"), classes, NESTEROV)
    workspace = dagexec.Workspace()
    helper.create(workspace)
    workspace.feed_blob("x", torch["x"][0])
    workspace.feed_blob("label", torch["label"][0])
    net = helper.create_net(workspace, "dag", 2)
    losses = []
    for x, label in zip(torch["x"], torch["label"], strict=True):
        workspace.feed_blob("x", x)
        workspace.feed_blob("label", label)
        net.run()
        losses.append(float(workspace.fetch_blob("loss")))
    np.testing.assert_allclose(losses, torch["loss"], rtol=1e-5, atol=1e-5)
    with dagexec.compile(helper.predict_model(workspace, ["scores"])) as executor:
        scores = executor.run({"x": torch["x"][0]})["scores"]
    np.testing.assert_allclose(scores, torch["scores"], rtol=1e-4, atol=1e-5)
    for parameter in helper.params:
        if f"after/{parameter}" in torch:
            np.testing.assert_allclose(workspace.fetch_blob(parameter), torch[f"after/{parameter}"], atol=1e-5)


def trained(helper: ModelHelper, samples: dict[str, npt.NDArray[np.generic]], steps: int = 3) -> dagexec.Workspace:
    """A workspace in which `helper` was trained on the same samples again and again."""
    workspace = dagexec.Workspace()
    helper.create(workspace)
    for name, array in samples.items():
        workspace.feed_blob(name, array)
    net = helper.create_net(workspace, "dag", 2)
    for _ in range(steps):
        net.run()
    return workspace


def images(rng: np.random.Generator) -> dict[str, npt.NDArray[np.generic]]:
    return {"x": rng.standard_normal((4, 3, 4, 4)).astype("f"), "label": np.arange(4, dtype=np.int32) % 3}


def pair() -> dagexec.Model:
    """A model as Caffe2's files hold it, in test mode, with fillers and with inputs of unknown types."""
    builder = ModelBuilder("pair", seed=2)
    x = builder.spatial_bn(builder.conv(builder.add_input("x", (4, 3, 4, 4)), "conv", 3, 8, kernel=1), "bn", 8)
    x = builder.dropout(builder.relu(x, x), "drop", ratio=0.3)
    builder.softmax(builder.fc(x, "scores", 8 * 4 * 4, 3), "softmax")
    builder.net.external_output.append("softmax")
    return dagexec.load_model((builder.init_net, builder.net))


def test_a_pair_of_caffe2_is_trained_with_statistics_of_its_batches_and_with_dropout() -> None:
    model = pair()
    samples = images(np.random.default_rng(0))
    helpers = [fine_tune(model, partial(classes, scores="scores"), SGD(0.05), seed=seed) for seed in (0, 0, 1)]
    helper = helpers[0]
    assert helper.params == ["conv_w", "conv_b", "bn_s", "bn_b", "scores_w", "scores_b"]
    assert helper.weights == ["conv_w", "scores_w"]
    assert list(helper.computed_parameters) == ["bn_rm", "bn_riv"]
    workspaces = [trained(one, samples) for one in helpers]
    first, again, other = ([one.fetch_blob(name).tobytes() for name in helper.params] for one in workspaces)
    assert first == again
    assert first != other  # masks follow from the seed
    before = dagexec.Workspace()
    helper.create(before)
    start = before.fetch_blob("bn_rm")
    x = np.einsum(
        "nchw,oc->nohw", samples["x"].astype(float), before.fetch_blob("conv_w")[..., 0, 0].astype(np.float64)
    )
    mean = (x + before.fetch_blob("conv_b")[:, None, None]).mean((0, 2, 3))
    np.testing.assert_allclose(trained(helper, samples, 1).fetch_blob("bn_rm"), 0.9 * start + 0.1 * mean, rtol=1e-5)
    predicted = helper.predict_model(workspaces[0], ["softmax"])
    assert [made.values.get("is_test") for made in predicted.program.op if made.type in ("SpatialBN", "Dropout")] == [
        1,
        1,
    ]


def test_what_is_no_weight_stays_as_it_is() -> None:
    """Scales of one element, masks, counts, and what no gradient reaches."""
    arrays = {
        "weight": np.ones((3, 3), "f"),
        "scale": np.array([0.5], "f"),
        "mask": np.array([[0, -np.inf, 0]], "f"),
        "lowest": np.full((1, 3), np.finfo("f").min, "f"),
        "order": np.array([2, 0, 1]),
        "unread": np.ones(3, "f"),
    }
    nodes = [
        onnx.helper.make_node("MatMul", ["x", "weight"], ["a"]),
        onnx.helper.make_node("Mul", ["a", "scale"], ["b"]),
        onnx.helper.make_node("Gather", ["b", "order"], ["c"], axis=1),
        onnx.helper.make_node("Max", ["c", "lowest"], ["d"]),
        onnx.helper.make_node("Add", ["c", "mask"], ["scores"]),
        onnx.helper.make_node("Mul", ["d", "unread"], ["aside"]),
    ]
    value = partial(onnx.helper.make_tensor_value_info, elem_type=onnx.TensorProto.FLOAT, shape=(4, 3))
    graph = onnx.helper.make_graph(
        nodes,
        "g",
        [value("x")],
        [value("scores"), value("aside")],
        [onnx.numpy_helper.from_array(array, name) for name, array in arrays.items()],
    )
    model = dagexec.load_model(onnx.helper.make_model(graph))
    helper = fine_tune(model, classes, SGD(0.1))
    assert set(helper.params_to_grad) == {"weight"}
    assert set(fine_tune(model, classes, SGD(0.1), parameters=["scale"]).params_to_grad) == {"scale"}
    with pytest.raises(GradientError, match=r"reaches the parameters \['unread'\]"):
        fine_tune(model, classes, SGD(0.1), parameters=["scale", "unread"])
    with pytest.raises(SchemaError, match=r"model 'g': \['wieght'\] are not parameters of it; there are .*'weight'"):
        fine_tune(model, classes, SGD(0.1), parameters=["wieght"])


@pytest.mark.parametrize("training", [True, False])
def test_dropout_of_onnx_drops_its_share_however_it_was_exported(training: bool) -> None:
    nodes = [
        onnx.helper.make_node("Dropout", ["x", "ratio", "training"], ["dropped"]),
        onnx.helper.make_node("Mul", ["dropped", "weight"], ["scores"]),
    ]
    value = partial(onnx.helper.make_tensor_value_info, elem_type=onnx.TensorProto.FLOAT, shape=(4, 50))
    arrays = {"ratio": np.float32(0.25), "training": np.array(training), "weight": np.ones(50, "f")}
    given = [onnx.numpy_helper.from_array(np.asarray(array), name) for name, array in arrays.items()]
    graph = onnx.helper.make_graph(nodes, "g", [value("x")], [value("scores")], given)
    model = dagexec.load_model(onnx.helper.make_model(graph))
    helper = fine_tune(model, classes, SGD(0.0), seed=3)
    samples = {"x": np.ones((4, 50), "f"), "label": np.zeros(4, np.int32)}
    dropped = trained(helper, samples, 1).fetch_blob("scores")
    kept = np.float32(1 / 0.75)
    assert set(np.unique(dropped).tolist()) == {0.0, float(kept)}


def test_a_trainer_starts_from_the_values_of_the_model_on_one_device_and_on_several() -> None:
    model, samples = pair(), images(np.random.default_rng(1))

    def forward(helper: ModelHelper) -> Results:
        add_model(helper, model)
        loss = helper.softmax_with_loss("scores", "label")[1]
        return Results([loss], {"loss": loss})

    def inputs(helper: ModelHelper, batch: int) -> None:
        helper.add_input("label", (batch,), INT32)

    task = TrainingTask("tuned", inputs, forward, SGD(0.0), samples, samples, batch_size=4, epochs=1)
    with dagexec.compile(model) as executor:
        softmax = executor.run({"x": samples["x"]})["softmax"]
    expected = -np.log(softmax[range(4), samples["label"].astype(int)]).mean()
    for devices in (["cpu"], ["sim:0", "sim:1"]):
        with Trainer(task, devices=devices) as trainer:
            assert trainer.evaluate()["loss"] == pytest.approx(expected, rel=1e-5)
