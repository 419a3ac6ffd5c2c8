"""Trained nets as files of Caffe2's predictors, as pairs for mobile devices, and as ONNX models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
import pytest

import dagexec
from dagexec.caffe2 import brew, core, workspace
from dagexec.caffe2.model_helper import ModelHelper
from dagexec.caffe2.onnx import backend, frontend
from dagexec.caffe2.predictor import mobile_exporter
from dagexec.caffe2.predictor import predictor_exporter as pe

X = np.random.default_rng(6).standard_normal((2, 1, 4, 4)).astype(np.float32)


def model() -> ModelHelper:
    """A small network, whose parameters the workspace has."""
    made = ModelHelper("net", arg_scope={"order": "NCHW"})
    conv = brew.conv(made, "data", "conv", 1, 2, 3)
    pred = brew.fc(made, brew.relu(made, conv, conv), "pred", 2 * 2 * 2, 3)
    made.net.AddExternalOutput(brew.softmax(made, pred, "softmax"))
    workspace.RunNetOnce(made.param_init_net)
    return made


def expected() -> npt.NDArray[Any]:
    """The softmax of X, in float64."""
    w, b, pred_w, pred_b = (
        workspace.FetchBlob(name).astype(float) for name in ("conv_w", "conv_b", "pred_w", "pred_b")
    )
    windows = np.lib.stride_tricks.sliding_window_view(X[:, 0], (3, 3), (1, 2))
    conv = np.maximum(np.einsum("nijkl,okl->noij", windows, w[:, 0]) + b[:, None, None], 0)
    powers = np.exp(conv.reshape(2, -1) @ pred_w.T + pred_b)
    return np.asarray(powers / powers.sum(1, keepdims=True))


@pytest.mark.parametrize("db_type", ["minidb", "lmdb"])
def test_a_saved_net_is_prepared_again_and_compiled(db_type: str, tmp_path: Path) -> None:
    made, path = model(), str(tmp_path / "model.minidb")
    result = expected()
    shift = core.Net("shift")
    shift.ConstantFill([], "extra", shape=[1], value=3.0)
    meta = pe.PredictorExportMeta(
        made.net.Proto(), [str(param) for param in made.params], ["data"], ["softmax"], {"data": [2, 1, 4, 4]},
        extra_init_net=shift,
    )  # fmt: skip
    pe.save_to_db(db_type, path, meta)
    workspace.ResetWorkspace()
    net = pe.prepare_prediction_net(path, db_type)
    assert workspace.FetchBlob("data").shape == X.shape
    assert workspace.FetchBlob("extra") == 3
    workspace.FeedBlob("data", X)
    workspace.RunNet(net.Proto().name)
    np.testing.assert_allclose(workspace.FetchBlob("softmax"), result, rtol=1e-5)
    if db_type == "minidb":
        with dagexec.compile(path) as executor:
            np.testing.assert_allclose(executor.run({"data": X})["softmax"], result, rtol=1e-5)
    gpu = pe.load_from_db(path, db_type, core.DeviceOption(1, 0))
    assert {operator.device_option.device_type for entry in gpu.nets for operator in entry.value.op} == {1}


def test_what_cannot_be_saved_is_refused(tmp_path: Path) -> None:
    made = model()
    for inputs, outputs in ((["data", "conv_w"], ["softmax"]), (["data"], ["softmax", "softmax"])):
        with pytest.raises(RuntimeError, match="named twice"):
            pe.PredictorExportMeta(made.net, made.params, inputs, outputs)
    meta = pe.PredictorExportMeta(made.net, made.params, ["data"], ["softmax"])
    (tmp_path / "file").touch()
    with pytest.raises(RuntimeError, match="save_to_db"):
        pe.save_to_db("minidb", str(tmp_path / "file" / "inside"), meta)
    workspace.FeedBlob("conv_b", "text")
    with pytest.raises(RuntimeError, match="'conv_b'"):
        pe.save_to_db("minidb", str(tmp_path / "other"), meta)
    with pytest.raises(RuntimeError, match="CreateDB"):
        pe.prepare_prediction_net(str(tmp_path / "nowhere"), "minidb")


def test_a_pair_for_mobile_devices_is_run_by_a_predictor(tmp_path: Path) -> None:
    made = model()
    init, predict = mobile_exporter.Export(workspace, made.net, made.params)
    assert list(predict.external_input) == ["data", *map(str, made.params)]
    assert list(predict.external_output) == ["softmax"]
    (tmp_path / "init_net.pb").write_bytes(init.SerializeToString())
    (tmp_path / "predict_net.pb").write_bytes(predict.SerializeToString())
    result = expected()
    predictor = workspace.Predictor(init.SerializeToString(), predict.SerializeToString())
    np.testing.assert_allclose(predictor.run([X])[0], result, rtol=1e-5)
    with dagexec.compile(tmp_path) as executor:
        np.testing.assert_allclose(executor.run({"data": X})["softmax"], result, rtol=1e-5)


def test_tensors_of_all_types_are_exported() -> None:
    net = core.Net("types")
    arrays = {
        "a": np.array([1.5], np.float32), "b": np.array([[1, 2]], np.int32), "c": np.array([3]),
        "d": np.arange(6, dtype=np.uint8).reshape(2, 3), "e": np.array([True, False]), "f": np.array([0.5]),
        "g": np.array([b"x", b"yz"], object),
    }  # fmt: skip
    for name, array in arrays.items():
        workspace.FeedBlob(name, array)
        net.Copy(name, f"{name}_copy")
    init, _ = mobile_exporter.Export(workspace, net, list(arrays))
    workspace.ResetWorkspace()
    workspace.RunNetOnce(init)
    for name, array in arrays.items():
        found = workspace.FetchBlob(name)
        assert (found.dtype, found.tolist()) == (array.dtype, array.tolist())
    workspace.FeedBlob("a", np.zeros(1, np.float16))
    with pytest.raises(RuntimeError, match="float16"):
        mobile_exporter.Export(workspace, net, ["a"])


def test_a_net_is_an_onnx_model_and_comes_back() -> None:
    made = model()
    result = expected()
    init, predict = mobile_exporter.Export(workspace, made.net, made.params)
    converted = frontend.caffe2_net_to_onnx_model(predict, init, {"data": (onnx.TensorProto.FLOAT, (2, 1, 4, 4))})
    onnx.checker.check_model(converted)
    session = onnxruntime.InferenceSession(converted.SerializeToString(), providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(session.run(None, {"data": X})[0], result, rtol=1e-5)
    prepared = backend.prepare(converted)
    with prepared.executor:
        np.testing.assert_allclose(prepared.run([X])[0], result, rtol=1e-5)
    workspace.ResetWorkspace()
    init, predict = backend.Caffe2Backend.onnx_graph_to_caffe2_net(converted)
    workspace.FeedBlob("data", X)
    workspace.RunNetOnce(init)
    workspace.RunNetOnce(predict)
    np.testing.assert_allclose(workspace.FetchBlob("softmax"), result, rtol=1e-5)


def test_what_onnx_does_not_have_is_named() -> None:
    net = core.Net("unknown")
    net.BatchBucketOneHot(["x", "lengths", "boundaries"], "y")
    with pytest.raises(RuntimeError, match="BatchBucketOneHot"):
        frontend.caffe2_net_to_onnx_model(net.Proto())
    with pytest.raises(RuntimeError, match=r"Caffe2Backend\.prepare"):
        backend.prepare(onnx.ModelProto())
