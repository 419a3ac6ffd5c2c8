"""What the command line tells of operators that other runtimes compute."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from tests.command_line import Cli

pytestmark = pytest.mark.usefixtures("tables_are_foreign")


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A file with a node that dagexec has no operator for, between two that it has."""
    nodes = [
        helper.make_node("Relu", ["x"], ["a"]),
        helper.make_node("Binarizer", ["a"], ["b"], name="steps", domain="ai.onnx.ml", threshold=0.5),
        helper.make_node("Neg", ["b"], ["y"]),
    ]
    inputs, outputs = ([helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 3])] for name in "xy")
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("ai.onnx.ml", 1)]
    path = tmp_path / "model.onnx"
    onnx.save(helper.make_model(helper.make_graph(nodes, "net", inputs, outputs), opset_imports=opsets), path)
    return str(path)


def test_inspect_says_which_they_are_and_why(cli: Cli, model: str) -> None:
    text = cli("inspect", model)[1]
    assert "operator 1, OnnxSession, is computed by another runtime:" in text
    assert "Binarizer 'steps': there is no converter for it" in text
    found = json.loads(cli("inspect", model, "--json")[1])
    assert [len(row["foreign"]) for row in found["operators"]] == [0, 1, 0]


@pytest.mark.slow
def test_runs_and_comparisons_say_what_share_of_the_time_they_take(cli: Cli, model: str, tmp_path: Path) -> None:
    ending = "of the operators' time was spent in other runtimes"
    for arguments in (["run", model, "--trace", str(tmp_path / "trace.json")], ["compare", model, "--repeat", "1"]):
        output = " ".join(cli(*arguments)[1].split())
        share = float(output.partition(f"% {ending}")[0].split()[-1])
        assert 0 < share < 100


def test_models_without_them_are_told_nothing(cli: Cli, tmp_path: Path) -> None:
    assert "other runtimes" not in cli("run", "zoo:lenet", "--trace", str(tmp_path / "trace.json"))[1]
