"""Peers of a comparison: onnxruntime and OpenVINO run in the same rounds, on the same inputs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import dagexec
from dagexec.analysis.comparison import compare
from dagexec.analysis.peers import peers
from dagexec.errors import DagexecError, SettingError
from dagexec.export import save_onnx
from tests.command_line import Cli


@pytest.mark.slow
@pytest.mark.parametrize("name", ["onnxruntime", "openvino"])
def test_a_peer_computes_what_simplenet_does_and_is_judged_beside_it(name: str) -> None:
    pytest.importorskip(name)
    found = compare("zoo:lenet", net_types=(), workers=(2,), repeat=8, against=(name,))
    (peer,) = found.peers
    assert (peer.name, peer.threads, len(peer.samples_ms)) == (name, 2, 8)
    assert 0 <= peer.largest_difference < 1e-5
    assert peer.verdict is not None
    assert peer.verdict.ratio == pytest.approx(peer.median_ms / found.rows[0].median_ms, rel=0.5)
    assert peer.runtime in found.finding


@pytest.mark.slow
def test_a_file_is_given_to_the_peer_as_it_is(tmp_path: Path, cli: Cli) -> None:
    pytest.importorskip("onnxruntime")
    path = tmp_path / "lenet.onnx"
    save_onnx(dagexec.load_model("zoo:lenet"), path)
    status, shown, _ = cli("compare", str(path), "--repeat", "8", "--net-type", "dag", "--against", "onnxruntime")
    assert status == 0
    assert "onnx-" in shown
    status, shown, _ = cli("compare", str(path), "--repeat", "1", "--against", "onnxruntime", "--json")
    found = json.loads(shown)
    assert found["peers"][0]["largest_difference"] < 1e-5
    assert {"processor", "instruction set", "load", "date", "command", "numpy"} <= set(found["environment"])


def test_an_unknown_peer_and_one_that_refuses_are_errors() -> None:
    with pytest.raises(SettingError, match="unknown peer 'tensorrt': expected onnxruntime or openvino"):
        compare("zoo:lenet", repeat=1, against=("tensorrt",))
    pytest.importorskip("onnxruntime")
    with pytest.raises(DagexecError, match="onnxruntime refuses model 'lenet': NoSuchFile: "):
        peers(("onnxruntime",), "absent.onnx", dagexec.load_model("zoo:lenet"), {}, 1)
