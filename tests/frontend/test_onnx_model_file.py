"""ONNX files whose large weights are read to where they stay: the same models as from messages, whatever is in them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from dagexec.errors import ModelFormatError
from dagexec.frontend.onnx import from_model_proto, load_onnx, model_file
from dagexec.frontend.onnx.model_file import read_model
from dagexec.storage.wire import length_field, varint

WEIGHTS = np.random.default_rng(0).standard_normal((400, 200)).astype(np.float32)


def message(*tensors: TensorProto) -> onnx.ModelProto:
    nodes = [helper.make_node("Add", ["x", tensors[0].name], ["y"])]
    nodes += [helper.make_node("Add", ["y" * n, tensor.name], ["y" * (n + 1)]) for n, tensor in enumerate(tensors) if n]
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [400, 200])
    result = helper.make_tensor_value_info("y" * len(tensors), TensorProto.FLOAT, [400, 200])
    graph = helper.make_graph(nodes, "g", [value], [result], initializer=tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def raw(name: str = "w") -> TensorProto:
    return numpy_helper.from_array(WEIGHTS, name)


def test_large_weights_are_left_out_of_the_message_and_read_from_the_file(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    small = numpy_helper.from_array(np.ones(200, np.float32), "small")
    proto = message(raw(), small, raw("v"))
    path.write_bytes(proto.SerializeToString())
    found, own = read_model(path)
    assert own is not None
    assert [len(tensor.raw_data) for tensor in found.graph.initializer] == [0, 800, 0]
    assert found.ByteSize() < 2000
    model, expected = load_onnx(path), from_model_proto(proto)
    assert model.net == expected.net
    for name, array in expected.parameters.items():
        assert model.parameters[name].tobytes() == array.tobytes()
        assert not model.parameters[name].flags.writeable


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.complex64])
def test_numbers_that_are_packed_are_read_from_the_file_as_raw_data_is(tmp_path: Path, dtype: type) -> None:
    values = np.arange(2000).astype(dtype)
    parts = values.view(values.real.dtype)
    tensor = TensorProto(name="w", data_type=helper.np_dtype_to_tensor_dtype(values.dtype), dims=[2000])
    getattr(tensor, "double_data" if dtype is np.float64 else "float_data").extend(parts)
    kind = helper.make_tensor_value_info("y", tensor.data_type, [2000])
    padding = numpy_helper.from_array(np.zeros(1 << 16, np.float32), "unread")
    graph = helper.make_graph([helper.make_node("Identity", ["w"], ["y"])], "g", [], [kind], [tensor, padding])
    path = tmp_path / "m.onnx"
    path.write_bytes(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]).SerializeToString())
    assert read_model(path)[0].ByteSize() < 1000
    found = load_onnx(path).parameters["y"]
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, values)


@pytest.mark.parametrize("change", ["nothing", "domain", "another output", "no name", "an input", "more", "reference"])
def test_only_a_node_that_is_a_large_constant_becomes_an_initializer(tmp_path: Path, change: str) -> None:
    node = helper.make_node("Constant", [], ["w"], value=raw(""))
    if change == "domain":
        node.domain = "other"
    elif change == "another output":
        node.output.insert(0, "v")
    elif change == "no name":
        node.output[0] = ""
    elif change == "an input":
        node.input.append("x")
    elif change == "reference":
        node.attribute[0].ref_attr_name = "other"
    elif change == "more":
        node.attribute.append(onnx.AttributeProto(name="more", type=onnx.AttributeProto.TENSOR, t=raw("")))
    proto = message(raw("v"))
    proto.graph.node.insert(0, node)
    proto.graph.node.append(helper.make_node("Add", ["v", "w"], ["z"]))
    path = tmp_path / "m.onnx"
    path.write_bytes(proto.SerializeToString())
    found = read_model(path)[0].graph
    if change != "nothing":
        assert found.node[0] == node
        return
    assert [tensor.name for tensor in found.initializer] == ["w", "v"]
    assert found.ByteSize() < 1000
    proto.graph.output.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, [400, 200]))
    path.write_bytes(proto.SerializeToString())
    model, expected = load_onnx(path), from_model_proto(proto)
    assert list(model.net.op) == list(expected.net.op)
    np.testing.assert_array_equal(model.parameters["w"], WEIGHTS)


def split_graph(proto: onnx.ModelProto) -> bytes:
    """Two graphs, which are one: the initializers are in the second."""
    first = onnx.ModelProto()
    first.CopyFrom(proto)
    del first.graph.initializer[:]
    second = onnx.ModelProto(graph=onnx.GraphProto(initializer=proto.graph.initializer))
    return first.SerializeToString() + second.SerializeToString()


def data_twice(proto: onnx.ModelProto) -> bytes:
    """Raw data twice in a tensor: the latter counts."""
    tensor = TensorProto(raw_data=bytes(WEIGHTS.nbytes)).SerializeToString() + raw().SerializeToString()
    rest = onnx.ModelProto()
    rest.CopyFrom(proto)
    del rest.graph.initializer[:]
    graph = rest.graph.SerializeToString() + length_field(5, tensor)
    rest.ClearField("graph")
    return rest.SerializeToString() + length_field(7, graph)


def unknown_field(proto: onnx.ModelProto) -> bytes:
    return proto.SerializeToString() + varint(999 << 3) + varint(1 << 40)


def typed(proto: onnx.ModelProto) -> bytes:
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    del copy.graph.initializer[:]
    tensor = helper.make_tensor("w", TensorProto.FLOAT, WEIGHTS.shape, WEIGHTS.reshape(-1))
    copy.graph.initializer.append(tensor)
    return copy.SerializeToString()


@pytest.mark.parametrize("write", [split_graph, data_twice, unknown_field, typed])
def test_unusual_files_are_what_the_library_says(tmp_path: Path, write: Callable[[onnx.ModelProto], bytes]) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(write(message(raw())))
    np.testing.assert_array_equal(load_onnx(path).parameters["w"], WEIGHTS)


def test_a_file_behind_a_link_to_another_folder_is_read(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "1").write_bytes(message(raw()).SerializeToString())
    (tmp_path / "m.onnx").symlink_to("blobs/1")
    np.testing.assert_array_equal(load_onnx(tmp_path / "m.onnx").parameters["w"], WEIGHTS)


def test_large_data_that_does_not_fit_its_sizes_is_refused(tmp_path: Path) -> None:
    tensor = raw()
    tensor.dims[0] -= 1
    path = tmp_path / "m.onnx"
    path.write_bytes(message(tensor).SerializeToString())
    with pytest.raises(ModelFormatError, match="initializer 'w': its sizes ask for 319200 bytes, found 320000"):
        load_onnx(path)


@pytest.mark.parametrize("kept", [319_000, 320_060, 0.9])
def test_a_file_that_is_cut_short_is_refused(tmp_path: Path, kept: float) -> None:
    path = tmp_path / "m.onnx"
    content = message(raw()).SerializeToString()
    path.write_bytes(content[: int(kept if kept > 1 else kept * len(content))])
    with pytest.raises(ModelFormatError, match=r"m.onnx: not a ModelProto"):
        load_onnx(path)


def test_a_file_that_is_replaced_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(message(raw()).SerializeToString())
    parse = model_file.parse_message

    def replaced(*arguments: object) -> object:
        (tmp_path / "new").write_bytes(message(raw()).SerializeToString())
        (tmp_path / "new").replace(path)
        return parse(*arguments)  # type: ignore[arg-type,type-var]

    monkeypatch.setattr(model_file, "parse_message", replaced)
    with pytest.raises(ModelFormatError, match="changed while the model was loaded"):
        load_onnx(path)


def test_entries_of_an_own_file_are_no_location_in_a_message() -> None:
    tensor = TensorProto(name="w", data_type=1, dims=[1], data_location=TensorProto.EXTERNAL)
    for key, value in model_file.OwnFile.entries(0, 4).items():
        tensor.external_data.add(key=key, value=value)
    with pytest.raises(ModelFormatError, match=r"is no file name|not loaded from a file"):
        from_model_proto(message(tensor))
