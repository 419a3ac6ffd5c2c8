"""ModelHelper and brew of dagexec.caffe2: parameters, their names, scopes, and what layers add."""

from __future__ import annotations

import numpy as np
import pytest

from dagexec.caffe2 import brew, core, workspace
from dagexec.caffe2.cnn import CNNModelHelper
from dagexec.caffe2.model_helper import ExtractPredictorNet, ModelHelper
from dagexec.caffe2.modeling.initializers import ExternalInitializer, Initializer
from dagexec.caffe2.modeling.parameter_sharing import ParameterSharing


def shapes(model: ModelHelper) -> dict[str, tuple[int, ...]]:
    workspace.RunNetOnce(model.param_init_net)
    return {str(param): workspace.FetchBlob(param).shape for param in model.GetAllParams("")}


@pytest.mark.parametrize(("order", "shape"), [("NCHW", (6, 2, 3, 3)), ("NHWC", (6, 3, 3, 2))])
def test_layers_have_the_parameters_that_caffe2_gives_them(order: str, shape: tuple[int, ...]) -> None:
    model = ModelHelper("layers", arg_scope={"order": order})
    x = brew.conv(model, "data", "conv", 4, 6, 3, group=2, pad=1)
    x = brew.spatial_bn(model, x, "bn", 6)
    x = brew.prelu(model, x, "prelu", 6)
    x = brew.conv_transpose(model, x, "up", 6, 5, 2, stride=2)
    brew.fc(model, x, "fc", 20, 3)
    up = (6, 5, 2, 2) if order == "NCHW" else (6, 2, 2, 5)
    assert shapes(model) == {
        "conv_w": shape, "conv_b": (6,), "bn_s": (6,), "bn_b": (6,), "prelu_slope": (6,), "up_w": up, "up_b": (5,),
        "fc_w": (3, 20), "fc_b": (3,), "bn_rm": (6,), "bn_riv": (6,),
    }  # fmt: skip
    assert [str(blob) for blob in model.weights] == ["conv_w", "bn_s", "up_w", "fc_w"]
    assert [str(blob) for blob in model.biases] == ["conv_b", "bn_b", "up_b", "fc_b"]
    assert model.computed_params == ["bn_rm", "bn_riv"]
    norm = model.Proto().op[1]
    assert list(norm.output) == ["bn", "bn_rm", "bn_riv", "bn_sm", "bn_siv"]
    assert workspace.FetchBlob("bn_riv").tolist() == [1] * 6


def test_other_layers_run() -> None:
    """Of each the blobs beside the result have Caffe2's names."""
    model = ModelHelper("others")
    image = brew.lrn(model, "image", "lrn", size=3, alpha=1e-4, beta=0.75)
    image = brew.instance_norm(model, image, "in", 4)
    image = brew.group_conv(model, image, "group", 4, 4, [1, 1], group=2, no_bias=True)
    image = brew.average_pool(model, image, "average", kernel=2, stride=2)
    image = brew.max_pool(model, image, "max", kernel=2, stride=1)
    both = brew.concat(model, [image, brew.tanh(model, image, "tanh")], "both")
    brew.sum(model, [both, brew.depth_concat(model, [image, image], "depth")], "sum")
    brew.dropout(model, brew.transpose(model, both, "nhwc", axes=[0, 2, 3, 1]), "dropped", ratio=0.5)
    brew.dropout(model, both, "kept", is_test=True)
    workspace.RunNetOnce(model.param_init_net)
    workspace.FeedBlob("image", np.random.default_rng(0).random((2, 4, 8, 8), np.float32))
    workspace.RunNetOnce(model.net)
    assert workspace.FetchBlob("both").shape == (2, 8, 3, 3)
    assert workspace.FetchBlob("_both_concat_dims").tolist() == [4, 4]
    assert workspace.FetchBlob("_lrn_scale").shape == (2, 4, 8, 8)
    assert workspace.FetchBlob("_dropped_mask").shape == workspace.FetchBlob("dropped").shape == (2, 3, 3, 8)
    assert not workspace.HasBlob("group_b")


