from __future__ import annotations

import json

import pytest

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
