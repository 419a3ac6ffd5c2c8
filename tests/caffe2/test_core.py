"""Nets of dagexec.caffe2: what calls of their methods add, names, copies and gradients."""

from __future__ import annotations

import numpy as np
import pytest

from dagexec.caffe2 import core, workspace
from dagexec.caffe2.proto import caffe2_pb2
from dagexec.errors import ArgumentError, GradientError


def test_a_method_adds_an_operator_and_returns_the_reference_of_its_output() -> None:
    net = core.Net("methods")
    x = net.AddExternalInput("x")
    y = net.FC([x, "w", "b"], ["y"], axis=2)
    assert (y, str(y), y.Net()) == ("y", "y", net)
    [operator] = net.Proto().op
    assert (operator.type, list(operator.input), list(operator.output)) == ("FC", ["x", "w", "b"], ["y"])
    assert [(argument.name, argument.i) for argument in operator.arg] == [("axis", 2)]
    assert list(net.Proto().external_input) == ["x", "w", "b"]


def test_outputs_without_names_get_those_of_net_and_type() -> None:
    net = core.Net("auto")
    name = net.Name()
    assert [str(net.Relu("x")) for _ in range(3)] == [f"{name}/Relu", f"{name}/Relu_2", f"{name}/Relu_3"]
    assert [str(blob) for blob in net.Split("x", 2)] == [f"{name}/Split:0", f"{name}/Split:1"]
    assert [str(blob) for blob in net.Split("x", 2)] == [f"{name}/Split_2:0", f"{name}/Split_2:1"]
    assert str(net.Sigmoid("x", 1)) == f"{name}/Sigmoid:0"
    assert str(net.Const(1.0)) == f"{name}/GivenTensorFill:0"
    assert net.Print("x", []) is None
    assert [str(net.NextBlob("b")) for _ in range(3)] == ["b", "b_auto_0", "b_auto_1"]


def test_names_of_nets_are_unique() -> None:
    first, second = core.Net("unique"), core.Net("unique")
    assert second.Name() == f"{first.Name()}_1"
    assert core.Net(first.Proto()).Name() == f"{first.Name()}_2"


@pytest.mark.slow  # all modules of operators are imported
def test_an_unknown_operator_is_refused_with_close_names() -> None:
    with pytest.raises(AttributeError, match="did you mean Softmax"):
        _ = core.Net("unknown").Softmx
    assert core.IsOperator("Softmax")
    assert not core.IsOperator("Softmx")
    assert "Softmax" in core.RegisteredOperators()
    assert core.IsOperatorWithEngine("Softmax", "")
    assert not core.IsOperatorWithEngine("Softmax", "NOBODY")


def test_a_reference_adds_operators_to_its_net() -> None:
    net = core.Net("sugar")
    y = net.AddExternalInput("x").FC(["w", "b"], "y").Relu([], "z")
    assert (y, [list(operator.input) for operator in net.Proto().op]) == ("z", [["x", "w", "b"], ["y"]])
    with pytest.raises(AttributeError, match="no operator"):
        _ = core.BlobReference("alone").Relu
    with pytest.raises(AttributeError, match="neither"):
        _ = y.shape


def test_a_reference_is_its_name() -> None:
    blob = core.BlobReference("a/b", None)
    assert blob == "a/b"
    assert {blob: 1}["a/b"] == 1
    assert (str(blob + "_w"), str("c/" + blob)) == ("a/b_w", "c/a/b")
    assert (blob.GetNameScope(), blob.GetUnscopedName()) == ("a/", "b")
    assert blob != core.BlobReference("b")


def test_names_given_as_text_are_in_the_name_scope_and_references_are_not() -> None:
    net = core.Net("scopes")
    outside = net.AddExternalInput("x")
    with core.NameScope("a"):
        with core.NameScope("b"):
            net.Sum([outside, "x"], "y")
            assert core.ScopedName("z") == "a/b/z"
            with core.NameScope("c", reset=True):
                assert core.CurrentNameScope() == "c/"
        assert net.NextScopedBlob("n") == "a/n"
    assert core.CurrentNameScope() == ""
    [operator] = net.Proto().op
    assert (list(operator.input), list(operator.output)) == (["x", "a/b/x"], ["a/b/y"])


