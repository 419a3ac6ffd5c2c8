"""Commands on CUDA devices, and stress on them."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from dagexec.cli import app
from dagexec.core.errors import DeviceError
from dagexec.stress.session import Session, SessionOptions
from tests.cuda.emulated import emulated, has_gpu

runner = CliRunner()


@pytest.mark.parametrize("arguments", [["run"], ["check"], ["run", "--net-type", "async_dag"]])
def test_commands_take_a_cuda_device(arguments: list[str]) -> None:
    command, *options = arguments
    with emulated(record=False):
        result = runner.invoke(app, [command, "zoo:lenet", "--device", "cuda:0", "--json", *options])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)


@pytest.mark.skipif(has_gpu(), reason="there is a device")
@pytest.mark.parametrize("arguments", [["run", "zoo:lenet"], ["check", "zoo:lenet"], ["stress", "--cases", "1"]])
def test_without_cupy_they_say_what_to_install(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "cupy", None)
    result = runner.invoke(app, [*arguments, "--device", "cuda:0"])
    assert result.exit_code != 0
    assert isinstance(result.exception, DeviceError)
    assert "pip install 'dagexec[cuda12]'" in str(result.exception)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_random_nets_on_a_cuda_device_show_no_defect(asynchronous: bool) -> None:
    with emulated(asynchronous=asynchronous, record=False) as machine:
        session = Session(SessionOptions(seed=5, seconds=None, cases=4, device="cuda:0"))
        report = session.run(lambda _report: None, lambda _report: None)
        assert report.defect is None, report.defect
        assert report.cases == 4
        assert machine.races == []
