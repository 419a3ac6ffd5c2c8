"""`dagexec build`, and the commands that take what it writes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import dagexec
from tests.command_line import Cli


def test_a_plan_is_built_and_run_with_the_bytes_of_the_model(cli: Cli, tmp_path: Path) -> None:
    plan, outputs = tmp_path / "lenet.dagexec", [tmp_path / "model.npz", tmp_path / "plan.npz"]
    status, out, _ = cli("build", "zoo:lenet", "-o", str(plan), "--shape", "data=2,1,28,28", "--net-type", "simple")
    assert (status, out) == (0, f"lenet: a plan of {plan.stat().st_size:,} bytes written to {plan}\n")
    for source, output in zip(("zoo:lenet", str(plan)), outputs, strict=True):
        assert cli("run", source, "--shape", "data=3,1,28,28", "--output", str(output))[0] == 0
    with np.load(outputs[0]) as model, np.load(outputs[1]) as opened:
        assert model["softmax"].tobytes() == opened["softmax"].tobytes()
    assert json.loads(cli("run", str(plan), "--json")[1])["net_type"] == "simple"
    with dagexec.open(plan) as executor:
        assert executor.net_type == "simple"


@pytest.mark.slow
def test_the_model_of_a_plan_is_inspected_and_compared(cli: Cli, tmp_path: Path) -> None:
    plan = tmp_path / "lenet.dagexec"
    cli("build", "zoo:lenet", "-o", str(plan))
    own, other = (json.loads(cli("inspect", source, "--json")[1]) for source in ("zoo:lenet", str(plan)))
    assert own == other
    assert cli("compare", str(plan), "--repeat", "1", "--num-workers", "1")[0] == 0


def test_another_name_and_a_damaged_plan_are_refused(cli: Cli, tmp_path: Path) -> None:
    status, _, err = cli("build", "zoo:lenet", "-o", str(tmp_path / "lenet.plan"))
    assert (status, "the name of a plan ends with .dagexec" in err) == (2, True)
    (tmp_path / "x.dagexec").write_bytes(b"no plan")
    status, _, err = cli("run", str(tmp_path / "x.dagexec"))
    assert (status, "no plan, or a damaged one" in err) == (2, True)
    assert [path.name for path in tmp_path.iterdir()] == ["x.dagexec"]
