"""What is said when there is no CUDA device to use, with the command that mends it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from dagexec.core.device import Device
from dagexec.core.runtime import install_runtime, runtime_of
from dagexec.devices.cuda.binding import installed
from dagexec.devices.cuda.errors import device_error, is_sticky
from dagexec.errors import DeviceError, ResourceError
from tests.cuda.emulated import emulated


class CudaError(RuntimeError):
    """As `cupy.cuda.runtime.CUDARuntimeError`."""

    def __init__(self, status: int, text: str = "some error") -> None:
        super().__init__(text)
        self.status = status


@contextmanager
def machine(*, status: int = 0, driver: int = 12040, version: str = "14.2.0", count: int = 0) -> Iterator[None]:
    """Within it, CuPy finds `count` devices, or fails with `status`."""

    def devices() -> int:
        if status:
            raise CudaError(status)
        return count

    runtime = SimpleNamespace(
        getDeviceCount=devices,
        driverGetVersion=lambda: driver,
        runtimeGetVersion=lambda: 13000,
        getDeviceProperties=lambda index: {"name": b"H100 number %d" % index},
        CUDARuntimeError=CudaError,
    )
    with installed(cupy=SimpleNamespace(__version__=version, cuda=SimpleNamespace(runtime=runtime))):
        for index in range(9):
            install_runtime(Device("cuda", index), None)
        yield


def message(device: str = "cuda:0") -> str:
    """What a runtime of the device says when it is made."""
    with pytest.raises(DeviceError) as caught:
        runtime_of(Device.parse(device))
    return str(caught.value)


def test_no_driver_is_told_from_one_that_is_too_old() -> None:
    with machine(status=35, driver=0):
        assert "there is no NVIDIA driver" in message()
        assert "apt-get install nvidia-driver" in message()
        assert "docker run --gpus all" in message()
    with machine(status=35, driver=12040):
        assert "the NVIDIA driver serves CUDA 12.4 and CuPy needs CUDA 13.0; upgrade the driver with" in message()
        assert "pip install 'cupy-cuda12x>=14'" in message()


def test_no_visible_device_names_the_variable_that_hides_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for settings in ({"status": 100}, {"count": 0}):
        with machine(**settings):
            assert message().endswith("CUDA_VISIBLE_DEVICES is ''; let it see all with: unset CUDA_VISIBLE_DEVICES")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    with machine(status=100):
        assert "CUDA sees no device on this machine; check with: nvidia-smi" in message()
    with machine(status=803):
        assert message() == "CUDA cannot be used: some error; check with: nvidia-smi"


def test_a_device_that_does_not_exist_is_named_beside_those_that_do() -> None:
    there = "cuda:0 (H100 number 0), cuda:1 (H100 number 1)"
    with machine(count=2):
        listed = "list them with: nvidia-smi --list-gpus"
        assert message("cuda:7") == f"device cuda:7 does not exist; this machine has 2: {there}; {listed}"
        with pytest.raises(DeviceError, match="cuda:2 does not exist"):
            runtime_of(Device("cuda", 2))
    with emulated():
        assert f"has 2: cuda:0 (emulated device), cuda:1 (emulated device); {listed}" in message("cuda:2")


def test_an_index_beyond_what_a_net_can_name_is_refused() -> None:
    for text in ("cuda:99999999999", "sim:2147483648"):
        with pytest.raises(DeviceError, match=r"device .* is unknown; the largest index is 2147483647"):
            Device.parse(text)
    assert Device.parse("cuda:2147483647").to_option().device_id == 2147483647


def test_errors_of_cuda_become_ours_and_others_stay() -> None:
    device = Device("cuda", 1)
    cases: list[tuple[Any, type[BaseException], str]] = [
        (CudaError(2, "out of memory"), ResourceError, "cuda:1: out of memory: conv: out of memory"),
        (MemoryError("Out of memory allocating 5 bytes"), ResourceError, "cuda:1: out of memory: conv"),
        (CudaError(719, "launch failure"), DeviceError, "the process has to be restarted"),
        (CudaError(900, "capturing"), DeviceError, "cuda:1: conv: cannot be part of a capture"),
        (CudaError(1, "invalid argument"), DeviceError, "cuda:1: conv: invalid argument"),
    ]
    for error, kind, text in cases:
        found = device_error(device, error, "conv")
        assert type(found) is kind
        assert text in str(found)
        assert found.__cause__ is error
    for error in (ValueError("x"), DeviceError("ours")):
        assert device_error(device, error, "conv") is error
    assert [is_sticky(status) for status in (700, 719, 2, 600, 900, None)] == [True, True] + [False] * 4


def test_an_old_cupy_is_named_with_the_command_that_brings_a_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from dagexec.devices.cuda import binding

    old = SimpleNamespace(__version__="13.4.1")
    monkeypatch.setattr(binding.importlib, "import_module", lambda name: old)
    with installed():
        binding._loaded.clear()
        with pytest.raises(DeviceError, match=r"CuPy 13.4.1 is too old, 14.0 or newer is needed.*'cupy-cuda13x>=14'"):
            binding.cupy()
