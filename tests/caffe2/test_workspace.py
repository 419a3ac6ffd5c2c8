"""Workspaces of dagexec.caffe2: blobs, nets and errors as Caffe2's scripts expect them."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import numpy as np
import pytest

from dagexec.caffe2 import core, dyndep, net_printer, utils, workspace
from dagexec.caffe2.proto import caffe2_pb2


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int8", "int32", "int64", "uint8", "bool"])
def test_arrays_keep_types_and_shapes(dtype: str) -> None:
    for array in (np.arange(6).reshape(2, 3).astype(dtype), np.array(1, dtype)):
        assert workspace.FeedBlob("x", array)
        fetched = workspace.FetchBlob("x")
        assert (fetched.dtype, fetched.shape, fetched.tobytes()) == (array.dtype, array.shape, array.tobytes())
    fetched[...] = 0
    assert workspace.FetchBlob("x") == 1


def test_strings_and_messages() -> None:
    workspace.FeedBlob("s", "text")
    assert workspace.FetchBlob("s") == b"text"
    workspace.FeedBlob("s", np.array([[1.5]], np.float32))
    assert workspace.FetchBlob("s").tolist() == [[1.5]]
    workspace.FeedBlob("names", np.array(["a", "bc"]))
    assert workspace.FetchBlob("names").tolist() == [b"a", b"bc"]
    workspace.FeedBlob("t", utils.NumpyArrayToCaffe2Tensor(np.array([3, 4], np.int32), "t"))
    assert [blob.tolist() for blob in workspace.FetchBlobs(["t"])] == [[3, 4]]


@pytest.mark.parametrize("value", [[1, 2], 3, 0.5])
def test_numbers_and_lists_are_refused(value: object) -> None:
    with pytest.raises(RuntimeError, match="expected an array"):
        workspace.FeedBlob("x", value)


def test_blobs_come_and_go() -> None:
    workspace.FeedBlob("b", np.zeros(1))
    workspace.CreateBlob("a")
    assert workspace.Blobs() == ["a", "b"]
    assert workspace.FetchBlob("a") == b"a, a C++ native class of type nullptr (uninitialized)."
    workspace.RemoveBlob("b")
    assert (workspace.HasBlob("a"), workspace.HasBlob("b")) == (True, False)
    for call in (workspace.FetchBlob, workspace.RemoveBlob):
        with pytest.raises(RuntimeError, match="'b'"):
            call("b")


def test_workspaces_have_their_own_blobs() -> None:
    workspace.FeedBlob("x", np.zeros(1))
    with pytest.raises(RuntimeError, match="'other'"):
        workspace.SwitchWorkspace("other")
    workspace.SwitchWorkspace("other", True)
    assert (workspace.CurrentWorkspace(), workspace.Blobs()) == ("other", [])
    with workspace.WorkspaceGuard("default"):
        assert workspace.Blobs() == ["x"]
    assert workspace.CurrentWorkspace() == "other"
    assert {"default", "other"} <= set(workspace.Workspaces())


def test_a_reset_drops_blobs_and_nets(tmp_path: Path) -> None:
    net = core.Net("reset")
    net.ConstantFill([], "x", shape=[1], value=2.0)
    workspace.CreateNet(net)
    workspace.RunNet(net)
    assert workspace.ResetWorkspace(str(tmp_path))
    assert (workspace.Blobs(), workspace.RootFolder()) == ([], str(tmp_path))
    with pytest.raises(RuntimeError, match="does not exist"):
        workspace.RunNet(net)
    workspace.CreateNet(net)


def test_a_reset_ends_the_threads_of_nets() -> None:
    before = set(threading.enumerate())
    net = core.Net("threads")
    net.Proto().type, net.Proto().num_workers = "dag", 2
    net.Sum([net.ConstantFill([], "x", shape=[1]), net.ConstantFill([], "y", shape=[1])], "z")
    workspace.CreateNet(net)
    workspace.RunNet(net)
    assert set(threading.enumerate()) - before
    workspace.ResetWorkspace()
    assert not set(threading.enumerate()) - before


def test_a_net_runs_as_often_as_asked() -> None:
    net = core.Net("counting")
    net.Add(["n", "step"], "n")
    with pytest.raises(RuntimeError, match="CreateNet"):
        workspace.CreateNet(net)
    workspace.CreateNet(net, input_blobs=["n", "step"])
    with pytest.raises(RuntimeError, match="already exists"):
        workspace.CreateNet(net)
    workspace.FeedBlob("n", np.zeros(1, np.float32))
    workspace.FeedBlob("step", np.array([2], np.float32))
    assert workspace.RunNet(net.Name(), 3)
    assert workspace.RunNet(net.Proto())
    assert workspace.FetchBlob("n").tolist() == [8]
    assert workspace.CreateNet(net, overwrite=True)


def test_shapes_and_types_are_told_before_a_run() -> None:
    first, second = core.Net("first"), core.Net("second")
    first.FC(["x", "w", "b"], "y")
    second.Cast("y", "z", to=core.DataType.INT32)
    second.extend_ops([core.CreateOperator("Unique", "z", "u")])
    shapes, types = workspace.InferShapesAndTypes([first, second], {"x": [4, 3], "w": [2, 3], "b": [2]})
    assert (shapes["y"], shapes["z"], types["y"], types["z"]) == ([4, 2], [4, 2], 1, 2)
    assert "u" not in shapes
    workspace.FeedBlob("x", np.zeros((5, 3)))
    workspace.FeedBlob("w", np.zeros((2, 3)))
    workspace.FeedBlob("b", np.zeros(2))
    shapes, types = workspace.InferShapesAndTypes([first])
    assert (shapes["y"], types["y"]) == ([5, 2], core.DataType.DOUBLE)
    with pytest.raises(RuntimeError, match="InferShapesAndTypes"):
        workspace.InferShapesAndTypes([first], {"x": [4, 5], "w": [2, 3], "b": [2]})


def test_a_failure_is_a_runtime_error_or_false() -> None:
    net = core.Net("failing")
    net.Add(["a", "b"], "c")
    workspace.FeedBlob("a", np.zeros((2, 3), np.float32))
    workspace.FeedBlob("b", np.zeros((4,), np.float32))
    workspace.CreateNet(net)
    assert not workspace.RunNet(net, allow_fail=True)
    with pytest.raises(RuntimeError, match=f"Error running net {net.Name()}"):
        workspace.RunNet(net)
    with pytest.raises(RuntimeError, match=f"Error running net {net.Name()}"):
        workspace.RunNetOnce(net)
    with pytest.raises(RuntimeError, match="operator Add"):
        workspace.RunOperatorOnce(net.Proto().op[0])


def test_operators_run_alone() -> None:
    fill = core.CreateOperator("ConstantFill", [], "x", shape=[2], value=-1.0)
    assert workspace.RunOperatorsOnce([fill, core.CreateOperator("Abs", "x", "y").SerializeToString()])
    assert workspace.FetchBlob("y").tolist() == [1, 1]


@pytest.mark.parametrize(
    "kind", ["", "simple", "dag", "prof_dag", "async_dag", "async_scheduling", "async_simple", "rnn"]
)
def test_net_types_give_the_same(kind: str) -> None:
    net = core.Net("typed")
    net.Proto().type, net.Proto().num_workers = kind, 2
    net.Sum([net.Relu("x", "a"), net.Abs("x", "b")], "y")
    workspace.FeedBlob("x", np.array([-1, 2], np.float32))
    workspace.CreateNet(net)
    workspace.RunNet(net)
    assert workspace.FetchBlob("y").tolist() == [1, 4]
    workspace.RunNetOnce(net)


def test_a_net_type_is_mapped_with_a_word_and_an_unknown_one_refused(caplog: pytest.LogCaptureFixture) -> None:
    net = core.Net("mapped")
    net.Proto().type = "async_polling"
    with caplog.at_level(logging.WARNING, "dagexec"):
        workspace.RunNetOnce(net)
        workspace.RunNetOnce(net)
    assert [record.getMessage() for record in caplog.records] == [
        f"net '{net.Name()}': a net of type 'async_polling' runs as 'async_dag', with the same results"
    ]
    net.Proto().type = "singlethread_async"
    with pytest.raises(RuntimeError, match="'singlethread_async' is unknown"):
        workspace.CreateNet(net)


def test_a_predictor_runs_a_pair_of_nets() -> None:
    init, predict = core.Net("init"), core.Net("predict")
    init.GivenTensorFill([], "w", shape=[2, 3], values=[1.0, 2, 3, 4, 5, 6])
    init.GivenTensorFill([], "b", shape=[2], values=[0.5, -0.5])
    x = predict.AddExternalInput("x")
    y = predict.FC([x, "w", "b"], "y")
    predict.AddExternalOutput(predict.Softmax(y, "z"), y)
    predictor = workspace.Predictor(init.Proto().SerializeToString(), predict.Proto().SerializeToString())
    x64 = np.array([[1, 0, -1], [0.5, 2, 1]])
    expected = x64 @ np.array([[1, 4], [2, 5], [3, 6]]) + [0.5, -0.5]
    for feeds in ([x64.astype(np.float32)], {"x": x64.astype(np.float32)}):
        softmax, dense = predictor.run(feeds)
        np.testing.assert_allclose(dense, expected, rtol=1e-6)
        exponentials = np.exp(expected - expected.max(1, keepdims=True))
        np.testing.assert_allclose(softmax, exponentials / exponentials.sum(1, keepdims=True), rtol=1e-5)
    assert workspace.Blobs() == []
    with pytest.raises(RuntimeError, match="expected 1 inputs"):
        predictor.run([])


@pytest.mark.parametrize("db_type", ["minidb", "lmdb"])
def test_a_database_written_by_a_script_is_read_by_a_net(db_type: str, tmp_path: Path) -> None:
    path = str(tmp_path / "records")
    database = core.C.create_db(db_type, path, core.C.Mode.write)
    transaction = database.new_transaction()
    for index in range(4):
        tensors = caffe2_pb2.TensorProtos()
        values = np.full(2, index, np.float32), np.array(index, np.int32)
        tensors.protos.extend(map(utils.NumpyArrayToCaffe2Tensor, values))
        transaction.put(f"{index:03}", tensors.SerializeToString())
        if index == 1:
            transaction.commit()
    del transaction
    del database
    net = core.Net("reading")
    reader = net.CreateDB([], "reader", db=path, db_type=db_type)
    net.TensorProtosDBInput([reader], ["x", "label"], batch_size=4)
    workspace.RunNetOnce(net)
    assert workspace.FetchBlob("x").tolist() == [[0, 0], [1, 1], [2, 2], [3, 3]]
    assert workspace.FetchBlob("label").tolist() == [0, 1, 2, 3]
    cursor = core.C.create_db(db_type, path, core.C.Mode.read).new_cursor()
    assert (cursor.key(), cursor.valid()) == (b"000", True)
    assert caffe2_pb2.TensorProtos.FromString(cursor.value()).protos[1].int32_data == [0]
    cursor.next()
    assert cursor.key() == b"001"
    with pytest.raises(RuntimeError, match="unknown"):
        core.C.create_db("nothing", path, core.C.Mode.read)


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int64", "uint8", "bool", "float16", "U"])
def test_arrays_become_messages_and_come_back(dtype: str) -> None:
    array = np.arange(6).reshape(3, 2).astype(dtype)
    back = utils.Caffe2TensorToNumpyArray(utils.NumpyArrayToCaffe2Tensor(array))
    assert back.shape == (3, 2)
    expected = np.char.encode(array) if dtype == "U" else array
    assert back.tolist() == expected.tolist()


def test_messages_are_read_as_text_and_binary() -> None:
    net = core.Net("read").Proto()
    assert utils.TryReadProtoWithClass(caffe2_pb2.NetDef, str(net)) == net
    assert utils.TryReadProtoWithClass(caffe2_pb2.NetDef, net.SerializeToString()) == net
    with pytest.raises(RuntimeError, match="NetDef"):
        utils.TryReadProtoWithClass(caffe2_pb2.NetDef, b"\xff\xff")
    made = [utils.MakeArgument("a", [1.5]), utils.MakeArgument("b", "text"), utils.MakeArgument("c", 3)]
    assert utils.ArgsToDict(made) == {"a": [1.5], "b": b"text", "c": 3}


def test_a_net_is_printed_as_the_calls_that_made_it() -> None:
    net = core.Net("printed")
    net.FC(["x", "w", "b"], "y", axis=2, device_option=core.DeviceOption(caffe2_pb2.CUDA, 1))
    net.GivenTensorFill([], "w", values=[0.0] * 100)
    _, _, dense, fill = net_printer.to_string(net).splitlines()
    assert dense == "net.FC(['x', 'w', 'b'], ['y'], axis=2, device_option=DeviceOption(1, 1))"
    assert fill == f"net.GivenTensorFill([], ['w'], values={str([0.0] * 100)[:64]}...<+len={500 - 64}>)"
    assert net_printer.to_string(net, c2_syntax=False).splitlines()[2].startswith("y = FC(x, w, b, axis=2")


def test_libraries_of_operators_are_refused_politely() -> None:
    with pytest.raises(RuntimeError, match="in Python"):
        dyndep.InitOpsLibrary("@/caffe2/some:operators")
    assert dyndep.GetImportedOpsLibraries() == set()
