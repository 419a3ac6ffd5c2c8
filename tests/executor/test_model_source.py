"""load_model: everything a model can come from, and clear refusals of everything else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper

from dagexec import NetDef, OperatorDef, load_net, save_net
from dagexec.core.model import Model
from dagexec.errors import ModelFormatError
from dagexec.executor.source.loading import load_model

LENET = Path(__file__).parents[1] / "fixtures" / "caffe2" / "lenet"
NET = NetDef(name="relu", op=[OperatorDef(type="Relu", input=["x"], output=["y"])])


def onnx_model() -> object:
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in "xy"]
    return helper.make_model(helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "relu", infos[:1], infos[1:]))


def test_every_kind_of_source_gives_a_model(tmp_path: Path) -> None:
    proto = onnx_model()
    (tmp_path / "relu.onnx").write_bytes(proto.SerializeToString())  # type: ignore[attr-defined]
    save_net(NET, tmp_path / "relu.pb")
    save_net(NET, tmp_path / "relu.pbtxt")
    files = [tmp_path / f"relu.{kind}" for kind in ("onnx", "pb", "pbtxt")]
    sources = [proto, files[0].read_bytes(), NET, str(files[0]), *files]
    for source in sources:
        model = load_model(source)  # type: ignore[arg-type]
        assert (model.name, list(model.inputs), model.outputs) == ("relu", ["x"], ("y",))


def test_a_folder_and_a_pair_of_nets_give_a_caffe2_model() -> None:
    pair = (load_net(LENET / "init_net.pb"), load_net(LENET / "predict_net.pb"))
    for source in (LENET, str(LENET), pair):
        model = load_model(source)
        assert list(model.inputs) == ["data"]
        assert model.init_net is not None


def test_a_model_is_returned_as_it_is() -> None:
    model = Model("m", NET)
    assert load_model(model) is model


def test_a_zoo_name_builds_that_model() -> None:
    assert load_model("zoo:lenet").name == "lenet"


def test_an_unknown_zoo_name_is_refused_with_close_names() -> None:
    with pytest.raises(ModelFormatError, match="'squeezenet2'; did you mean squeezenet"):
        load_model("zoo:squeezenet2")


@pytest.mark.parametrize("path", ["no/such.onnx", "no_folder", "bad\0name", "x" * 5000])
def test_a_missing_path_is_refused(path: str) -> None:
    with pytest.raises(ModelFormatError, match="no such file or folder"):
        load_model(path)


def test_a_zoo_name_without_its_prefix_gets_a_hint() -> None:
    with pytest.raises(ModelFormatError, match='did you mean "zoo:resnet50"'):
        load_model("resnet50")


def test_an_unknown_kind_of_file_is_refused_with_what_is_expected(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(b"")
    with pytest.raises(ModelFormatError, match=r"model\.pt: unknown kind of file; expected the path of an \.onnx file"):
        load_model(path)


@pytest.mark.parametrize("source", [3, None, np.zeros(2), (NET,), (NET, "x"), bytearray()])
def test_any_other_object_is_refused_by_its_type(source: object) -> None:
    with pytest.raises(ModelFormatError, match=f"a {type(source).__name__} is no model"):
        load_model(source)  # type: ignore[arg-type]


def test_bytes_that_are_no_model_are_refused() -> None:
    with pytest.raises(ModelFormatError, match=r"bytes of a model: not a ModelProto \(10 bytes\)"):
        load_model(b"model.onnx")
    with pytest.raises(ModelFormatError, match="there is no graph in it"):
        load_model(b"")


def test_bytes_of_an_onnx_file_take_other_sizes_of_inputs() -> None:
    content = onnx_model().SerializeToString()  # type: ignore[attr-defined]
    assert load_model(content, shapes={"x": (5,)}).inputs["x"].shape == (5,)