def test_operators_are_on_the_device_of_the_scope() -> None:
    option = core.DeviceOption(caffe2_pb2.CUDA, 1)
    net = core.Net("devices")
    with core.DeviceScope(option):
        net.Relu("x", "y")
        net.Relu("x", "z", device_option=core.DeviceOption(caffe2_pb2.CPU))
        with core.EmptyDeviceScope():
            net.Relu("x", "u")
    net.GaussianFill([], "f", shape=[1], random_seed=7)
    found = [(operator.device_option.device_type, operator.device_option.device_id) for operator in net.Proto().op]
    assert found == [(1, 1), (0, 0), (0, 0), (0, 0)]
    assert not net.Proto().op[2].HasField("device_option")
    assert net.Proto().op[3].device_option.random_seed == 7
    net.RunAllOnGPU(2)
    assert core.device_option_equal(net.Proto().device_option, core.DeviceOption(caffe2_pb2.CUDA, 2))
    assert core.IsGPUDeviceType(caffe2_pb2.CUDA)


def test_arguments_have_the_kinds_of_their_values() -> None:
    made = core.CreateOperator(
        "Any", "x", ["y"], name="n", engine="E", control_input=["c"], arg={"a": np.float32(0.5)},
        b=True, c=[1, 2], d="text", e=np.array([1.5, 2.5]), f=core.Net("argument").Proto(),
        g=core.BlobReference("blob"),
    )  # fmt: skip
    found = {argument.name: argument for argument in made.arg}
    assert (found["a"].f, found["b"].i, list(found["c"].ints), found["d"].s) == (0.5, 1, [1, 2], b"text")
    assert (list(found["e"].floats), found["f"].n.type, found["g"].s) == ([1.5, 2.5], "simple", b"blob")
    assert (made.name, made.engine, list(made.control_input)) == ("n", "E", ["c"])
    with pytest.raises(ArgumentError):
        core.CreateOperator("Any", [], [], bad=object())
    with pytest.raises(TypeError):
        core.CreateOperator("Any", [3], [])


def test_external_inputs_and_outputs() -> None:
    net = core.Net("external")
    a, b = net.AddExternalInput("a", "b")
    with pytest.raises(ValueError, match="'a'"):
        net.AddExternalInput("a")
    c = net.Sum([a, b], "c")
    net.AddExternalOutput(c)
    with pytest.raises(ValueError, match="'nothing'"):
        net.AddExternalOutput("nothing")
    assert (net.external_inputs, net.external_outputs) == (["a", "b"], ["c"])
    assert net.UsedBlobNames() == {"a", "b", "c"}
    assert (net.is_external_input("a"), net.is_external_input("c")) == (True, False)
    assert net.GetBlobRef("c").Net() is net
    with pytest.raises(ValueError, match="'nothing'"):
        net.GetBlobRef("nothing")


def test_a_clone_has_other_names_and_only_the_operators_asked_for() -> None:
    net = core.Net("cloned")
    net.Relu("x", "y")
    net.Relu("y", "z")
    net.AddExternalOutput("z")
    clone = net.Clone("clone", blob_remap={"x": "u", "z": "w"}, op_id_mask=[0])
    assert [(list(op.input), list(op.output)) for op in clone.Proto().op] == [(["u"], ["y"])]
    assert (list(clone.Proto().external_input), list(clone.Proto().external_output)) == (["u"], ["w"])
    assert len(net.Proto().op) == 2
    part, blobs = net.ClonePartial("part", {"y": "in"}, ["z"])
    assert [(list(op.input), list(op.output)) for op in part.Proto().op] == [(["in"], ["z"])]
    assert (list(part.Proto().external_input), blobs["y"], blobs["z"]) == (["in"], "in", "z")
    computed = core.Net("computed")
    computed.extend_ops([core.CreateOperator("Relu", "x", "y")])
    with pytest.raises(ValueError, match="'x'"):
        computed.ClonePartial("part", [], ["y"])


