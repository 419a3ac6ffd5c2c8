"""Models as Caffe2's files, read back: a predictor's database, and an init net with a predict net."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import dagexec
from dagexec import Model, NetDef, op
from dagexec.binding.parameters import initialized
from dagexec.cli import app
from dagexec.core.model import InputInfo
from dagexec.core.proto import MetaNetDef
from dagexec.errors import ArgumentError, OutputError
from dagexec.export import save_nets, save_predictor
from dagexec.storage.blob_file import read_blob_file

RNG = np.random.default_rng(4)
X, KEYS = RNG.normal(size=(3, 4)).astype(np.float32), np.array([1, 0, 1], np.int64)


def model() -> Model:
    """Two inputs, one of which no operator takes its data from; parameters of several types, one computed."""
    net = NetDef(op=[op("FC", ["x", "w", "b"], "h"), op("Relu", "h", "h"), op("Gather", ["h", "keys"], "y")])
    net.external_input[:] = ["x", "keys", "w", "b", "counts", "flags", "bytes", "wide"]
    parameters = {
        "w": RNG.normal(size=(2, 4)).astype(np.float32),
        "counts": np.array([[3, -4]], np.int32),
        "flags": np.array([True, False]),
        "bytes": np.array([0, 200], np.uint8),
        "wide": np.array(2.5),
    }
    init = NetDef(op=[op("ConstantFill", [], "b", shape=[2], value=0.5)])
    return Model("small", net, init, parameters, {"x": InputInfo(shape=(3, 4)), "keys": InputInfo()}, ("y",))


@pytest.mark.parametrize("name", ["small.mdl", "pair"])
def test_a_model_is_what_it_was(name: str, tmp_path: Path) -> None:
    written, path = model(), tmp_path / name
    (save_predictor if path.suffix else save_nets)(written, path)
    read = dagexec.load_model(path)
    assert (read.name, list(read.inputs), read.outputs) == ("small", ["x", "keys"], ("y",))
    assert [one.SerializeToString() for one in read.net.op] == [one.SerializeToString() for one in written.net.op]
    with dagexec.compile(read, optimize=False) as executor, dagexec.compile(written, optimize=False) as original:
        feeds = {"x": X, "keys": KEYS}
        rows = np.maximum(X @ written.parameters["w"].T + np.float32(0.5), 0)
        np.testing.assert_allclose(executor.run(feeds)["y"], rows[KEYS], rtol=1e-5)
        assert executor.run(feeds)["y"].tobytes() == original.run(feeds)["y"].tobytes()
    found = initialized(read).parameters
    for key, array in {**written.parameters, "b": np.full(2, 0.5, np.float32)}.items():
        assert found[key].dtype == array.dtype
        np.testing.assert_array_equal(found[key], array)


def test_the_files_have_what_caffe2_looks_for(tmp_path: Path) -> None:
    save_predictor(model(), tmp_path / "small.mdl")
    content = read_blob_file("minidb", tmp_path / "small.mdl")
    meta = MetaNetDef.FromString(content.strings["!!META_NET_DEF"])
    nets = {entry.key: entry.value for entry in meta.nets}
    [load] = nets["GLOBAL_INIT_NET_TYPE"].op
    assert (load.type, list(load.input), list(load.output)) == ("Load", ["!!PREDICTOR_DBREADER"], list(content.tensors))
    assert [(one.type, list(one.output)) for one in nets["PREDICT_INIT_NET_TYPE"].op] == [
        ("ConstantFill", [name]) for name in ("x", "keys", "y")
    ]
    assert list(nets["PREDICT_NET_TYPE"].external_input) == ["x", "keys", *content.tensors]
    assert {entry.key: list(entry.value) for entry in meta.blobs}["OUTPUTS_BLOB_TYPE"] == ["y"]
    save_nets(model(), tmp_path / "pair")
    init = NetDef.FromString((tmp_path / "pair" / "init_net.pb").read_bytes())
    assert {one.output[0]: one.type for one in init.op} == {
        "w": "GivenTensorFill", "b": "GivenTensorFill", "counts": "GivenTensorIntFill", "flags": "GivenTensorBoolFill",
        "bytes": "GivenTensorByteStringToUInt8Fill", "wide": "GivenTensorDoubleFill", "x": "GivenTensorFill",
        "keys": "GivenTensorFill",
    }  # fmt: skip
    with pytest.raises(ArgumentError, match="no operator fills a blob with elements of type float16"):
        save_nets(model().changed(parameters={"w": np.zeros(2, np.float16)}), tmp_path / "half")
    (tmp_path / "taken").write_text("")
    with pytest.raises(OutputError, match="taken"):
        save_nets(model(), tmp_path / "taken")


@pytest.mark.parametrize("name", ["lenet.mdl", "lenet"])
def test_the_command_line_writes_and_reads_them(name: str, tmp_path: Path) -> None:
    folder, path = Path(__file__).parents[1] / "fixtures" / "caffe2" / "lenet", tmp_path / name
    result = CliRunner().invoke(app, ["export", str(folder), str(path)])
    assert result.exit_code == 0, result.output
    with np.load(folder / "inputs.npz") as inputs:
        feeds = dict(inputs)
    with dagexec.compile(folder) as one, dagexec.compile(path) as other:
        expected, found = one.run(feeds), other.run(feeds)
    assert {key: array.tobytes() for key, array in found.items()} == {k: a.tobytes() for k, a in expected.items()}
