from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest
from onnx import parser as onnx_parser

from dagexec.core.choices import choices
from dagexec.ops.engines.onednn.binding import library
from tests.command_line import Cli

needs_onednn = pytest.mark.skipif(library() is None, reason="oneDNN is not installed")


@pytest.fixture(autouse=True)
def nothing_measured() -> None:
    """Other tests of this process may have measured the same network."""
    choices.forget()


def test_the_operators_that_run_are_shown_with_what_was_chosen(cli: Cli) -> None:
    status, out, _ = cli("inspect", "zoo:lenet", "--compiled", "--json")
    assert status == 0
    found = json.loads(out)["compiled"]
    assert [row["type"] for row in found["operators"]][-1] == "Softmax"
    assert all(row["outputs"] for row in found["operators"])
    assert any(line.startswith("schedule: net type ") for line in found["choices"])
    assert any("1 worker(s): predicted " in line and "(estimated)" in line for line in found["choices"])
    fused = [row for row in found["operators"] if row["type"] == "FusedFC"]
    assert [row["post_ops"] for row in fused] == [["relu"]]


@needs_onednn
def test_engines_and_orders_are_shown(cli: Cli) -> None:
    status, out, _ = cli("inspect", "zoo:lenet", "--compiled")
    assert status == 0
    table = out[out.index("compiled") :]
    assert "ONEDNN" in table
    assert "NCHW to NHWC" in table
    assert "layout: NHWC (estimated)" in table


def test_it_says_what_a_new_size_means_to_each_operator(tmp_path: Path, cli: Cli) -> None:
    model = onnx_parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17]>
        sized (float[rows, 8] x, float[8, 4] w)
        => (float[rows, 2, 2] y, float[8, 4] v, int64[1] length, int64[2, a] found)
        <int64[3] last = {-1, 2, 2}, int64[1] zero = {0}> {
            v = Exp (w)
            h = MatMul (x, v)
            y = Reshape (h, last)
            sizes = Shape (h)
            length = Gather <axis = 0> (sizes, zero)
            found = NonZero (h)
        }""")
    onnx.save(model, tmp_path / "sized.onnx")
    status, out, _ = cli("inspect", str(tmp_path / "sized.onnx"), "--compiled", "--json", "--shape", "x=5,8")
    assert status == 0
    operators = json.loads(out)["compiled"]["operators"]
    means = {one["outputs"][0]: one["new_size"] for one in operators}
    assert means["v"] == "kept"
    assert means["y"] == "prepared"
    assert means["length"] == "computed"
    assert means["found"] == "prepared in the run"
    fixed = json.loads(cli("inspect", "zoo:lenet", "--compiled", "--json")[1])["compiled"]["operators"]
    assert {one["new_size"] for one in fixed} <= {"", "prepared", "kept"}
