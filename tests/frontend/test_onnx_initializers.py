"""Tensors of ONNX models: every way to store them, no copies of raw and external data, and nothing read outside."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import dagexec
from dagexec.core.dtypes import HELD_TYPES, STRING, TypeMeta
from dagexec.errors import ModelFormatError, ResourceError
from dagexec.frontend.onnx import external_data, load_onnx
from dagexec.frontend.onnx import model as onnx_model
from dagexec.frontend.onnx.external_data import ExternalData
from dagexec.frontend.onnx.graph import GraphConversion
from dagexec.frontend.onnx.initializers import NOWHERE, tensor_array
from dagexec.platform.garbage_collection import garbage_collection_paused
from tests.memory_limits import leave


@pytest.mark.parametrize(
    "dtype", ["float32", "float64", "float16", "int8", "uint8", "int16", "uint16", "int32", "int64", "bool"]
)
@pytest.mark.parametrize("raw", [True, False])
def test_every_element_type_is_read_from_raw_bytes_and_from_typed_fields(dtype: str, raw: bool) -> None:
    values = np.array([[0, 1, 2], [100, 3, 0]]).astype(dtype)
    number = helper.np_dtype_to_tensor_dtype(values.dtype)
    content = values.tobytes() if raw else values.reshape(-1)
    tensor = helper.make_tensor("t", number, [2, 3], content, raw=raw)
    found = tensor_array(tensor, NOWHERE, "t")
    assert found.dtype == values.dtype
    np.testing.assert_array_equal(found, values)
    assert not found.flags.writeable


@pytest.mark.parametrize("meta", [meta for meta in HELD_TYPES if meta is not STRING], ids=str)
@pytest.mark.parametrize("raw", [True, False])
def test_types_are_read_as_the_onnx_package_writes_them(meta: TypeMeta, raw: bool) -> None:
    """Three elements: where they are packed, the last byte is not full."""
    values = np.array([1, 0, -1 if meta.name in ("int4", "int2") else 1]).astype(meta.numpy)
    packed = numpy_helper.from_array(values)
    tensor = packed if raw else helper.make_tensor("t", meta.onnx, [3], values.tolist())
    found = tensor_array(tensor, NOWHERE, "t")
    assert found.dtype == meta.numpy
    assert found.tobytes() == values.tobytes()


@pytest.mark.parametrize("raw", [True, False])
def test_bfloat16_is_read_bit_by_bit(raw: bool) -> None:
    values = np.array([1.5, -2.25, 3e38], ml_dtypes.bfloat16)
    tensor = TensorProto(data_type=TensorProto.BFLOAT16, dims=[3])
    if raw:
        tensor.raw_data = values.tobytes()
    else:
        tensor.int32_data.extend(int(bits) for bits in values.view(np.uint16))
    found = tensor_array(tensor, NOWHERE, "t")
    assert found.dtype == ml_dtypes.bfloat16
    assert found.tobytes() == values.tobytes()


def test_strings_scalars_and_empty_tensors_are_read() -> None:
    strings = helper.make_tensor("t", TensorProto.STRING, [2], [b"one", b"two"])
    assert tensor_array(strings, NOWHERE, "t").tolist() == [b"one", b"two"]
    scalar = numpy_helper.from_array(np.array(7, np.int64))
    assert tensor_array(scalar, NOWHERE, "t").shape == ()
    empty = numpy_helper.from_array(np.zeros((3, 0), np.float32))
    assert tensor_array(empty, NOWHERE, "t").shape == (3, 0)


def test_raw_data_is_viewed_and_not_copied() -> None:
    tensor = numpy_helper.from_array(np.arange(6, dtype=np.float32).reshape(2, 3))
    found = tensor_array(tensor, NOWHERE, "t")
    owner = found
    while isinstance(owner, np.ndarray) and owner.base is not None:
        owner = owner.base
    assert isinstance(owner, bytes)


WRONG = {
    "too few bytes": (TensorProto(data_type=1, dims=[3], raw_data=b"\0" * 8), "ask for 12 bytes, found 8"),
    "too many bytes": (TensorProto(data_type=1, dims=[1], raw_data=b"\0" * 8), "ask for 4 bytes, found 8"),
    "too few elements": (TensorProto(data_type=1, dims=[3], float_data=[1.0]), "ask for 3 elements, found 1"),
    "data in another field": (TensorProto(data_type=7, dims=[1], float_data=[1.0]), "ask for 1 elements, found 0"),
    "a negative size": (TensorProto(data_type=1, dims=[-1], raw_data=b""), "a size is negative"),
    "sizes that overflow": (TensorProto(data_type=1, dims=[2**40, 2**40], raw_data=b"\0" * 4), "found 4"),
    "huge sizes of nothing": (TensorProto(data_type=1, dims=[2**62, 2**62, 0], raw_data=b""), "too large"),
    "an unknown type": (TensorProto(data_type=99, dims=[1], raw_data=b"\0"), "element type 99 is not supported"),
    "an unsupported type": (TensorProto(data_type=TensorProto.FLOAT6E2M3, dims=[0]), "FLOAT6E2M3 is not supported"),
    "no type": (TensorProto(dims=[1], raw_data=b"\0"), "UNDEFINED is not supported"),
    "too few packed bytes": (TensorProto(data_type=TensorProto.INT4, dims=[3], raw_data=b"x"), "2 bytes, found 1"),
    "parts of complex numbers": (TensorProto(data_type=TensorProto.COMPLEX64, dims=[1], float_data=[1]), "2 parts"),
    "a value out of range": (TensorProto(data_type=TensorProto.INT8, dims=[1], int32_data=[300]), "does not fit int8"),
    "raw strings": (TensorProto(data_type=TensorProto.STRING, dims=[1], raw_data=b"x"), "strings may not"),
    "a segment": (TensorProto(data_type=1, dims=[0], segment=TensorProto.Segment(begin=0, end=1)), "segment"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_tensor_is_refused_by_name(case: str) -> None:
    tensor, message = WRONG[case]
    with pytest.raises(ModelFormatError, match=message) as caught:
        tensor_array(tensor, NOWHERE, "initializer 'w'")
    assert str(caught.value).startswith("initializer 'w': ")


def external(**entries: object) -> TensorProto:
    """A float tensor of 4 elements whose data is elsewhere."""
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[4], data_location=TensorProto.EXTERNAL)
    for key, value in entries.items():
        tensor.external_data.add(key=key, value=str(value))
    return tensor


def save_model(folder: Path, tensor: TensorProto, count: int = 4) -> Path:
    node = helper.make_node("Add", ["x", "w"], ["y"])
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [count])]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, [count])]
    graph = helper.make_graph([node], "sum", inputs, outputs, initializer=[tensor])
    folder.mkdir(exist_ok=True)
    path = folder / "model.onnx"
    path.write_bytes(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)]).SerializeToString())
    return path


@pytest.mark.parametrize("offset", [0, 4, 4096, 3])
def test_external_data_is_read_from_the_models_folder(tmp_path: Path, offset: int) -> None:
    values = np.array([1, 2, 3, 4], np.float32)
    path = save_model(tmp_path / "m", external(location="sub/weights.bin", offset=offset, length=16))
    (path.parent / "sub").mkdir()
    (path.parent / "sub" / "weights.bin").write_bytes(b"\xff" * offset + values.tobytes() + b"\xff" * 5)
    model = load_onnx(path)
    np.testing.assert_array_equal(model.parameters["w"], values)
    assert type(model.parameters["w"]) is np.ndarray
    assert not model.parameters["w"].flags.writeable
    assert model.parameters["w"].flags.aligned
    with dagexec.compile(model) as executor:
        np.testing.assert_array_equal(executor.run({"x": values})["y"], values * 2)


@pytest.mark.parametrize("optimize", [True, False])
@pytest.mark.parametrize("loaded", [True, False], ids=["compiled after the change", "compiled before"])
def test_what_happens_to_external_data_after_loading_changes_nothing(
    tmp_path: Path, loaded: bool, optimize: bool
) -> None:
    count = 1 << 14
    tensor = external(location="w.bin")
    tensor.dims[:] = [count]
    path = save_model(tmp_path / "m", tensor, count)
    values = np.arange(count, dtype=np.float32)
    data = path.parent / "w.bin"
    data.write_bytes(values.tobytes())
    model = load_onnx(path) if loaded else path
    with ExitStack() as stack:
        executor = None if loaded else stack.enter_context(dagexec.compile(model, optimize=optimize))
        with open(data, "r+b") as file:
            file.write(np.full(5000, 5, np.float32).tobytes())
        os.truncate(data, 5000)  # whoever has the rest of the pages mapped dies when it reads them
        executor = executor or stack.enter_context(dagexec.compile(model, optimize=optimize))
        for _ in range(2):
            assert executor.run({"x": np.ones(count, np.float32)})["y"].tobytes() == (values + 1).tobytes()


def shorten(path: Path) -> None:
    os.truncate(path, 8)


def overwrite(path: Path) -> None:
    with open(path, "r+b") as file:
        file.write(b"1234")


def replace_file(path: Path) -> None:
    (path.parent / "new").write_bytes(path.read_bytes())
    (path.parent / "new").replace(path)


def put_a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


CHANGES = [shorten, overwrite, replace_file, put_a_pipe]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("when", ["before", "after"])
def test_external_data_that_changes_while_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], None], when: str
) -> None:
    path = save_model(tmp_path / "m", external(location="w.bin"))
    (path.parent / "w.bin").write_bytes(b"\0" * 16)
    fill = external_data._fill

    def interrupted(*arguments: Any) -> bool:
        if when == "before":
            change(path.parent / "w.bin")
        found = fill(*arguments)
        if when == "after":
            change(path.parent / "w.bin")
        return found

    monkeypatch.setattr(external_data, "_fill", interrupted)
    with pytest.raises(ModelFormatError, match=r"initializer 'w': external data 'w.bin' changed while the model was"):
        load_onnx(path)


@pytest.mark.parametrize("change", CHANGES)
def test_external_data_that_changes_between_two_tensors_is_refused(
    tmp_path: Path, change: Callable[[Path], None]
) -> None:
    data = tmp_path / "w.bin"
    data.write_bytes(b"\0" * 32)
    files = ExternalData(tmp_path)
    files.read({"location": "w.bin"}, 16, "first")
    change(data)
    with pytest.raises(ModelFormatError, match=r"external data .* changed|is not a file"):
        files.read({"location": "w.bin", "offset": "16"}, 16, "second")
    with pytest.raises(ModelFormatError, match=r"first: external data .* changed"), files:
        pass


def test_tensors_on_the_same_bytes_share_memory(tmp_path: Path) -> None:
    (tmp_path / "w.bin").write_bytes(np.arange(8, dtype=np.float32).tobytes())
    with ExternalData(tmp_path) as files:
        first = tensor_array(external(location="w.bin"), files, "first")
        again = tensor_array(external(location="w.bin", offset=0), files, "again")
        other = tensor_array(external(location="w.bin", offset=16), files, "other")
    assert np.shares_memory(first, again)
    assert other.tolist() == [4, 5, 6, 7]


def test_external_data_that_memory_cannot_hold_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 1 << 34
    tensor = external(location="w.bin")
    tensor.dims[:] = [size // 4]
    path = save_model(tmp_path / "m", tensor)
    with open(path.parent / "w.bin", "wb") as file:
        file.truncate(size)  # nothing is written
    leave(monkeypatch, 1 << 26)
    refused = r"initializer 'w': external data 'w.bin' needs 17,179,869,184 bytes; this machine has 67,108,864"
    with pytest.raises(ResourceError, match=refused):
        load_onnx(path)


OUTSIDE = ["../secret.bin", "a/../../secret.bin", "/etc/hostname", "link.bin", "folder_link/secret.bin"]


@pytest.mark.parametrize("location", OUTSIDE)
def test_external_data_outside_the_folder_is_refused(tmp_path: Path, location: str) -> None:
    (tmp_path / "secret.bin").write_bytes(b"\0" * 16)
    path = save_model(tmp_path / "m", external(location=location))
    (path.parent / "link.bin").symlink_to(tmp_path / "secret.bin")
    (path.parent / "folder_link").symlink_to(tmp_path)
    with pytest.raises(ModelFormatError, match=r"model\.onnx: initializer 'w': external data .* outside"):
        load_onnx(path)


def test_an_absolute_path_into_the_folder_is_refused_too(tmp_path: Path) -> None:
    inside = tmp_path / "m" / "w.bin"
    path = save_model(tmp_path / "m", external(location=inside))
    inside.write_bytes(b"\0" * 16)
    with pytest.raises(ModelFormatError, match="outside"):
        load_onnx(path)


def test_a_link_that_stays_inside_the_folder_is_followed(tmp_path: Path) -> None:
    path = save_model(tmp_path / "m", external(location="link.bin"))
    (path.parent / "w.bin").write_bytes(np.ones(4, np.float32).tobytes())
    (path.parent / "link.bin").symlink_to("w.bin")
    np.testing.assert_array_equal(load_onnx(path).parameters["w"], [1, 1, 1, 1])


BAD_ENTRIES = {
    "file too short": ({"location": "w.bin", "offset": 8}, "has 16 bytes; expected 16 bytes at offset 8"),
    "offset beyond the file": ({"location": "w.bin", "offset": 10**18}, "expected 16 bytes at offset"),
    "negative offset": ({"location": "w.bin", "offset": -4}, "offset must be a number"),
    "negative length": ({"location": "w.bin", "length": -16}, "length must be a number"),
    "no number": ({"location": "w.bin", "offset": "0x4"}, "offset must be a number"),
    "a number that never ends": ({"location": "w.bin", "offset": "9" * 5000}, "too large"),
    "length against sizes": ({"location": "w.bin", "length": 12}, "ask for 16 bytes, found 12"),
    "missing file": ({"location": "none.bin"}, "is not a file"),
    "a folder": ({"location": "."}, "is not a file"),
    "no location": ({}, "no location"),
    "a NUL in the name": ({"location": "w\0.bin"}, "location"),
}


@pytest.mark.parametrize("case", BAD_ENTRIES)
def test_wrong_external_data_is_refused(tmp_path: Path, case: str) -> None:
    entries, message = BAD_ENTRIES[case]
    path = save_model(tmp_path / "m", external(**entries))
    (path.parent / "w.bin").write_bytes(b"\0" * 16)
    with pytest.raises(ModelFormatError, match=message):
        load_onnx(path)


def test_a_pipe_is_refused_instead_of_waited_for(tmp_path: Path) -> None:
    path = save_model(tmp_path / "m", external(location="pipe"))
    os.mkfifo(path.parent / "pipe")
    with pytest.raises(ModelFormatError, match="is not a file"):
        load_onnx(path)


def test_external_data_of_a_message_without_a_folder_is_refused() -> None:
    with pytest.raises(ModelFormatError, match="was not loaded from a file"):
        tensor_array(external(location="w.bin"), NOWHERE, "w")


def test_an_initializer_given_twice_is_refused() -> None:
    tensor = numpy_helper.from_array(np.ones(4, np.float32), "w")
    proto = onnx.ModelProto()
    proto.graph.initializer.extend([tensor, tensor])
    proto.graph.output.add(name="w")
    proto.opset_import.add(domain="", version=13)
    with pytest.raises(ModelFormatError, match="'w' is given twice"):
        dagexec.frontend.onnx.from_model_proto(proto)


def test_tensors_of_more_than_two_gigabytes_lie_behind_two_gigabytes_of_a_file(tmp_path: Path) -> None:
    """In a file of holes, and all on the same bytes, so that neither disk nor memory is needed for them."""
    piece, offset = np.arange(1 << 21, dtype=np.float32), 5 << 29
    with open(tmp_path / "weights.bin", "wb") as file:
        file.truncate(6 << 29)
        file.seek(offset)
        file.write(piece.tobytes())
    names = [f"w{index}" for index in range(300)]
    nodes = [helper.make_node("Gather", [name, "i"], [f"{name}/last"]) for name in names]
    nodes.append(helper.make_node("Max", [f"{name}/last" for name in names], ["y"]))
    index = helper.make_tensor_value_info("i", TensorProto.INT64, [1])
    total = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])
    graph = helper.make_graph(
        nodes, "large", [index], [total], [_external_tensor(name, piece, offset) for name in names]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    loaded = load_onnx(tmp_path / "model.onnx")
    assert sum(array.nbytes for array in loaded.parameters.values()) > 1 << 31
    with dagexec.compile(loaded, optimize=False) as executor:
        assert executor.run({"i": np.array([-1])})["y"] == piece[-1]


def test_a_model_that_was_loaded_keeps_nothing_of_its_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else large weights stay twice until cycles are collected, and those that passes replaced as well."""
    found: list[weakref.ref[Any]] = []

    class Watched(GraphConversion):
        def __init__(self, *arguments: Any, **more: Any) -> None:
            super().__init__(*arguments, **more)
            found.extend((weakref.ref(self), weakref.ref(next(iter(self.scope.values.values())))))

    monkeypatch.setattr(onnx_model, "GraphConversion", Watched)
    weight = numpy_helper.from_array(np.ones((4, 4), np.float32), "w")
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])], "g",
        [value("x", TensorProto.FLOAT, ["n", 4])], [value("y", TensorProto.FLOAT, None)], [weight],
    )  # fmt: skip
    with garbage_collection_paused():
        model = dagexec.load_model(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8))
        assert found[0]() is None
        assert found[1]() is model.parameters["w"]
        del model
        assert found[1]() is None


def _external_tensor(name: str, content: np.ndarray, offset: int) -> TensorProto:
    tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=content.shape)
    tensor.data_location = TensorProto.EXTERNAL
    entries = {"location": "weights.bin", "offset": offset, "length": content.nbytes}
    for key, value in entries.items():
        tensor.external_data.add(key=key, value=str(value))
    return tensor
