"""`dagexec run` of a PlanDef, binary and as text."""

import json
from pathlib import Path

import numpy as np
import pytest

from dagexec import NetDef, op
from dagexec.core.proto import ExecutionStep, PlanDef
from dagexec.storage.net_file import load_plan, save_message, save_net
from tests.command_line import Cli


def _plan(*outputs: str) -> PlanDef:
    start = NetDef(name="start", op=[op("Copy", ["x"], ["y"])])
    step = NetDef(name="step", type="dag", op=[op("Add", ["y", "x"], ["y"])], external_output=outputs)
    steps = [ExecutionStep(name="first", network=["start"]), ExecutionStep(name="more", network=["step"], num_iter=3)]
    return PlanDef(name="sums", network=[start, step], execution_step=steps)


@pytest.mark.parametrize("name", ["plan.pb", "plan.pbtxt"])
def test_a_plan_runs(cli: Cli, tmp_path: Path, name: str) -> None:
    save_message(_plan("y"), tmp_path / name)
    np.savez(tmp_path / "in.npz", x=np.array([1, 2], np.float32))
    files = ["--input", str(tmp_path / "in.npz"), "--output", str(tmp_path / "out.npz")]
    status, out, _ = cli("run", str(tmp_path / name), *files, "--repeat", "2", "--json")
    assert status == 0
    assert json.loads(out)["outputs"] == {"y": {"dtype": "float32", "shape": [2], "min": 4, "max": 8, "mean": 6}}
    with np.load(tmp_path / "out.npz") as arrays:
        np.testing.assert_array_equal(arrays["y"], [4, 8])
    status, _, err = cli("run", str(tmp_path / name), "--device", "cpu", "--policy", "heft")
    assert status == 2
    assert "whose steps and nets say how they run: leave out --policy, --device" in err


def test_without_outputs_all_that_nets_write_is_shown(cli: Cli, tmp_path: Path) -> None:
    save_message(_plan(), tmp_path / "plan.pb")
    np.savez(tmp_path / "in.npz", x=np.array([1, 2], np.float32))
    _, out, _ = cli("run", str(tmp_path / "plan.pb"), "--input", str(tmp_path / "in.npz"))
    assert "sums: median" in out
    assert "y" in out
    status, _, err = cli("run", str(tmp_path / "plan.pb"))
    assert status == 2
    assert "'x'" in err


@pytest.mark.parametrize("name", ["net.pb", "net.pbtxt"])
def test_a_net_is_no_plan(tmp_path: Path, name: str) -> None:
    for net in (NetDef(), NetDef(name="n", op=[op("Copy", ["x"], ["y"])], type="dag", external_input=["x"])):
        save_net(net, tmp_path / name)
        assert load_plan(tmp_path / name) is None
