"""Models that Caffe2's predictor exporter saved (.mdl): what it writes is read, and what is damaged is refused.

The files are written here record by record, by the format's description, without dagexec's own writer.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import dagexec
from dagexec import NetDef, OperatorDef, op
from dagexec.cli import app
from dagexec.core.proto import BlobProto, MetaNetDef, TensorProto
from dagexec.errors import AccessError, DagexecError, ModelFormatError
from dagexec.frontend.predictor import load_predictor

W = np.array([[1, 2, 3], [4, 5, 6]], np.float32)
B = np.array([0.5, -40], np.float32)
X = np.array([[1, 1, 1], [0, -1, 2]], np.float32)
EXPECTED = np.maximum(X @ W.T + B + 0.25, 0)


def net(name: str, operators: list[OperatorDef], inputs: list[str], outputs: list[str]) -> NetDef:
    return NetDef(name=name, op=operators, external_input=inputs, external_output=outputs)


def exported() -> MetaNetDef:
    """What the exporter writes for a layer, whose extra init net makes a shift."""
    reader = "!!PREDICTOR_DBREADER"
    global_init = net("global-init", [op("Load", [reader], ["w", "b"])], [reader], ["w", "b"])
    fills = [op("ConstantFill", [], name, shape=shape, value=0.0) for name, shape in (("x", [1, 3]), ("y", [1, 2]))]
    shift = op("ConstantFill", [], "shift", shape=[2], value=0.25)
    predict_init = net("predict-init", [*fills, shift], ["x", "y"], [])
    layers = [op("FC", ["x", "w", "b"], "fc"), op("Add", ["fc", "shift"], "moved"), op("Relu", "moved", "y")]
    predict = net("predict", layers, ["x", "w", "b", "shift"], ["y"])
    meta = MetaNetDef()
    meta.modelInfo.project = "test"
    for key, one in (
        ("GLOBAL_INIT_NET_TYPE", global_init),
        ("PREDICT_INIT_NET_TYPE", predict_init),
        ("PREDICT_NET_TYPE", predict),
    ):
        meta.nets.add(key=key, value=one)
    for key, blobs in (
        ("PARAMETERS_BLOB_TYPE", ["w", "b"]),
        ("INPUTS_BLOB_TYPE", ["x"]),
        ("OUTPUTS_BLOB_TYPE", ["y"]),
    ):
        meta.blobs.add(key=key, value=blobs)
    return meta


def record(key: str, value: bytes) -> bytes:
    return struct.pack("<ii", len(key.encode()), len(value)) + key.encode() + value


def tensor(name: str, array: np.ndarray) -> bytes:
    content = TensorProto(dims=array.shape, data_type=TensorProto.FLOAT, float_data=array.ravel(), name=name)
    return record(name, BlobProto(name=name, type="Tensor", tensor=content).SerializeToString())


def file_of(meta: MetaNetDef) -> bytes:
    head = BlobProto(name="!!META_NET_DEF", type="std::string", content=meta.SerializeToString())
    return record("!!META_NET_DEF", head.SerializeToString()) + tensor("w", W) + tensor("b", B)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "model.mdl"
    found.write_bytes(file_of(exported()))
    return found


@pytest.mark.parametrize("optimize", [True, False])
def test_a_predictor_runs(path: Path, optimize: bool) -> None:
    with dagexec.compile(path, optimize=optimize) as executor:
        assert executor.model.name == "predict"
        np.testing.assert_allclose(executor.run({"x": X})["y"], EXPECTED, rtol=1e-6)


def test_inputs_parameters_and_outputs_are_those_of_the_file(path: Path) -> None:
    model = load_predictor(path)
    assert (list(model.inputs), model.outputs, sorted(model.parameters)) == (["x"], ("y",), ["b", "w"])
    np.testing.assert_array_equal(model.parameters["w"], W)
    assert model.init_net is not None
    assert [definition.output[0] for definition in model.init_net.op] == ["shift"]


def test_the_command_line_runs_it(path: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "in.npz", x=X)
    words = ["run", str(path), "--input", str(tmp_path / "in.npz"), "--output", str(tmp_path / "out.npz")]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    np.testing.assert_allclose(np.load(tmp_path / "out.npz")["y"], EXPECTED, rtol=1e-6)


def drop_net(meta: MetaNetDef) -> None:
    del meta.nets[2]


def repeat_net(meta: MetaNetDef) -> None:
    meta.nets.append(meta.nets[2])


def name_another_parameter(meta: MetaNetDef) -> None:
    meta.blobs[0].value.append("momentum")


def drop_outputs(meta: MetaNetDef) -> None:
    del meta.blobs[2]


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (drop_net, "net 'PREDICT_NET_TYPE' is missing"),
        (repeat_net, "net 'PREDICT_NET_TYPE' is there twice"),
        (name_another_parameter, "1 parameter.* missing, the first is 'momentum'"),
        (drop_outputs, "'OUTPUTS_BLOB_TYPE' is missing or empty"),
    ],
)
def test_what_contradicts_itself_is_refused(path: Path, damage: Callable[[MetaNetDef], None], problem: str) -> None:
    meta = exported()
    damage(meta)
    path.write_bytes(file_of(meta))
    with pytest.raises(ModelFormatError, match=f"model.mdl: .*{problem}"):
        dagexec.compile(path)


def test_a_minidb_that_is_no_predictor_is_refused(path: Path) -> None:
    path.write_bytes(tensor("w", W))
    with pytest.raises(ModelFormatError, match="record '!!META_NET_DEF' is missing"):
        dagexec.compile(path)


def test_a_file_cut_off_or_changed_anywhere_is_an_error_of_dagexecs_own(path: Path) -> None:
    whole = path.read_bytes()
    rng = np.random.default_rng(3)
    for place in rng.integers(0, len(whole), 60):
        for content in (whole[:place], whole[:place] + bytes([whole[place] ^ 0x55]) + whole[place + 1 :]):
            path.write_bytes(content)
            try:
                load_predictor(path)
            except DagexecError:
                continue


def test_operators_of_the_file_may_not_write_files(path: Path, tmp_path: Path) -> None:
    meta = exported()
    victim = tmp_path / "victim"
    meta.nets[2].value.op.append(op("Save", ["y"], [], db=str(victim), db_type="minidb", absolute_path=1))
    path.write_bytes(file_of(meta))
    with pytest.raises(AccessError, match="it writes files"):
        dagexec.compile(path)
    assert not victim.exists()