def test_scopes_give_arguments_and_the_innermost_wins() -> None:
    model = ModelHelper("scoped")
    with brew.arg_scope(["fc", "conv"], weight_init=("ConstantFill", {"value": 2.0})):
        brew.fc(model, "x", "a", 2, 2)
        with brew.arg_scope("fc", weight_init=("ConstantFill", {"value": 3.0})):
            brew.fc(model, "x", "b", 2, 2)
            brew.fc(model, "x", "c", 2, 2, WeightInitializer=Initializer, weight_init=("ConstantFill", {"value": 4.0}))
    brew.fc(model, "x", "d", 2, 2, BiasInitializer=Initializer("ConstantFill", value=5.0))
    workspace.RunNetOnce(model.param_init_net)
    assert [workspace.FetchBlob(f"{name}_w")[0, 0] for name in "abc"] == [2, 3, 4]
    assert workspace.FetchBlob("d_b").tolist() == [5, 5]
    with pytest.raises(ValueError, match="nothing"), brew.arg_scope(["nothing"]):
        pass
    with pytest.raises(ValueError, match="ConstantFill"):
        brew.fc(model, "x", "e", 2, 2, weight_init=("XavierFill", {}), WeightInitializer=Initializer("ConstantFill"))


def test_a_layer_of_ones_own_is_registered() -> None:
    def twice(model: ModelHelper, blob_in: str, blob_out: str, order: str) -> str:
        return f"{model.name} {blob_in} {blob_out} {order}"

    brew.Register(twice)
    assert brew.has_helper("twice")
    assert brew.twice(ModelHelper("own"), "a", "b") == "own a b NCHW"
    with pytest.raises(ValueError, match="twice"):
        brew.Register(twice)


def test_parameters_are_in_name_scopes_and_are_shared_by_name() -> None:
    model = ModelHelper("names")
    with core.NameScope("left"):
        y = brew.fc(model, "x", "y", 2, 3)
        assert (y, model.GetParams()) == ("left/y", ["left/y_w", "left/y_b"])
        brew.fc(model, "z", core.BlobReference("left/y"), 2, 3)
        with pytest.raises(ValueError, match="left/y_w"):
            brew.fc(model, "z", "y", 2, 4)
    assert (len(model.params), len(model.param_init_net.Proto().op)) == (2, 2)
    assert model.GetParams(top_scope=True) == []
    test = ModelHelper("test", param_model=model, init_params=False)
    assert test.params == model.params
    lazy = ModelHelper("lazy", init_params=False)
    lazy.create_param("w", [2], Initializer("ConstantFill"))
    lazy.create_param("v", [2], ExternalInitializer())
    assert (lazy.params, len(lazy.InitProto().op)) == (["w", "v"], 0)


def test_gradients_of_parameters_are_blobs_of_their_own_and_decay_is_added() -> None:
    """Both inputs of Sum have the gradient of its output; decay must not reach the bias by way of the weight."""
    model = ModelHelper("decay")
    w = model.create_param("w", [2], Initializer("ConstantFill", value=3.0), tags="WEIGHT")
    b = model.create_param("b", [2], Initializer("ConstantFill", value=1.0), tags="BIAS")
    loss = model.SumElements(model.Sum([w, b], "y"), "loss")
    model.AddGradientOperators([loss])
    assert len({str(gradient) for gradient in model.param_to_grad.values()}) == 2
    brew.add_weight_decay(model, 0.5)
    workspace.RunNetOnce(model.param_init_net)
    workspace.RunNetOnce(model.net)
    gradients = {str(info.blob): workspace.FetchBlob(info.grad).tolist() for info in model.GetOptimizationParamInfo()}
    assert gradients == {"w": [2.5, 2.5], "b": [1, 1]}
    with pytest.raises(RuntimeError, match="once"):
        model.AddGradientOperators([loss])


