"""Pipelines in TOML files, and what the command line does with them."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest

import dagexec
from dagexec.errors import DagexecError, ModelFormatError, PipelineError
from dagexec.export import save_onnx
from tests.command_line import Cli
from tests.pipelines.layers import dense, dense_by_formula

A, B = dense("a", 8, 16, 1), dense("b", 16, 16, 2)
STEPS = """
def mean(first, second):
    return (first + second) / 2
"""
DESCRIPTION = """
[outputs]
result = "mean/both"
second = "C"

[stages.mean]
python = "own_steps.py:mean"
inputs = ["B/y", "C"]
outputs = { both = "float32[N, 16]" }

[stages.C]
model = "b.onnx"
inputs = "A"

[stages.B]
model = "b.onnx"
inputs = { x = "A/y" }

[stages.A]
model = "a.onnx"
inputs = { x = "data" }

[inputs]
data = "float32[N, 8]"
"""
X = np.random.default_rng(0).standard_normal((3, 8)).astype(np.float32)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_onnx(A, tmp_path / "a.onnx")
    save_onnx(B, tmp_path / "b.onnx")
    (tmp_path / "own_steps.py").write_text(STEPS)
    (tmp_path / "diamond.toml").write_text(DESCRIPTION)
    return tmp_path


def test_stages_may_stand_in_any_order(folder: Path) -> None:
    p = dagexec.load_pipeline(folder / "diamond.toml")
    assert p.name == "diamond"
    assert p.stages.index("A") == 0
    with dagexec.compile(p) as executor:
        found = executor.run({"data": X})
    expected = dense_by_formula(B, dense_by_formula(A, X))
    np.testing.assert_allclose(found["result"], expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(found["result"], found["second"])


def test_a_step_that_is_edited_within_the_second_is_the_new_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    steps = folder / "own_steps.py"

    def result() -> np.ndarray:
        with dagexec.compile(dagexec.load_pipeline(folder / "diamond.toml")) as executor:
            return executor.run({"data": X})["result"]

    before, stat = result(), steps.stat()
    steps.write_text(STEPS.replace("/ 2", "* 2"))
    os.utime(steps, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert steps.stat().st_size == stat.st_size
    np.testing.assert_array_equal(result(), before * 4)
    assert not (folder / "__pycache__").exists()


@pytest.mark.slow
def test_the_command_line_takes_a_description_for_a_model(folder: Path, cli: Cli) -> None:
    file, shape = str(folder / "diamond.toml"), "data=3,8"
    trace, output, feeds = folder / "trace.json", folder / "out.npz", folder / "in.npz"
    np.savez(feeds, data=X)
    status, _, errors = cli("run", file, "--input", str(feeds), "--output", str(output), "--trace", str(trace))
    assert (status, errors) == (0, errors)
    expected = dense_by_formula(B, dense_by_formula(A, X))
    np.testing.assert_allclose(np.load(output)["result"], expected, rtol=1e-4, atol=1e-4)
    spans = json.loads(trace.read_text())["traceEvents"]
    names = {span["args"]["operator"] for span in spans if span.get("cat") == "operator"}
    assert {name.split("/")[0] for name in names} == {"A", "B", "C", "mean"}
    status, text, _ = cli("check", file, "--shape", shape, "--json")
    assert (status, json.loads(text)["holds"]) == (0, True)
    status, text, _ = cli("compare", file, "--shape", shape, "--repeat", "1", "--json")
    assert status == 0
    status, text, _ = cli("inspect", file, "--shape", shape)
    assert status == 0
    assert "Python" in text


WRONG = {
    "cycle: A -> C -> A|cycle: C -> A -> C": ('inputs = { x = "data" }', 'inputs = { x = "C/y" }'),
    r"stage 'A': 'date' is none of the inputs \['data'\] and of no stage of": ('x = "data"', 'x = "date"'),
    r"stage 'A': the model has no input 'z'; it has \['x'\]": ('x = "data"', 'x = "data", z = "data"'),
    r"stage 'mean': stage 'B' has no output 'z'; it has \['y'\]": ('"B/y"', '"B/z"'),
    r"stage 'mean': own_steps.py has no function 'median'": (":mean", ":median"),
    r"stage 'mean': none.py cannot be imported: FileNotFoundError": ("own_steps.py", "none.py"),
    r"stage 'mean': no_such_module cannot be imported: ModuleNotFoundError": ("own_steps.py", "no_such_module"),
    r"stage 'mean': python must be \"module:function\" or": ("own_steps.py:mean", "mean"),
    r"stage 'mean': unknown keys \['rowwise'\]; known are": ('"C"]', '"C"]\nrowwise = true'),
    r"stage 'mean': needs outputs": ('outputs = { both = "float32[N, 16]" }', ""),
    r"stage 'mean': needs one of the keys model and python, found": ("python =", "pythons ="),
    r"needs a table 'inputs', found None": ('[inputs]\ndata = "float32[N, 8]"', ""),
    r"unknown keys \['stage'\]": ("[stages.B]", "[stage.B]"),
    r"stage 'B': expected \"input\", \"stage\" or \"stage/output\", found 3": ('x = "A/y"', "x = 3"),
    r"input 'data': expected a type": ('"float32[N, 8]"', "3"),
    r"output 'second': 'D' is none of the inputs": ('second = "C"', 'second = "D"'),
    r"stage 'A': model must be a file": ('"a.onnx"', "3"),
}


@pytest.mark.parametrize("message", WRONG)
def test_a_wrong_description_says_what_is_wrong(folder: Path, message: str) -> None:
    old, new = WRONG[message]
    assert old in DESCRIPTION
    (folder / "wrong.toml").write_text(DESCRIPTION.replace(old, new))
    with pytest.raises(PipelineError, match=rf"^pipeline 'wrong': .*({message})"):
        dagexec.load_pipeline(folder / "wrong.toml")


def test_a_file_that_is_no_description_is_one_line_on_the_command_line(folder: Path, cli: Cli) -> None:
    (folder / "broken.toml").write_text("name = ")
    for name in ("broken.toml", "missing.toml"):
        with pytest.raises(ModelFormatError, match=name):
            dagexec.load_pipeline(folder / name)
        status, _, errors = cli("run", str(folder / name))
        assert status == 2
        assert "Traceback" not in errors


def test_a_missing_model_is_named(folder: Path) -> None:
    (folder / "b.onnx").unlink()
    with pytest.raises(DagexecError, match=r"b\.onnx: no such file"):
        dagexec.load_pipeline(folder / "diamond.toml")


def test_a_description_may_be_a_part_of_another_file(folder: Path) -> None:
    p = dagexec.Pipeline.from_dict(
        {
            "name": "part",
            "inputs": {"data": "float32"},
            "stages": {"net": {"model": "zoo:lenet", "inputs": "data"}},
            "outputs": {"scores": "net"},
        },
        folder,
    )
    assert str(p.as_model().inputs["data"]).startswith("float32[")
