"""Caffe2 model folders: recorded outputs are reproduced by every net, and bad folders are refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from google.protobuf import text_format

import dagexec
from dagexec import NetDef, OperatorDef, load_net, save_net
from dagexec.binding.parameters import initialized
from dagexec.core.arguments import make_argument
from dagexec.core.proto import Argument
from dagexec.errors import ModelFormatError
from dagexec.frontend import caffe2_weights
from dagexec.frontend.caffe2 import from_nets, load_caffe2

FIXTURES = Path(__file__).parent.parent / "fixtures" / "caffe2"
NETS = [("simple", 1), ("dag", 1), ("dag", 2), ("async_dag", 1), ("async_dag", 2)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lenet", "squeezenet", "googlenet", "group_depthwise", "nhwc"])
def test_every_net_reproduces_the_outputs_caffe2_recorded(name: str) -> None:
    model = load_caffe2(FIXTURES / name)
    feeds = dict(np.load(FIXTURES / name / "inputs.npz"))
    expected = dict(np.load(FIXTURES / name / "outputs.npz"))
    assert set(model.inputs) == set(feeds)
    assert set(model.outputs) == set(expected)
    for net_type, workers in NETS:
        with dagexec.compile(model, net_type=net_type, num_workers=workers) as executor:
            found = executor.run(feeds)
        for blob, value in expected.items():
            error = np.abs(found[blob] - value).max() / np.abs(value).max()
            assert error < 1e-4, f"{net_type} with {workers} workers: {blob} is off by {error}"


def test_text_files_give_the_same_model_as_binary_ones(tmp_path: Path) -> None:
    for stem in ("init_net", "predict_net"):
        save_net(load_net(FIXTURES / "lenet" / f"{stem}.pb"), tmp_path / f"{stem}.pbtxt")
    binary, text = load_caffe2(FIXTURES / "lenet"), load_caffe2(tmp_path)
    assert text_format.MessageToString(text.net) == text_format.MessageToString(binary.net)
    made, read = initialized(text).parameters, initialized(binary).parameters
    assert made.keys() == read.keys()
    assert all(made[blob].tobytes() == array.tobytes() for blob, array in read.items())
    assert (text.inputs, text.outputs) == (binary.inputs, binary.outputs)


WEIGHTS = np.random.default_rng(0).standard_normal((300, 250)).astype(np.float32)


def filler(output: str = "w", op_type: str = "GivenTensorFill", **arguments: object) -> OperatorDef:
    given = {"shape": list(WEIGHTS.shape), "values": WEIGHTS, **arguments}
    return dagexec.op(op_type, [], [output], arg={name: value for name, value in given.items() if value is not None})  # type: ignore[misc]


def folder_of(path: Path, *fillers: OperatorDef) -> Path:
    save_net(NetDef(name="init", op=[*fillers, filler("b", shape=[250], values=WEIGHTS[0])]), path / "init_net.pb")
    operators = [OperatorDef(type="MatMul", input=["x", "w"], output=["m"])]
    operators.append(OperatorDef(type="Add", input=["m", "b"], output=["y"]))
    save_net(
        NetDef(name="net", op=operators, external_input=["x", "w", "b"], external_output=["y"]), path / "predict_net.pb"
    )
    return path


def test_large_weights_of_an_init_net_are_read_to_where_they_stay(tmp_path: Path) -> None:
    model = load_caffe2(folder_of(tmp_path, filler()))
    assert model.init_net is not None
    assert [list(operator.output) for operator in model.init_net.op] == [["b"]]
    assert list(model.inputs) == ["x"]
    assert not model.parameters["w"].flags.writeable
    np.testing.assert_array_equal(model.parameters["w"], WEIGHTS)
    with dagexec.compile(model, optimize=False) as executor:
        found = executor.run({"x": np.eye(2, 300, dtype=np.float32)})["y"]
    np.testing.assert_array_equal(found, WEIGHTS[:2] + WEIGHTS[0])


LEFT = {
    "another type": [filler(op_type="GivenTensorDoubleFill")],
    "an argument more": [filler(dtype=1)],
    "other sizes": [filler(shape=[300, 249])],
    "no sizes": [filler(shape=None)],
    "integers": [filler(values=list(range(75000)))],
    "written twice": [filler(), dagexec.op("ConstantFill", [], ["w"], shape=[300, 250])],
    "given twice": [filler(), filler()],
}  # fmt: skip


@pytest.mark.parametrize("what", LEFT)
def test_what_is_not_a_weight_for_sure_is_left_to_the_init_net(tmp_path: Path, what: str) -> None:
    model = load_caffe2(folder_of(tmp_path, *LEFT[what]))
    assert model.init_net == load_net(tmp_path / "init_net.pb")
    assert not model.parameters


def test_an_init_net_that_changes_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder_of(tmp_path, filler()) / "init_net.pb"
    parse = caffe2_weights.parse_message

    def changed(*arguments: object) -> object:
        path.write_bytes(path.read_bytes() + b"\x0a\x01n")
        return parse(*arguments)  # type: ignore[arg-type,type-var]

    monkeypatch.setattr(caffe2_weights, "parse_message", changed)
    with pytest.raises(ModelFormatError, match=r"init_net\.pb: it changed while it was read"):
        load_caffe2(tmp_path)


@pytest.mark.parametrize("missing", ["init_net", "predict_net"])
def test_a_folder_without_one_of_the_nets_is_refused_by_name(tmp_path: Path, missing: str) -> None:
    folder = shutil.copytree(FIXTURES / "lenet", tmp_path / "model")
    (folder / f"{missing}.pb").unlink()
    with pytest.raises(ModelFormatError, match=rf"model: expected .*{missing}.pb is missing"):
        load_caffe2(folder)


def test_a_path_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFormatError, match="nowhere: not a folder"):
        load_caffe2(tmp_path / "nowhere")


@pytest.mark.parametrize("keep", [0.3, 0.9])
def test_a_truncated_net_is_refused_with_its_path(tmp_path: Path, keep: float) -> None:
    folder = shutil.copytree(FIXTURES / "lenet", tmp_path / "model")
    content = (folder / "init_net.pb").read_bytes()
    (folder / "init_net.pb").write_bytes(content[: int(len(content) * keep)])
    with pytest.raises(ModelFormatError, match=r"init_net\.pb: not a NetDef"):
        load_caffe2(folder)


def test_inputs_are_what_the_init_net_does_not_fill() -> None:
    model = load_caffe2(FIXTURES / "lenet")
    assert list(model.inputs) == ["data"]
    assert model.inputs["data"].shape is None
    assert model.inputs["data"].dtype is None


@pytest.mark.parametrize(
    ("filler", "arguments"),
    [
        ("GivenTensorFill", [make_argument("shape", [1, 1]), make_argument("values", [0.0])]),
        ("ConstantFill", [make_argument("shape", [1])]),
    ],
)
def test_an_input_that_the_exporter_filled_with_a_placeholder_is_an_input(
    filler: str, arguments: list[Argument]
) -> None:
    folder = FIXTURES / "lenet"
    init, predict = load_net(folder / "init_net.pb"), load_net(folder / "predict_net.pb")
    init.op.append(OperatorDef(type=filler, output=["data"], arg=arguments))
    feeds, expected = (dict(np.load(folder / f"{name}.npz")) for name in ("inputs", "outputs"))
    with dagexec.compile((init, predict)) as executor:
        assert list(executor.inputs) == ["data"]
        found = executor.run(feeds)
    for blob, value in expected.items():
        np.testing.assert_allclose(found[blob], value, atol=1e-5)


def test_a_parameter_of_a_single_zero_is_no_input_beside_one_that_nothing_fills() -> None:
    init = NetDef(op=[OperatorDef(type="ConstantFill", output=["p"], arg=[make_argument("shape", [1])])])
    net = NetDef(external_input=["x", "p"], op=[OperatorDef(type="Add", input=["p", "x"], output=["y"])])
    assert list(from_nets(init, net).inputs) == ["x"]


def test_a_net_without_lists_takes_what_it_reads_first_and_returns_what_nobody_reads() -> None:
    net = NetDef(name="bare", op=[
        OperatorDef(type="Relu", input=["a"], output=["b"]),
        OperatorDef(type="Relu", input=["b"], output=["c"]),
        OperatorDef(type="Relu", input=["a"], output=["d"]),
        OperatorDef(type="Relu", input=["d"], output=["d"]),
    ])  # fmt: skip
    model = from_nets(None, net)
    assert list(model.inputs) == ["a"]
    assert model.outputs == ("c", "d")
    with dagexec.compile(model) as executor:
        found = executor.run({"a": np.array([-1.0, 2.0], np.float32)})
    np.testing.assert_array_equal(found["c"], [0, 2])


def test_a_net_without_operators_is_no_model(tmp_path: Path) -> None:
    for name in ("init_net.pb", "predict_net.pb"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(ModelFormatError, match="has no operators"):
        load_caffe2(tmp_path)