def test_a_counter_counts_runs() -> None:
    model = ModelHelper("counter")
    brew.iter(model, "steps")
    workspace.RunNetOnce(model.param_init_net)
    workspace.CreateNet(model.net)
    workspace.RunNet(model.net, 3)
    assert workspace.FetchBlob("steps").tolist() == [3]


def test_the_part_of_a_net_that_predicts_is_cut_out() -> None:
    model = ModelHelper("cut")
    softmax = brew.softmax(model, brew.fc(model, "x", "y", 2, 2), "softmax")
    model.AveragedLoss(model.LabelCrossEntropy([softmax, "label"], "xent"), "loss")
    net, needed = ExtractPredictorNet(model.net.Proto(), ["x"], [softmax])
    assert ([operator.type for operator in net.Proto().op], needed) == (["FC", "Softmax"], ["y_b", "y_w"])
    assert list(net.Proto().external_output) == ["softmax"]


def test_layer_normalization_has_a_scale_and_a_bias() -> None:
    model = ModelHelper("normalized")
    y, mean, std = brew.layer_norm(model, "x", "y", 3, epsilon=1e-3, initial_scale=2.0, initial_bias=0.5)
    assert shapes(model) == {"y_scale": (3,), "y_bias": (3,)}
    x = np.array([[1, 2, 6], [0, -1, 4]], np.float32)
    workspace.FeedBlob("x", x)
    workspace.RunNetOnce(model.net)
    deviation = np.sqrt(x.var(1, keepdims=True, dtype=float) + 1e-3)
    np.testing.assert_allclose(
        workspace.FetchBlob(y), 2 * (x - x.mean(1, keepdims=True)) / deviation + 0.5, rtol=1e-5, atol=1e-6
    )
    np.testing.assert_allclose(workspace.FetchBlob(mean), x.mean(1, keepdims=True), rtol=1e-6)
    np.testing.assert_allclose(workspace.FetchBlob(std), deviation, rtol=1e-5)


def test_scopes_share_parameters() -> None:
    model = ModelHelper("shared")
    with ParameterSharing({"right": "left", "a/one": "left"}):
        for name in ("left", "right"):
            with core.NameScope(name):
                brew.fc(model, "x", "y", 3, 2)
        with core.NameScope("a"), core.NameScope("one"):
            brew.fc(model, "x", "y", 3, 2)
    with core.NameScope("right"):
        brew.fc(model, "x", "y", 3, 2)
    inputs = [list(map(str, operator.input[1:])) for operator in model.Proto().op]
    assert inputs == [["left/y_w", "left/y_b"]] * 3 + [["right/y_w", "right/y_b"]]
    assert set(shapes(model)) == {"left/y_w", "left/y_b", "right/y_w", "right/y_b"}


def test_a_cnn_model_helper_has_layers_as_methods() -> None:
    model = CNNModelHelper("NHWC", "cnn", init_params=True)
    conv = model.Conv("data", "conv", 3, 4, 3, weight_init=model.XavierInit, bias_init=model.ConstantInit(0.5))
    pool = model.MaxPool(model.Relu(conv, conv), "pool", kernel=2, stride=2)
    fc = model.FC(pool, "fc", 4 * 2 * 2, 2)
    model.Accuracy([model.Softmax(fc, "softmax"), "label"], "accuracy")
    assert shapes(model) == {"conv_w": (4, 3, 3, 3), "conv_b": (4,), "fc_w": (2, 16), "fc_b": (2,)}
    assert workspace.FetchBlob("conv_b").tolist() == [0.5] * 4
    assert [operator.engine for operator in model.Proto().op[:3]] == ["CUDNN", "", "CUDNN"]
    workspace.FeedBlob("data", np.zeros((2, 6, 6, 3), np.float32))
    workspace.FeedBlob("label", np.array([0, 1], np.int32))
    workspace.RunNetOnce(model.net)
    assert workspace.FetchBlob("pool").tolist() == np.full((2, 2, 2, 4), 0.5).tolist()
    assert (model.CPU.device_type, model.GPU(2).device_id) == (0, 2)
    with pytest.raises(ValueError, match="order"):
        CNNModelHelper("HWCN")
