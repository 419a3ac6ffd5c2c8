"""compile(device="cpu") runs a net whose device options name devices that are not there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import dagexec
from dagexec import NetDef, op, save_net
from dagexec.cli import app
from dagexec.core.device import CPU, Device
from dagexec.core.host_placement import net_on_host
from dagexec.errors import DeviceError

X = np.array([-1, 2], np.float32)


def gpu_nets() -> tuple[NetDef, NetDef]:
    """An init net and a net as a machine with three GPUs exports them."""
    init = NetDef(name="init", external_output=["w"], device_option=Device("cuda", 0).to_option())
    init.op.append(op("GivenTensorFill", [], "w", shape=[2], values=[3.0, 4.0]))
    net = NetDef(name="n", external_input=["x", "w"], external_output=["y"])
    net.op.extend(
        [
            op("CopyCPUToGPU", "x", "there", device_option="cuda:2"),
            op("Mul", ["there", "w"], "product", device_option="cuda:2", engine="CUDNN"),
            op("CopyGPUToCPU", "product", "y", device_option="cuda:2"),
        ]
    )
    return init, net


@pytest.mark.parametrize("optimize", [True, False])
def test_cpu_runs_what_names_gpus(optimize: bool) -> None:
    with dagexec.compile(gpu_nets(), device="cpu", optimize=optimize) as executor:
        np.testing.assert_array_equal(executor.run({"x": X})["y"], [-3, 8])


def test_without_a_device_the_net_decides() -> None:
    net = NetDef(name="n", external_input=["x"], external_output=["y"])
    net.op.append(op("Relu", "x", "y", device_option="sim:0"))
    with dagexec.compile(net, optimize=False) as executor:
        assert executor.net().graph.device(0) == Device("sim", 0)
    with dagexec.compile(net, optimize=False, device="cpu") as executor:
        assert executor.net().graph.device(0) == CPU


def test_a_net_on_the_host_keeps_the_rest_of_its_options_and_reaches_into_nets() -> None:
    inner = NetDef(name="inner", op=[op("Relu", "x", "y", device_option="cuda:0")])
    net = NetDef(name="n", op=[op("Any", "x", "y", step_net=inner, more=[inner], device_option="cuda:1")])
    net.op[0].device_option.random_seed = 7
    found = net_on_host(net)
    assert found.op[0].device_option.random_seed == 7
    assert Device.from_option(found.op[0].device_option) == CPU
    for one in (found.op[0].arg[0].n, found.op[0].arg[1].nets[0]):
        assert Device.from_option(one.op[0].device_option) == CPU
    assert Device.from_option(net.op[0].device_option) == Device("cuda", 1), "the net that was given is changed"
    assert net_on_host(found) is found


def test_the_command_line_runs_it_with_device_cpu(tmp_path: Path) -> None:
    init, net = gpu_nets()
    save_net(init, tmp_path / "init_net.pb")
    save_net(net, tmp_path / "predict_net.pb")
    np.savez(tmp_path / "in.npz", x=X)
    words = ["run", str(tmp_path), "--device", "cpu", "--input", str(tmp_path / "in.npz")]
    result = CliRunner().invoke(app, [*words, "--output", str(tmp_path / "out.npz")])
    assert result.exit_code == 0, result.output
    np.testing.assert_array_equal(np.load(tmp_path / "out.npz")["y"], [-3, 8])


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(DeviceError, match="device 'gpu' is unknown"):
        dagexec.compile(gpu_nets(), device="gpu")
