"""Commands on CUDA devices, and stress on them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import pytest
from typer.testing import CliRunner

from dagexec.cli import app
from dagexec.core.device import Device
from dagexec.core.runtime import install_runtime, installed_runtime
from dagexec.devices.cuda.binding import _loaded, cupy, installed
from dagexec.stress.session import Session, SessionOptions
from tests.command_line import Cli
from tests.cuda.emulated import emulated
from tests.cuda.emulated.errors import CUDARuntimeError

runner = CliRunner()


@pytest.mark.parametrize("arguments", [["run"], ["check"], ["run", "--net-type", "async_dag"]])
def test_commands_take_a_cuda_device(arguments: list[str]) -> None:
    command, *options = arguments
    with emulated(record=False):
        result = runner.invoke(app, [command, "zoo:lenet", "--device", "cuda:0", "--json", *options])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)


COMMANDS = [
    ["run", "zoo:lenet"],
    ["check", "zoo:lenet"],
    ["inspect", "zoo:lenet", "--compiled"],
    ["stress", "--cases", "1"],
]
every_command = pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])


def refused(cli: Cli, command: list[str], device: str = "cuda:0") -> str:
    """The one message of a command that ends with status 2."""
    status, out, err = cli(*command, "--device", device)
    assert status == 2
    assert out == ""
    assert "Traceback" not in err
    assert err.startswith("dagexec: DeviceError: ")
    return " ".join(err.split())


@contextmanager
def nothing_loaded() -> Iterator[None]:
    """Within it, it is as if this process had not asked for CUDA yet."""
    device = Device("cuda", 0)
    runtime = installed_runtime(device)
    with installed():
        _loaded.clear()
        install_runtime(device, None)
        try:
            yield
        finally:
            install_runtime(device, runtime)


@every_command
def test_no_cupy_is_one_message_with_the_command_that_installs_it(
    command: list[str], cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with nothing_loaded():
        assert "pip install 'cupy-cuda12x>=14'" in refused(cli, command)


@every_command
def test_an_old_cupy_is_one_message_with_the_command_that_replaces_it(
    command: list[str], cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = ModuleType("cupy")
    old.__version__ = "13.6.0"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cupy", old)
    with nothing_loaded():
        message = refused(cli, command)
    assert "CuPy 13.6.0 is too old, 14.0 or newer is needed" in message
    assert "pip install 'cupy-cuda12x>=14'" in message


@every_command
@pytest.mark.parametrize(
    ("status", "driver", "visible", "wanted"),
    [
        (35, 0, None, ["there is no NVIDIA driver", "sudo apt-get install nvidia-driver-", "docker run --gpus all"]),
        (
            35,
            11040,
            None,
            ["serves CUDA 11.4 and CuPy needs CUDA 12.9", "upgrade the driver with: sudo apt-get install"],
        ),
        (100, 12090, "", ["CUDA_VISIBLE_DEVICES is ''", "unset CUDA_VISIBLE_DEVICES"]),
        (100, 12090, None, ["CUDA sees no device", "nvidia-smi"]),
        (802, 12090, None, ["CUDA cannot be used", "nvidia-smi"]),
    ],
    ids=["no driver", "old driver", "hidden", "no device", "not ready"],
)
def test_no_driver_and_no_device_say_what_mends_them(
    command: list[str], status: int, driver: int, visible: str | None, wanted: list[str],
    cli: Cli, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def no_devices() -> int:
        raise CUDARuntimeError(status)

    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with emulated(record=False):
        monkeypatch.setattr(cupy().cuda.runtime, "getDeviceCount", no_devices)
        monkeypatch.setattr(cupy().cuda.runtime, "driverGetVersion", lambda: driver)
        message = refused(cli, command)
    for part in wanted:
        assert part in message


@every_command
def test_a_device_that_is_not_there_is_told_with_those_that_are(command: list[str], cli: Cli) -> None:
    with emulated(record=False):
        message = refused(cli, command, "cuda:7")
    assert "device cuda:7 does not exist; this machine has 2: cuda:0 (emulated device), cuda:1" in message
    assert "nvidia-smi --list-gpus" in message


def test_inspect_shows_what_runs_on_the_device(cli: Cli) -> None:
    with emulated(record=False):
        status, out, err = cli("inspect", "zoo:lenet", "--compiled", "--device", "cuda:0", "--json")
    assert status == 0, err
    operators = json.loads(out)["compiled"]["operators"]
    assert any("Conv" in row["type"] for row in operators)
    assert not any(row["engine"] == "ONEDNN" for row in operators)


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [False, True])
def test_random_nets_on_a_cuda_device_show_no_defect(asynchronous: bool) -> None:
    with emulated(asynchronous=asynchronous, record=False) as machine:
        session = Session(SessionOptions(seed=5, seconds=None, cases=4, device="cuda:0"))
        report = session.run(lambda _report: None, lambda _report: None)
        assert report.defect is None, report.defect
        assert report.cases == 4
        assert machine.races == []