def test_an_appended_net_brings_its_inputs_and_outputs() -> None:
    first, second = core.Net("one"), core.Net("two")
    first.Relu("x", "y")
    second.Sum(["y", "v"], "z")
    second.AddExternalOutput("z")
    second.add_attribute("notes", 1)
    assert first.AppendNet(second, core.DeviceOption(caffe2_pb2.CUDA)) is first
    assert (list(first.Proto().external_input), first.external_outputs) == (["x", "v"], ["z"])
    assert [operator.device_option.device_type for operator in first.Proto().op] == [0, 1]
    assert second.Proto().op[0].device_option.device_type == 0
    assert (first.get_attributes("notes"), first.BlobIsDefined("z")) == ([1], True)


def test_gradients_are_those_of_the_formula() -> None:
    """Of sum((x w)^2), whose gradient by w is 2 x^2 w."""
    net = core.Net("gradient")
    y = net.Mul(["x", "w"], "y")
    loss = net.SumElements(net.Sqr(y, "squares"), "loss")
    gradients = net.AddGradientOperators([loss])
    assert (gradients["w"], gradients[y]) == ("w_grad", "y_grad")
    x, w = np.array([1, -2, 3], np.float32), np.array([0.5, 4, -1], np.float32)
    workspace.FeedBlob("x", x)
    workspace.FeedBlob("w", w)
    workspace.RunNetOnce(net)
    np.testing.assert_allclose(workspace.FetchBlob(gradients["w"]), 2 * x.astype(float) ** 2 * w, rtol=1e-6)


def test_gradients_start_from_blobs_that_are_given_and_skip_operators() -> None:
    net = core.Net("started")
    net.Relu("u", "x")
    y = net.Scale("x", "y", scale=3.0)
    gradients = net.AddGradientOperators({y: "dy"}, skip=1)
    assert "u" not in gradients
    assert "dy" in net.Proto().external_input
    workspace.FeedBlob("u", np.array([1, 2], np.float32))
    workspace.FeedBlob("dy", np.array([5, 7], np.float32))
    workspace.RunNetOnce(net)
    assert workspace.FetchBlob(gradients["x"]).tolist() == [15, 21]


def test_a_gradient_of_rows_is_a_slice_and_one_that_is_missing_an_error() -> None:
    net = core.Net("rows")
    loss = net.SumElements(net.Gather(["table", "rows"], "found"), "loss")
    slices = net.AddGradientOperators([loss])["table"]
    assert isinstance(slices, core.GradientSlice)
    workspace.FeedBlob("table", np.zeros((4, 2), np.float32))
    workspace.FeedBlob("rows", np.array([2, 0], np.int32))
    workspace.RunNetOnce(net)
    assert [blob.tolist() for blob in workspace.FetchBlobs(slices)] == [[2, 0], [[1, 1], [1, 1]]]
    with pytest.raises(GradientError, match="not the output"):
        core.Net("nothing").AddGradientOperators(["loss"])


def test_the_gradient_of_one_operator() -> None:
    operator = core.CreateOperator("Relu", "x", "y")
    [made], [of_x] = core.GradientRegistry.GetGradientForOp(operator, ["dy"])
    assert (made.type, list(made.input), of_x) == ("ReluGradient", ["y", "dy"], "x_grad")


def test_the_gradients_of_a_list_of_operators() -> None:
    operators = [core.CreateOperator("Sqr", "x", "y"), core.CreateOperator("SumElements", "y", "loss")]
    made, gradients = core.GradientRegistry.GetBackwardPass(operators, {"loss": "d"})
    assert set(gradients) == {"x", "y", "loss"}
    workspace.FeedBlob("x", np.array([1, -3], np.float32))
    workspace.FeedBlob("d", np.array(0.5, np.float32))
    workspace.RunOperatorsOnce([*operators, *made])
    assert workspace.FetchBlob(gradients["x"]).tolist() == [1, -3]


def test_random_seeds() -> None:
    net = core.Net("seeded")
    net.GaussianFill([], "x", shape=[4])
    net.GaussianFill([], "y", shape=[4])
    net.set_rand_seed(5)
    assert [operator.device_option.random_seed for operator in net.Proto().op] == [5, 6]
    workspace.RunNetOnce(net)
    first = workspace.FetchBlob("x")
    workspace.RunNetOnce(net)
    assert first.tobytes() == workspace.FetchBlob("x").tobytes() != workspace.FetchBlob("y").tobytes()
